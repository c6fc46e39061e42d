"""The command `jaxflash verify`."""

import argparse
import sys
import time
from typing import Any

from jaxflash import verify
from jaxflash.combinations import SMALL
from jaxflash.config import override, train_preset
from jaxflash.flags import assignments
from sharding.mesh import parse_mesh


def add(commands: Any) -> None:
    """Adds the command to a parser's."""
    text = "Train on every split of the devices, and compare with one device: no mesh may change the mathematics."
    parser = commands.add_parser("verify", help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=_run, cpu_devices=None)  # it splits the CPU in processes of its own
    parser.add_argument("--devices", type=int, default=8, metavar="N", help="how many the CPU becomes (default 8)")
    parser.add_argument("--mesh", help="only this one, for instance stage=2,fsdp=2,tensor=2")
    parser.add_argument("--preset", help="model and defaults (default: one of 60,000 parameters)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for instance model.n_layers=6")
    parser.add_argument("--steps", type=int, default=SMALL.steps, help=f"of training (default {SMALL.steps})")
    parser.add_argument("--workers", type=int, metavar="N", help="processes at a time (default: one a core, to 8)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with every leaf")


def _run(args: argparse.Namespace) -> None:
    config = SMALL if args.preset is None else train_preset(args.preset)
    config = override(config, assignments(args.set, reserved=frozenset({"mesh", "steps"})) | {"steps": args.steps})
    mesh = None if args.mesh is None else parse_mesh(args.mesh)
    findings, start = [], time.monotonic()
    for finding in verify.verify(config, devices=args.devices, mesh=mesh, workers=args.workers):
        findings.append(finding)
        if not args.json:
            print(finding, flush=True)
    seconds = time.monotonic() - start
    print(verify.as_json(findings, seconds) if args.json else verify.summary(findings, seconds))
    sys.exit(not verify.proven(findings))

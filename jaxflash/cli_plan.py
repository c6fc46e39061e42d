"""The command `jaxflash plan`."""

import argparse
import dataclasses
import shlex
from typing import Any, get_args

from jaxflash.config import Remat, override, train_preset
from jaxflash.cost import Machine
from jaxflash.flags import assignments, size
from jaxflash.plan import plan
from sharding.cost import Links

_ROWS = 8  # a device, where no --batch-size is given: what fills an H200 with `1b`
_H200 = Machine()


def add(commands: Any) -> None:
    """Adds the command to a parser's."""
    text = "Which meshes a run fits on, what it would hold, send and take there, and why the others are out."
    parser = commands.add_parser("plan", help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=_run, cpu_devices=None)  # no device is touched
    parser.add_argument("--preset", required=True, help="model and defaults, for instance llama3-8b")
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="how many; a mesh has them all")
    parser.add_argument("--batch-size", type=int, metavar="N", help=f"rows a step (default: {_ROWS} a GPU)")
    parser.add_argument("--seq-len", type=int, metavar="N", help="tokens a row (default: the preset's)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="packing=documents")
    parser.add_argument("--remat", nargs="+", choices=get_args(Remat), help="only these (default: any)")
    machine = parser.add_argument_group("the machine (default: H200s; where the figures are from: jaxflash/cost.py)")
    machine.add_argument("--memory", type=size, default=_H200.memory, help="of a GPU (default 141GB)")
    machine.add_argument("--usable", type=float, default=_H200.usable, help="part of it that JAX takes (default 0.75)")
    machine.add_argument("--peak", type=float, default=_H200.peak, help="FLOP/s (default 989e12)")
    machine.add_argument(
        "--efficiency",
        type=float,
        default=_H200.efficiency,
        help="part of the peak without collectives (default 0.525)",
    )
    machine.add_argument("--nvlink", type=size, default=_H200.links.within, help="a second (default 250GB)")
    machine.add_argument("--network", type=size, default=_H200.links.between, help="a second and GPU (default 50GB)")
    machine.add_argument("--gpus-per-host", type=int, default=_H200.links.per_host, metavar="N", help="default 8")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="meshes to show (default 10)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with every mesh")


def _run(args: argparse.Namespace) -> None:
    owned = frozenset({"batch_size", "seq_len", "model.remat"})
    chosen = frozenset({"mesh", "accumulate", "zero", "schedule"})
    changes: dict[str, Any] = assignments(args.set, reserved=owned, chosen=chosen)
    changes["batch_size"] = _ROWS * max(args.gpus, 1) if args.batch_size is None else args.batch_size
    if args.seq_len is not None:
        changes["seq_len"] = args.seq_len
    links = Links(within=args.nvlink, between=args.network, per_host=args.gpus_per_host)
    figures = {name: getattr(args, name) for name in ("memory", "usable", "peak", "efficiency")}
    machine = dataclasses.replace(_H200, **figures, links=links)
    config = override(train_preset(args.preset), changes)
    found = plan(config, devices=args.gpus, machine=machine, remats=args.remat or get_args(Remat))
    if args.json:
        print(found.to_json())
        return
    print(found.table(args.top))
    if found.fits:
        print("fastest: " + shlex.join(["jaxflash", "train", "--preset", args.preset, *found.fits[0].flags()]))

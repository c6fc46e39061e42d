"""Flags that more than one command has, and values of flags: assignments, sizes, numbers of devices."""

import argparse
import dataclasses
import re
from collections.abc import Sequence
from typing import Any, get_args

from jaxflash.config import DType
from jaxflash.language_model import LanguageModel, load

DTYPES = get_args(DType)

_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def assignments(
    items: Sequence[str],
    *,
    reserved: frozenset[str] = frozenset(),
    chosen: frozenset[str] = frozenset(),
    flag: str = "--set",
    example: str = "model.n_layers=2",
) -> dict[str, str]:
    """What `--set KEY=VALUE` said; refused are keys that have a flag of their own, or that the command itself chooses.

    Raises ValueError for these, and for what is not KEY=VALUE.
    """
    pairs = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"{flag} {item!r}: must be KEY=VALUE, for instance {example}.")
        if key in reserved:
            own = key.rpartition(".")[2].replace("_", "-")
            raise ValueError(f"{flag} {item!r}: {key} has a flag of its own here. Use --{own} {value}.")
        if key in chosen:
            raise ValueError(f"{flag} {item!r}: {key} is what this command chooses. Leave it out.")
        pairs[key] = value
    return pairs


def size(text: str) -> float:
    """A positive number of bytes, with a unit or without.

    >>> size("141GB"), size("1.5 GiB"), size("5e10")
    (141000000000.0, 1610612736.0, 50000000000.0)
    """
    match = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*([kMGT]?i?)B?\s*", text)
    if match is None or match[2] not in _UNITS or match[1].count(".") > 1 or not float(match[1]) > 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive number of bytes, for instance 141GB")
    return float(match[1]) * _UNITS[match[2]]


def numbers(text: str) -> list[int]:
    """Numbers of devices.

    >>> numbers("0,3")
    [0, 3]
    """
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers of GPUs, for instance 0,1")
    return [int(number) for number in text.split(",")]


def command(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    """The parser of a command that runs on the devices of this process."""
    parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=run)
    parser.add_argument("--cpu-devices", type=int, metavar="N", help="split the CPU into N devices, to try a mesh")
    return parser


def add_fields(parser: argparse._ActionsContainer, config: type, *, skip: frozenset[str]) -> None:
    """A flag for every field of a configuration but those."""
    for field in dataclasses.fields(config):
        if field.name not in skip:
            default = "" if field.default in (dataclasses.MISSING, None) else f" (default {field.default})"
            parser.add_argument(f"--{field.name.replace('_', '-')}", metavar="X", help=f"{field.name}{default}")


def given(args: argparse.Namespace, config: type, *, skip: frozenset[str]) -> dict[str, Any]:
    """The fields whose flags were given."""
    names = [f.name for f in dataclasses.fields(config) if f.name not in skip]
    return {n: getattr(args, n) for n in names if getattr(args, n) is not None}


def add_source(parser: argparse.ArgumentParser) -> None:
    """Flags of the model that a command begins with, and how it is loaded."""
    parser.add_argument("--model", required=True, metavar="PATH", help="a run's folder, a Hugging Face folder, a .gguf")
    parser.add_argument(
        "--adapter", metavar="DIR", help="adapters of the model, in a folder as peft has it (quantize merges them)"
    )
    parser.add_argument("--step", type=int, help="which checkpoint of a run (default: the newest)")
    parser.add_argument("--param-dtype", choices=DTYPES, help="default: what holds the files' values exactly")


def add_compute_dtype(parser: argparse.ArgumentParser) -> None:
    """Of what is computed."""
    parser.add_argument("--compute-dtype", choices=DTYPES, help="default: the model's")


def add_keep_fp8(parser: argparse.ArgumentParser) -> None:
    """Whether products with FP8 weights round activations, too."""
    text = "multiply FP8 weights as they are, by activations in 8 bits (W8A8); default: by the numbers they stand for"
    parser.add_argument("--keep-fp8", action="store_true", help=text)


def load_source(args: argparse.Namespace) -> LanguageModel:
    """The model that those flags name."""
    kept = getattr(args, "keep_fp8", False)
    model = load(args.model, adapter=args.adapter, step=args.step, param_dtype=args.param_dtype, keep_fp8=kept)
    compute_dtype = getattr(args, "compute_dtype", None) or model.config.compute_dtype
    return dataclasses.replace(model, config=dataclasses.replace(model.config, compute_dtype=compute_dtype))

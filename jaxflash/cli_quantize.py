"""The command `jaxflash quantize`: to 4 bits, or to 8-bit floats."""

import argparse
import dataclasses
import shutil
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from jaxflash.adapters import has_adapters
from jaxflash.calibration import calibration_batches
from jaxflash.config import override
from jaxflash.finetune import merge
from jaxflash.flags import add_compute_dtype, add_fields, add_source, command, given, load_source
from jaxflash.hf.folder import check_room
from jaxflash.hf.pieces import check_scalings, check_sizes
from jaxflash.hf.save import FileFormat
from jaxflash.hf.scheme import FP8
from jaxflash.language_model import save
from jaxflash.quantize import METHODS, check_method, quantize
from jaxflash.quantize_report import fp8_summary, summary, write_report
from pallas_kernels.fp8.spec import SCALINGS
from quant.formats.api import WRITTEN
from quant.gptq import ORDERS
from quant.recipe import STORED_BITS, Fp8Recipe, Recipe

_DENSE, _COMPRESSED = "dense", "compressed-tensors"
_HOW: dict[str, Any] = {"method": "gptq", "order": "static", "damping": 0.05, "mse": "true", "propagate_error": 0.0}
_TEXT: dict[str, Any] = {"rows": 64, "seq_len": 512, "batch_size": 8}


def add(commands: Any) -> None:
    """Adds the command to a parser's."""
    parser = command(commands, "quantize", _run, "Quantise a model, or go on where a kill stopped.")
    add_source(parser)
    add_compute_dtype(parser)
    parser.add_argument("--out", required=True, metavar="DIR", help="a new folder")
    formats = (
        f"of the files in --out (default {_COMPRESSED}; dense, which holds the numbers, of other bits than 4); {FP8}: "
        "8-bit floats in blocks of 128 x 128, as DeepSeek has them"
    )
    parser.add_argument("--format", choices=(*WRITTEN, FP8, _DENSE), help=formats)
    scaling = (
        f"8-bit floats with scales by this (default block, with --format {FP8}; {_COMPRESSED} calls a row channel)"
    )
    parser.add_argument("--scaling", choices=SCALINGS, help=scaling)
    bits = parser.add_argument_group("of 4 bits (8-bit floats are rounded to nearest and need no text)")
    bits.add_argument("--method", help=f"{', '.join(METHODS)} (default {_HOW['method']})")
    bits.add_argument("--calibration", nargs="+", metavar="FILE", help=".txt or .jsonl files, folders, globs")
    rows = f"rows of calibration, from all over the text (default {_TEXT['rows']})"
    bits.add_argument("--rows", type=int, help=rows)
    bits.add_argument("--seq-len", type=int, help=f"tokens a row (default {_TEXT['seq_len']})")
    bits.add_argument("--batch-size", type=int, help=f"rows at a time (default {_TEXT['batch_size']})")
    bits.add_argument("--order", help=f"of rows in GPTQ: {', '.join(ORDERS)} (default {_HOW['order']})")
    bits.add_argument("--damping", type=float, help=f"of GPTQ (default {_HOW['damping']}; the paper's is 0.01)")
    mse = f"of GPTQ: ranges of groups by least squares (default {_HOW['mse']}; the paper's are whole: false)"
    bits.add_argument("--mse", choices=("true", "false"), help=mse)
    share = "of its inputs' error that each weight is corrected for, 0 (off, the default) to 1; QEP's is 0.5"
    bits.add_argument("--propagate-error", type=float, metavar="SHARE", help=share)
    add_fields(bits, Recipe, skip=frozenset())


def _run(args: argparse.Namespace) -> None:
    out = Path(args.out).expanduser()
    if args.format == FP8 or args.scaling is not None:
        _to_fp8(args, out)
    else:
        _to_bits(args, out)
    Console(stderr=True).print(f"done, in {args.out}/", highlight=False)


def _to_fp8(args: argparse.Namespace, out: Path) -> None:
    recipe = Fp8Recipe(scaling=args.scaling or "block")
    format = args.format or (FP8 if recipe.scaling == "block" else _COMPRESSED)
    others = [*_HOW, "calibration", *_TEXT, *(field.name for field in dataclasses.fields(Recipe))]
    wrong = [name for name in others if getattr(args, name) is not None and (name, args.method) != ("method", "rtn")]
    if wrong:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        raise ValueError(f"quantize: {flags} with 8-bit floats - of 4 bits: FP8 is rounded to nearest. Leave it out.")
    if format in WRITTEN and format != _COMPRESSED:
        raise ValueError(
            f"quantize: scaling={recipe.scaling!r} with {format=} - that holds 4-bit weights. Use {FP8}, {_COMPRESSED} "
            "or dense, or leave --scaling out."
        )
    if format != _DENSE:
        check_scalings([recipe.scaling], format)
    check_room(out, 0)
    model = load_source(args)
    records: list[dict[str, Any]] = []
    small = quantize(merge(model) if has_adapters(model.params) else model, recipe, on_record=records.append)
    save(small, out, format=cast(FileFormat, format))
    write_report(out, records, recipe)
    Console(stderr=True).print(fp8_summary(records))


def _to_bits(args: argparse.Namespace, out: Path) -> None:
    recipe = override(Recipe(), given(args, Recipe, skip=frozenset()))
    how, sizes = (
        {name: default if getattr(args, name) is None else getattr(args, name) for name, default in defaults.items()}
        for defaults in (_HOW, _TEXT)
    )
    how["mse"] = how["mse"] == "true"
    check_method(
        how["method"], how["order"], how["damping"], how["propagate_error"], args.calibration is not None
    )  # fmt: skip
    check_room(out, 0)
    format = _format_of_bits(args.format, recipe)
    model, batches = load_source(args), None
    model = merge(model) if has_adapters(model.params) else model
    if format in WRITTEN:
        ordered = METHODS[how["method"]].feedback and how["order"] == "activation"
        check_sizes("quantize", model.config, format, recipe, ordered=ordered)
    if args.calibration is not None:
        batches = calibration_batches(args.calibration, model.tokenizer, vocab_size=model.config.vocab_size, **sizes)
    records: list[dict[str, Any]] = []
    unfinished = out.absolute().with_name(f".{out.name}.blocks")
    packed = quantize(model, recipe, batches, **how, folder=unfinished, on_record=records.append)
    save(packed, out, format=format)
    if records:
        write_report(out, records, recipe, **how, calibration={"files": args.calibration, **sizes})
        Console(stderr=True).print(summary(records))
    shutil.rmtree(unfinished, ignore_errors=True)


def _format_of_bits(format: Any, recipe: Recipe) -> Any:
    """The format that was asked for, None being what holds the recipe's bits."""
    packed = recipe.bits == STORED_BITS
    if format in WRITTEN and not packed:
        raise ValueError(
            f"quantize: bits={recipe.bits} with {format=} - packed files have {STORED_BITS} bits. Use --format dense, "
            "which holds the numbers that the codes stand for."
        )
    return format or (_COMPRESSED if packed else _DENSE)

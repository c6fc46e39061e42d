"""The `jaxflash` command: demo, train, launch, plan, verify, generate, evaluate, quantize, convert, inspect, explain.

Flags are the configuration's own field names.
"""

import argparse
import dataclasses
import json
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

import jax
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from jaxflash import checkpoint, cli_plan, cli_verify
from jaxflash.adapters import has_adapters
from jaxflash.calibration import calibration_batches
from jaxflash.config import DType, Sampling, TrainConfig, override, preset, train_preset
from jaxflash.corpus.documents import find_files, read_documents
from jaxflash.corpus.tokens import default_cache_dir
from jaxflash.demo import DemoError, demo, demo_config
from jaxflash.evaluate import evaluate
from jaxflash.finetune import finetune_preset, merge
from jaxflash.flags import assignments
from jaxflash.generate import generate
from jaxflash.hf.chat import chat
from jaxflash.hf.convert import ADAPTER, TARGETS, convert, keeps_fp8, written_bytes
from jaxflash.hf.folder import check_room
from jaxflash.hf.inspect import explain_prompt, inspect
from jaxflash.hf.pieces import check_sizes
from jaxflash.language_model import LanguageModel, load, save
from jaxflash.launch import join, start
from jaxflash.quantize import METHODS, check_method, quantize
from jaxflash.quantize_report import summary, write_report
from jaxflash.train import train
from pallas_kernels.dispatch import Unsupported
from quant.formats.api import WRITTEN
from quant.gptq import ORDERS
from quant.lora import LoraConfig
from quant.recipe import STORED_BITS, Recipe
from sharding.mesh import parse_mesh, use_cpu_devices
from sharding.names import did_you_mean


class _Parser(argparse.ArgumentParser):
    """argparse that suggests the nearest flag or command."""

    def error(self, message: str) -> NoReturn:
        flags = [word.split("=")[0] for word in message.replace("'", " ").split() if word.startswith("--")]
        known = [option for action in self._actions for option in action.option_strings]
        hint = did_you_mean(flags[0], known) if flags else f"See `{self.prog} --help`."
        raise SystemExit(f"{self.prog}: {message}. {hint}")


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point: runs one command.

    A wrong call or input ends with one paragraph on stderr and exit status 2; a run stopped by a signal, saved, with
    128 plus the signal's number.
    """
    args = _parse(argv)
    try:
        if args.cpu_devices is not None:
            use_cpu_devices(args.cpu_devices)
        # A resumed run, or the next generation, finds its programs compiled; JAX_COMPILATION_CACHE_DIR may say where.
        if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
            jax.config.update("jax_compilation_cache_dir", str(default_cache_dir().with_name("xla")))
        args.run(args)
    except (ValueError, OSError, FloatingPointError, Unsupported, DemoError) as error:
        Console(stderr=True).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="jaxflash", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    for add in (
        _add_demo, _add_train, _add_launch, _add_generate, _add_evaluate, _add_quantize, _add_convert, _add_inspect,
        _add_explain, cli_verify.add, cli_plan.add,
    ):  # fmt: skip
        add(commands)
    args, extra = parser.parse_known_args(argv)
    if extra:  # argparse itself would let the outer parser complain, which does not know the command's flags
        commands.choices[args.command].error(f"unrecognized arguments: {' '.join(extra)}")
    return args


def _command(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=run)
    parser.add_argument("--cpu-devices", type=int, metavar="N", help="split the CPU into N devices, to try a mesh")
    return parser


def _add_fields(parser: argparse.ArgumentParser, config: type, *, skip: frozenset[str]) -> None:
    for field in dataclasses.fields(config):
        if field.name not in skip:
            default = "" if field.default in (dataclasses.MISSING, None) else f" (default {field.default})"
            parser.add_argument(f"--{field.name.replace('_', '-')}", metavar="X", help=f"{field.name}{default}")


def _given(args: argparse.Namespace, config: type, *, skip: frozenset[str]) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(config) if f.name not in skip]
    return {n: getattr(args, n) for n in names if getattr(args, n) is not None}


_DTYPES = get_args(DType)
_NOT_FLAGS = frozenset({"model", "init_from", "lora", "data", "mesh"})


def _add_train(commands: Any) -> None:
    parser = _command(commands, "train", _train, "Train a model, or continue the run in --out.")
    parser.add_argument("--preset", help="model and defaults (default: tiny, or what the run in --out has)")
    parser.add_argument(
        "--model", metavar="PATH", help="begin with this one: a run's folder, a Hugging Face folder, a .gguf"
    )
    lora = "train adapters of --model instead of its weights, for instance rank=16,alpha=32,targets='attention/(q|v)'"
    parser.add_argument("--lora", metavar="KEY=VALUE,...", help=lora)
    parser.add_argument("--data", nargs="+", metavar="FILE", help=".txt or .jsonl files, folders, globs")
    parser.add_argument("--mesh", help="for instance fsdp=4,tensor=2")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for instance model.n_layers=2")
    _add_fields(parser, TrainConfig, skip=_NOT_FLAGS)


def _train(args: argparse.Namespace) -> None:
    config, console = train_config(args), Console(stderr=True)
    if config.out is None:
        console.print("no --out: nothing will be saved, and the trained model is gone with this command")
    run = train(config)
    where = "" if run.path is None else f", in {run.path}/"
    why = f"stopped by {run.stopped}" if run.stopped else "done"
    console.print(f"{why} at step {int(run.state.step)}{where}", highlight=False)
    if run.stopped is not None:
        sys.exit(128 + signal.Signals.__members__.get(run.stopped, signal.SIGTERM))


def train_config(args: argparse.Namespace) -> TrainConfig:
    """The TrainConfig that the flags of `jaxflash train` describe, on top of the preset or of the run in --out."""
    changes = _given(args, TrainConfig, skip=_NOT_FLAGS)
    changes |= assignments(args.set)
    if args.data is not None:
        changes["data"] = tuple(args.data)
    if args.mesh is not None:
        changes["mesh"] = parse_mesh(args.mesh)
    if args.lora is not None:
        changes["lora"] = override(LoraConfig(), assignments(args.lora.split(","), flag="--lora", example="rank=16"))
    if args.model is not None:
        if args.preset is not None:
            raise ValueError("train: --preset with --model - a run begins with one of them. Leave one out.")
        return finetune_preset(args.model, **changes)
    if args.preset is None and args.out is not None and (Path(args.out) / "config.json").exists():
        return override(checkpoint.read_config(Path(args.out)), changes)
    return train_preset(args.preset or "tiny", **changes)


def _add_launch(commands: Any) -> None:
    text = "Train in several processes: of this machine (-n), of a SLURM or Open MPI job, or one by one."
    parser = commands.add_parser("launch", help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=_launch, cpu_devices=None)
    parser.add_argument("-n", type=int, metavar="N", help="start N processes here")
    parser.add_argument(
        "--devices-per-process", type=int, metavar="K", help="with -n: GPUs, or parts of the CPU (default 1)"
    )
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="one by one: where process 0 listens")
    parser.add_argument("--processes", type=int, metavar="N", help="one by one: how many there are")
    parser.add_argument("--process", type=int, metavar="I", help="one by one: which this is, from 0")
    parser.add_argument("--devices", type=_numbers, metavar="I,J", help="one by one: the GPUs to use (default: all)")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="train ...", help="what each of them runs")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _launch(args: argparse.Namespace) -> None:
    inner = _parse(args.arguments)
    if inner.command != "train":
        raise ValueError(f"launch: {inner.command!r} runs in one process. Give `train` and its flags.")
    train_config(inner)  # what is wrong is said once, not by every process
    place = {name: getattr(args, name) for name in ("coordinator", "processes", "process", "devices")}
    if args.n is None:
        if args.devices_per_process is not None:
            raise ValueError("launch: --devices-per-process is for -n. Give --devices, or one GPU to each task.")
        join(lambda: main(args.arguments), **place)
    elif any(value is not None for value in place.values()):
        raise ValueError(
            f"launch: -n {args.n} starts all processes here. Leave out --coordinator and what goes with it."
        )
    elif status := start(args.arguments, processes=args.n, devices=args.devices_per_process or 1):
        sys.exit(status)


def _add_generate(commands: Any) -> None:
    parser = _command(commands, "generate", _generate, "Continue prompts, or answer them, with a model.")
    parser.add_argument("--model", required=True, metavar="PATH", help="a run's folder, a Hugging Face folder, a .gguf")
    parser.add_argument("--prompt", action="append", required=True, help="a text to continue; may be repeated")
    parser.add_argument("--chat", action="store_true", help="each prompt opens a conversation; print the reply")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: what the conversation is told first")
    _add_adapter(parser)
    parser.add_argument("--step", type=int, help="which checkpoint of a run (default: the newest)")
    parser.add_argument("--param-dtype", choices=_DTYPES, help="default: what holds the files' values exactly")
    parser.add_argument("--stop-tokens", nargs="+", type=int, metavar="ID", help="default: what the model names")
    _add_fields(parser, Sampling, skip=frozenset({"stop_tokens"}))


def _generate(args: argparse.Namespace) -> None:
    sampling = override(Sampling(), _given(args, Sampling, skip=frozenset()))
    if args.system is not None and not args.chat:
        raise ValueError("generate: --system is of a conversation, and a plain prompt has none. Add --chat.")
    model = load(args.model, adapter=args.adapter, step=args.step, param_dtype=args.param_dtype)
    if args.chat:
        first = [] if args.system is None else [{"role": "system", "content": args.system}]
        for prompt in args.prompt:
            print(chat(model, [*first, {"role": "user", "content": prompt}], sampling))
        return
    texts = generate(model, args.prompt, sampling)
    for prompt, text in zip(args.prompt, texts, strict=True):
        print(prompt + text)


def _add_adapter(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--adapter", metavar="DIR", help="adapters of the model, in a folder as peft has it (quantize merges them)"
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="PATH", help="a run's folder, a Hugging Face folder, a .gguf")
    _add_adapter(parser)
    parser.add_argument("--step", type=int, help="which checkpoint of a run (default: the newest)")
    parser.add_argument("--param-dtype", choices=_DTYPES, help="default: what holds the files' values exactly")
    parser.add_argument("--compute-dtype", choices=_DTYPES, help="default: the model's")


def _load(args: argparse.Namespace) -> LanguageModel:
    model = load(args.model, adapter=args.adapter, step=args.step, param_dtype=args.param_dtype)
    compute_dtype = args.compute_dtype or model.config.compute_dtype
    return dataclasses.replace(model, config=dataclasses.replace(model.config, compute_dtype=compute_dtype))


def _add_evaluate(commands: Any) -> None:
    parser = _command(commands, "evaluate", _evaluate, "Perplexity of a model on a text, with a 95 %% interval.")
    _add_model(parser)
    parser.add_argument("--data", nargs="+", required=True, metavar="FILE", help=".txt or .jsonl files, folders, globs")
    parser.add_argument("--context", type=int, default=512, help="tokens a window (default 512)")
    parser.add_argument("--stride", type=int, help="tokens from one window to the next (default: the context)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="the first N tokens only")
    parser.add_argument("--batch-size", type=int, default=8, help="windows at a time (default 8)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _evaluate(args: argparse.Namespace) -> None:
    texts = read_documents(find_files(args.data))
    found = evaluate(
        _load(args), texts, context=args.context, stride=args.stride, max_tokens=args.max_tokens,
        batch_size=args.batch_size,
    )  # fmt: skip
    print(json.dumps(dataclasses.asdict(found)) if args.json else found)


def _add_quantize(commands: Any) -> None:
    parser = _command(commands, "quantize", _quantize, "Quantise a model, or go on where a kill stopped.")
    _add_model(parser)
    parser.add_argument("--out", required=True, metavar="DIR", help="a new folder")
    parser.add_argument("--method", default="gptq", help=f"{', '.join(METHODS)} (default gptq)")
    parser.add_argument("--calibration", nargs="+", metavar="FILE", help=".txt or .jsonl files, folders, globs")
    parser.add_argument("--rows", type=int, default=64, help="rows of calibration, from all over the text (default 64)")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens a row (default 512)")
    parser.add_argument("--batch-size", type=int, default=8, help="rows at a time (default 8)")
    formats = "of the files in --out (default compressed-tensors; dense, which holds the numbers, of other bits than 4)"
    parser.add_argument("--format", choices=(*WRITTEN, "dense"), help=formats)
    parser.add_argument("--order", default="static", help=f"of rows in GPTQ: {', '.join(ORDERS)} (default static)")
    parser.add_argument("--damping", type=float, default=0.05, help="of GPTQ (default 0.05; the paper's is 0.01)")
    mse = "of GPTQ: ranges of groups by least squares (default true; the paper's are whole: false)"
    parser.add_argument("--mse", default="true", choices=("true", "false"), help=mse)
    share = "of its inputs' error that each weight is corrected for, 0 (off, the default) to 1; QEP's is 0.5"
    parser.add_argument("--propagate-error", type=float, default=0.0, metavar="SHARE", help=share)
    _add_fields(parser, Recipe, skip=frozenset())


def _quantize(args: argparse.Namespace) -> None:
    recipe = override(Recipe(), _given(args, Recipe, skip=frozenset()))
    out = Path(args.out).expanduser()
    check_method(args.method, args.order, args.damping, args.propagate_error, args.calibration is not None)
    check_room(out, 0)
    format = _quantised_format(args.format, recipe)
    model, batches = _load(args), None
    model = merge(model) if has_adapters(model.params) else model
    if format in WRITTEN:
        ordered = METHODS[args.method].feedback and args.order == "activation"
        check_sizes("quantize", model.config, format, recipe, ordered=ordered)
    sizes = {"rows": args.rows, "seq_len": args.seq_len, "batch_size": args.batch_size}
    if args.calibration is not None:
        batches = calibration_batches(args.calibration, model.tokenizer, vocab_size=model.config.vocab_size, **sizes)
    records: list[dict[str, Any]] = []
    unfinished = out.absolute().with_name(f".{out.name}.blocks")
    how = {n: getattr(args, n) for n in ("method", "order", "damping", "propagate_error")} | {"mse": args.mse == "true"}
    packed = quantize(model, recipe, batches, **how, folder=unfinished, on_record=records.append)
    save(packed, out, format=format)
    console = Console(stderr=True)
    if records:
        calibration = {"files": args.calibration, **sizes}
        write_report(out, records, recipe, **how, calibration=calibration)
        console.print(summary(records))
    shutil.rmtree(unfinished, ignore_errors=True)
    console.print(f"done, in {args.out}/", highlight=False)


def _quantised_format(format: Any, recipe: Recipe) -> Any:
    """The format that was asked for, None being what holds the recipe's bits."""
    packed = recipe.bits == STORED_BITS
    if format in WRITTEN and not packed:
        raise ValueError(
            f"quantize: bits={recipe.bits} with {format=} - packed files have {STORED_BITS} bits. Use --format dense, "
            "which holds the numbers that the codes stand for."
        )
    return format or ("compressed-tensors" if packed else "dense")


def _add_convert(commands: Any) -> None:
    parser = _command(commands, "convert", _convert, "Write a model as another kind of checkpoint.")
    parser.add_argument("source", metavar="SRC", help="a run's folder, a Hugging Face folder, a .gguf")
    parser.add_argument("destination", metavar="DST", help="a new folder")
    kinds = f"{', '.join(TARGETS[:-2])} (Hugging Face folders), {ADAPTER} (of a run: peft's), or orbax (a run's folder)"
    parser.add_argument("--to", required=True, metavar="KIND", help=kinds)
    parser.add_argument(
        "--dtype", choices=(*_DTYPES, "float16"), help="of dense weights; default: what holds the values exactly"
    )


def _convert(args: argparse.Namespace) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    found = inspect(args.source)
    totals = {"read": sum(kind.nbytes for kind in found.kinds), "write": written_bytes(found, args.to, args.dtype)}
    with RichProgress(*columns, console=console) as progress:
        tasks: dict[str, TaskID] = {}

        def told(verb: str) -> Callable[[str, int], None]:
            def advance(_: str, size: int) -> None:
                if verb not in tasks:
                    tasks[verb] = progress.add_task(verb, total=totals[verb])
                progress.advance(tasks[verb], size)

            return advance

        convert(args.source, args.destination, args.to, dtype=args.dtype, on_read=told("read"), on_write=told("write"))
    count = sum(kind.count for kind in found.low_bit)
    four_bits = f": {count} 4-bit weights, each read back and found the same" if args.to in WRITTEN else ""
    proof = f": {count} FP8 weights, byte by byte" if keeps_fp8(found, args.to) else four_bits
    console.print(f"done, in {args.destination}/{proof}", highlight=False)


def _add_inspect(commands: Any) -> None:
    text = "Architecture, parameters, precision of every layer, memory, and what would run."
    parser = _command(commands, "inspect", _inspect, text)
    parser.add_argument("source", metavar="PATH", help="a run's folder, a Hugging Face folder, a .gguf")


def _inspect(args: argparse.Namespace) -> None:
    print(inspect(args.source))


def _add_demo(commands: Any) -> None:
    parser = _command(commands, "demo", _demo, "Train the tiny preset on the shipped corpus, stop, and resume.")
    parser.add_argument("--out", default="runs/demo", metavar="DIR", help="run folder (default runs/demo)")
    parser.add_argument("--steps", type=int, default=350, help="steps before the stop (default 350)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for instance packing=stream")


def _demo(args: argparse.Namespace) -> None:
    changes = assignments(args.set, reserved=frozenset({"out", "steps"}))
    if demo(demo_config(args.out, steps=args.steps, **changes)) is None:
        sys.exit(128 + signal.SIGINT)


def _add_explain(commands: Any) -> None:
    parser = _command(commands, "explain", _explain, "Which attention a preset's training step would run, and why.")
    parser.add_argument("--preset", default="1b")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--packing", choices=("documents", "stream"), default="stream")


def _explain(args: argparse.Namespace) -> None:
    config = preset(args.preset)
    print(explain_prompt(config, (args.batch_size, args.seq_len), packed=args.packing == "documents"))


if __name__ == "__main__":
    main()

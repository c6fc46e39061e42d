"""A checkpoint of any kind that `load` reads, written as another kind."""

import dataclasses
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from jaxflash import checkpoint
from jaxflash.adapters import abstract_adapters, has_adapters
from jaxflash.config import DType, TrainConfig
from jaxflash.finetune import merge, save_adapter
from jaxflash.hf.config import from_model_config
from jaxflash.hf.folder import check_room, new_folder, write_json
from jaxflash.hf.inspect import Inspection, inspect
from jaxflash.hf.load import open_checkpoint
from jaxflash.hf.pieces import check_scalings
from jaxflash.hf.place import OnTensor
from jaxflash.hf.save import FORMATS, FileDType, FileFormat, token_ids
from jaxflash.hf.scheme import FP8
from jaxflash.language_model import LanguageModel, foreign_tokenizer, is_foreign, load, save
from jaxflash.tokenizer import ByteTokenizer, NoTokenizer
from quant.formats.api import WRITTEN
from quant.lora import LoraConfig
from sharding.names import did_you_mean

ADAPTER = "adapter"
TARGETS: tuple[str, ...] = (*FORMATS, ADAPTER, "orbax")


def convert(
    source: str | Path,
    destination: str | Path,
    to: str,
    *,
    dtype: FileDType | None = None,
    on_read: OnTensor | None = None,
    on_write: OnTensor | None = None,
) -> None:
    """Writes the model in `source` (run folder, Hub folder, .gguf) anew, as another kind of checkpoint.

    to: "dense" for a Hub folder; "gptq", "gptq_v2", "awq" or "compressed-tensors" for one of 4-bit weights, if the
    source has them: codes, scales and zero points stay what they are, every linear is decoded again and compared, and
    what the target cannot hold is listed instead; "fp8" of a dense source; "orbax" for a run's folder, of step 0 and
    without optimizer state, which `load` takes on any mesh; "adapter" for the adapters of a run that trained them, as
    peft keeps them. 4-bit weights stay packed in "orbax", are numbers in "dense"; adapters are merged. FP8 weights stay
    what they are, byte by byte, in "fp8" (of blocks) and "compressed-tensors", and are numbers elsewhere; fixed scales
    of activations (`input_scale`) are left out, since products find their own.
    dtype: of the dense weights written (None: the one that holds the source's values as they are). on_read, on_write:
    told of each tensor.

    Raises:
      ValueError: an unknown target, one that is not for such a source, or a dtype that it does not have.
      FileExistsError, OSError, Unsupported: as `load` and `save`, before any weight is written.
    """
    source, destination = Path(source).expanduser(), Path(destination).expanduser()
    if to not in TARGETS:
        raise ValueError(f"convert: unknown {to=}. {did_you_mean(to, TARGETS)}")
    if to == "orbax" and dtype == "float16":
        raise ValueError(f"convert: {dtype=} - the parameters of a run are float32 or bfloat16. Choose one of them.")
    if to == "orbax":
        _check_run(source)
    found = inspect(source)
    _check_target(to, found)
    keep = keeps_fp8(found, to)
    if keep:
        kept = open_checkpoint(source, keep_fp8=True).fp8
        check_scalings(sorted({layer.scaling for layers in kept.values() for layer in layers}), to)
    dtype = _written_dtype(to, dtype, found)
    check_room(destination, written_bytes(found, to, dtype))
    if to not in ("orbax", ADAPTER):
        from_model_config(found.config, dtype, {})
    param_dtype: DType | None = None if dtype == "float16" or found.products or keep else dtype
    model = load(source, param_dtype=param_dtype, keep_fp8=keep, on_tensor=on_read)
    if to == ADAPTER:
        save_adapter(model, destination, base=checkpoint.read_config(source).init_from, on_tensor=on_write)
        return
    model = merge(model) if has_adapters(model.params) else model
    if to == "orbax":
        _write_orbax(model.astype("bfloat16" if dtype == "bfloat16" else "float32"), destination, on_write)
    else:
        save(model, destination, dtype=dtype, format=cast(FileFormat, to), on_tensor=on_write)


def written_bytes(found: Inspection, to: str, dtype: FileDType | None = None) -> int:
    """How much `convert` writes, about: zero points and groups of rows that one format stores and another does not
    apart, for which `save` looks again."""
    if to == ADAPTER:
        lora = _lora(found)
        made = () if lora is None else jax.tree.leaves(abstract_adapters(found.config, lora))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in made)
    if to in WRITTEN or keeps_fp8(found, to) or (to == "orbax" and found.products):
        return sum(kind.nbytes for kind in found.kinds)
    return found.parameters if to == FP8 else found.parameters * jnp.dtype(_written_dtype(to, dtype, found)).itemsize


def keeps_fp8(found: Inspection, to: str) -> bool:
    """Whether `convert` writes FP8 weights as the source has them."""
    return found.has_fp8 and to in (FP8, "compressed-tensors")


def _lora(found: Inspection) -> LoraConfig | None:
    """The adapters that a run has trained; None for another source."""
    return None if is_foreign(found.path) else checkpoint.read_config(found.path).lora


def _check_target(to: str, found: Inspection) -> None:
    if to == ADAPTER and _lora(found) is None:
        raise ValueError(f"convert: {to=} - the source is no run that trained adapters. Train with lora first.")
    if to in WRITTEN and not found.products and not keeps_fp8(found, to):
        raise ValueError(
            f"convert: {to=} - the source has no 4-bit weights, and nothing is quantised here. Use quantize."
        )
    if to == FP8 and found.products:
        raise ValueError(f"convert: {to=} - the source is in 4 bits already. Start from dense weights.")


def _written_dtype(to: str, dtype: FileDType | None, found: Inspection) -> FileDType:
    """The asked dtype, or the one that holds all that will be dense as it is."""
    if dtype is not None:
        return dtype
    if (found.products and to == "dense") or (_lora(found) is not None and to not in WRITTEN):
        return "float32"  # a code times a 16-bit scale, or that and a sum of float32 products
    stay = found.low_bit if to in WRITTEN or keeps_fp8(found, to) else ()
    dense = {kind.precisions for kind in found.kinds if kind not in stay}
    # float16 is loaded as float32, which holds it; beside FP8 weights, which stand for float32, so is bfloat16.
    alike: dict[tuple[str, ...], FileDType] = {("F16",): "float16", ("BF16",): "bfloat16"}
    own = alike.get(dense.pop()) if len(dense) == 1 and to != "orbax" else None
    return own or found.config.param_dtype


def _check_run(source: Path) -> None:
    """Whether a run folder can be made of `source`."""
    if jax.process_count() > 1:
        raise ValueError("convert: a run folder is written by one process alone. Call it outside a distributed job.")
    if is_foreign(source) and isinstance(foreign_tokenizer(source), NoTokenizer):
        raise ValueError("convert: the source has no tokenizer, and a run needs one. Put its tokenizer.json beside it.")


def _write_orbax(model: LanguageModel, path: Path, on_write: OnTensor | None) -> None:
    """A run folder as `checkpoint` reads it: config.json, tokenizer, and checkpoints/0 with params and meta."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    name = "byte" if isinstance(model.tokenizer, ByteTokenizer) else str(path / "tokenizer.json")
    run = TrainConfig(model=model.config, tokenizer=name, seq_len=min(model.config.context, 4096))
    handlers = {"params": ocp.StandardCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
    meta = {"step": 0, "data": "converted", "packed": checkpoint.packed_facts(model.params)}
    items = ocp.args.Composite(params=ocp.args.StandardSave(model.params), meta=ocp.args.JsonSave(meta))
    with new_folder(path, size) as folder:
        assert folder is not None  # one process
        write_json(folder / "config.json", dataclasses.asdict(run))
        write_json(folder / "generation_config.json", token_ids(model.tokenizer))
        model.tokenizer.save(folder)
        with ocp.CheckpointManager((folder / "checkpoints").absolute(), item_handlers=handlers) as manager:
            manager.save(0, args=items)
    if on_write is not None:
        on_write("params", size)

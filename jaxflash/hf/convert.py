"""A checkpoint of any kind that `load` reads, written as another kind."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from jaxflash.config import DType, TrainConfig
from jaxflash.hf.config import from_model_config
from jaxflash.hf.inspect import inspect
from jaxflash.hf.place import OnTensor
from jaxflash.hf.save import FileDType, check_room, new_folder, token_ids, write_json
from jaxflash.language_model import LanguageModel, foreign_tokenizer, is_foreign, load, save
from jaxflash.tokenizer import ByteTokenizer, NoTokenizer
from sharding.names import did_you_mean


def convert(
    source: str | Path,
    destination: str | Path,
    to: str,
    *,
    dtype: FileDType | None = None,
    on_read: OnTensor | None = None,
    on_write: OnTensor | None = None,
) -> None:
    """Writes the model in `source` (run folder, Hub folder, .gguf) anew: "dense" as a Hub folder, "orbax" as a run's.

    An "orbax" folder is a run of step 0 without optimizer state: `load` takes it, on any mesh. dtype: of the weights
    written (None: the one that holds the source's values as they are). on_read, on_write: told of each tensor.

    Raises:
      ValueError: an unknown target, or a dtype that it does not have.
      FileExistsError, OSError, Unsupported: as `load` and `save`, before any weight is read.
    """
    source, destination = Path(source).expanduser(), Path(destination).expanduser()
    writers = {"dense": _write_dense, "orbax": _write_orbax}
    if to not in writers:
        raise ValueError(f"convert: unknown {to=}. {did_you_mean(to, writers)}")
    if to == "orbax" and dtype == "float16":
        raise ValueError(f"convert: {dtype=} - the parameters of a run are float32 or bfloat16. Choose one of them.")
    if to == "orbax":
        _check_run(source)
    found = inspect(source)
    if dtype is None and to == "dense" and all(kind.precisions == ("F16",) for kind in found.kinds):
        dtype = "float16"  # loaded as float32, which holds it; here the file's own type is at hand
    written = dtype or found.config.param_dtype
    check_room(destination, found.parameters * jnp.dtype(written).itemsize)
    if to == "dense":
        from_model_config(found.config, written, {})
    param_dtype: DType | None = None if dtype is None or dtype == "float16" else dtype
    model = load(source, param_dtype=param_dtype, on_tensor=on_read)
    writers[to](model, destination, dtype, on_write)


def _check_run(source: Path) -> None:
    """Whether a run folder can be made of `source`."""
    if jax.process_count() > 1:
        raise ValueError("convert: a run folder is written by one process alone. Call it outside a distributed job.")
    if is_foreign(source) and isinstance(foreign_tokenizer(source), NoTokenizer):
        raise ValueError("convert: the source has no tokenizer, and a run needs one. Put its tokenizer.json beside it.")


def _write_dense(model: LanguageModel, path: Path, dtype: FileDType | None, on_write: OnTensor | None) -> None:
    save(model, path, dtype=dtype, on_tensor=on_write)


def _write_orbax(model: LanguageModel, path: Path, dtype: FileDType | None, on_write: OnTensor | None) -> None:
    """A run folder as `checkpoint` reads it: config.json, tokenizer, and checkpoints/0 with params and meta."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    name = "byte" if isinstance(model.tokenizer, ByteTokenizer) else str(path / "tokenizer.json")
    run = TrainConfig(model=model.config, tokenizer=name, seq_len=min(model.config.context, 4096))
    handlers = {"params": ocp.StandardCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
    items = ocp.args.Composite(
        params=ocp.args.StandardSave(model.params), meta=ocp.args.JsonSave({"step": 0, "data": "converted"})
    )
    with new_folder(path, size) as folder:
        assert folder is not None  # one process
        write_json(folder / "config.json", dataclasses.asdict(run))
        write_json(folder / "generation_config.json", token_ids(model.tokenizer))
        model.tokenizer.save(folder)
        with ocp.CheckpointManager((folder / "checkpoints").absolute(), item_handlers=handlers) as manager:
            manager.save(0, args=items)
    if on_write is not None:
        on_write("params", size)

"""A model as a Hub folder that transformers, vLLM and SGLang read: all of it appears at once, or nothing does."""

import contextlib
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Shaped

from jaxflash.config import ModelConfig
from jaxflash.hf import safetensors
from jaxflash.hf.config import from_model_config
from jaxflash.hf.names import Place, places
from jaxflash.hf.place import OnTensor
from jaxflash.tokenizer import NoTokenizer, Tokenizer
from pallas_kernels.dispatch import Unsupported
from quant.tensor import Int4Tensor

FileDType = Literal["float32", "bfloat16", "float16"]


def save_folder(
    config: ModelConfig,
    params: Any,
    tokenizer: Tokenizer,
    path: Path,
    *,
    dtype: FileDType | None = None,
    max_shard_bytes: int = 5_000_000_000,
    on_tensor: OnTensor | None = None,
) -> None:
    """Writes config.json, safetensors (with an index where there are several) and the tokenizer into a new folder.

    It is written beside `path` and renamed at the end: a kill leaves `.NAME.*.partial` there, and no half checkpoint
    under the name. Every process calls it; the first one writes. dtype: of the files (None: the parameters' own).

    Raises:
      FileExistsError: `path` exists and is not an empty folder.
      OSError: too little free space, found before anything is written; or the first process failed, told to the others.
      Unsupported: no published architecture has this configuration's switches, or weights are packed to 4 bits.
      ValueError: float16 is asked for and a weight does not fit.
    """
    path = path.expanduser().resolve()
    _refuse_packed(params)
    dtype = config.param_dtype if dtype is None else dtype
    shards = _shards(config, np.dtype(jnp.dtype(dtype)), max_shard_bytes)
    ids = token_ids(tokenizer)
    values = from_model_config(config, dtype, ids)
    with new_folder(path, sum(size for shard in shards for _, size in shard)) as folder:
        with _first_process(f"write into {str(path)!r}"):
            if folder is not None:
                write_json(folder / "config.json", values)
                if any(value is not None for value in ids.values()):
                    write_json(folder / "generation_config.json", ids)
                tokenizer.save(folder)
        _write_shards(config, params, shards, folder, dtype, on_tensor)


def check_room(path: Path, size: int) -> None:
    """Whether a new folder `path` of `size` bytes can be made: the first process looks, and all of them know.

    Raises:
      FileExistsError: `path` exists and is not an empty folder, or one that cannot be replaced.
      OSError: less than `size` bytes are free there; or the first process found one of the two.
    """
    path = path.expanduser().resolve()
    with _first_process(f"make {str(path)!r}"):
        if jax.process_index() == 0:
            _check_room(path, size)


def _check_room(path: Path, size: int) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir()) or path.is_mount() or path == Path.cwd()):
        raise FileExistsError(
            f"save: {str(path)!r} exists - nothing is written over, and neither a mount point nor the current folder "
            "is replaced. Choose another path."
        )
    disk = next(parent for parent in path.parents if parent.exists())
    free = shutil.disk_usage(disk).free
    if free < size:
        raise OSError(f"save: {str(disk)!r} has {free=} bytes, {size} are needed. Make room, or choose another.")


@contextlib.contextmanager
def new_folder(path: Path, size: int) -> Iterator[Path | None]:
    """A hidden folder beside `path` that becomes `path` on leaving without an error; None in all but the first process.

    What is done in it must fail in all processes or in none: each wraps what it alone does in `_first_process`.

    Raises what `check_room` does.
    """
    path = path.expanduser().resolve()
    check_room(path, size)
    partial = None
    try:
        with _first_process(f"make a folder beside {str(path)!r}"):
            if jax.process_index() == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
                partial = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial"))
        yield partial
        with _first_process(f"finish {str(path)!r}"):
            if partial is not None:
                for file in partial.rglob("*"):
                    _sync(file)
                partial.chmod(0o777 & ~_umask())
                os.rename(partial, path)
                _sync(path.parent)
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _first_process(task: str) -> Iterator[None]:
    """Around what the first process does and the others wait for: if it raises there, it raises in all of them."""
    done = False
    try:
        yield
        done = True
    finally:  # also on the way out with an error: the others are waiting
        if jax.process_count() > 1:
            done = bool(multihost_utils.broadcast_one_to_all(np.int32(done)))
    if not done:
        raise OSError(f"save: the first process could not {task} - its own error says why. Nothing was written.")


def _refuse_packed(params: Any) -> None:
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, Int4Tensor))
    packed = sum(isinstance(leaf, Int4Tensor) for leaf in leaves)
    if packed:
        reason = f"{packed} weights are packed to 4 bits, and only dense ones are written"
        raise Unsupported(f"save: {reason}. Save the model before it is quantised.", [("Hub folder", reason)])


def _shards(config: ModelConfig, dtype: np.dtype, limit: int) -> list[list[tuple[str, int]]]:
    """(name, bytes) of every tensor, file by file; a tensor larger than `limit` has one of its own."""
    if limit < 1:
        raise ValueError(f"save: max_shard_bytes={limit} - must be at least 1.")
    shards: list[list[tuple[str, int]]] = [[]]
    for name, place in places(config).items():
        size = int(np.prod(place.shape, dtype=np.int64)) * dtype.itemsize
        if shards[-1] and sum(held for _, held in shards[-1]) + size > limit:
            shards.append([])
        shards[-1].append((name, size))
    return shards


def _write_shards(config, params, shards, folder: Path | None, dtype: str, on_tensor: OnTensor | None) -> None:
    where, stored_as = places(config), safetensors.NAMES[np.dtype(jnp.dtype(dtype))]
    files = {}
    for number, shard in enumerate(shards, 1):
        file = safetensors.SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        files |= {name: file for name, _ in shard}
        out: BinaryIO | None = None
        with contextlib.ExitStack() as opened:
            with _first_process(f"write {file!r}"):
                if folder is not None:
                    out = opened.enter_context((folder / file).open("wb"))
                    out.write(safetensors.encode_header((name, stored_as, where[name].shape) for name, _ in shard))
            for name, size in shard:
                values = _fetch(params, where[name], dtype, name)
                with _first_process(f"write {name!r}"):
                    if out is not None:
                        out.write(values.reshape(-1).view(np.uint8))
                        out.flush()  # a full disk is told here, and not on closing
                if on_tensor is not None:
                    on_tensor(name, size)
    with _first_process(f"write {safetensors.INDEX!r}"):
        if folder is not None and len(shards) > 1:
            index = {"metadata": {"total_size": sum(s for shard in shards for _, s in shard)}, "weight_map": files}
            write_json(folder / safetensors.INDEX, index)


def _fetch(params: Mapping[str, Any], place: Place, dtype: str, name: str) -> Shaped[np.ndarray, "..."]:
    """One tensor in the orientation and dtype of the file, on the host of every process."""
    leaf: Any = functools.reduce(lambda node, key: node[key], place.path, params)
    fetch = _fetcher(leaf.sharding, jnp.dtype(dtype), place.transposed, place.layer is not None)
    values, fits = fetch(leaf, np.int32(place.layer or 0))
    if not bool(np.asarray(fits)):
        raise ValueError(
            f"save: {name!r} has weights beyond the largest {dtype} - they would be infinite. Save it as float32."
        )
    return np.ascontiguousarray(values.addressable_data(0))


@functools.lru_cache(maxsize=64)
def _fetcher(sharding: Any, dtype: Any, transposed: bool, stacked: bool) -> Any:
    everywhere = NamedSharding(sharding.mesh, P()) if isinstance(sharding, NamedSharding) else None

    def fetch(leaf, layer):
        piece = leaf[layer] if stacked else leaf
        values = (piece.T if transposed else piece).astype(dtype)
        return values, (jnp.isfinite(values) | ~jnp.isfinite(piece.T if transposed else piece)).all()

    return jax.jit(fetch, out_shardings=everywhere)


def token_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """`bos_token_id`, `eos_token_id` (a list where several tokens end what the model says) and `pad_token_id`.

    None where there is none, and written as null: a key left out has transformers take Llama's ids, 1 and 2.
    """
    stops = () if isinstance(tokenizer, NoTokenizer) else tokenizer.stop_ids
    return {
        "bos_token_id": tokenizer.special_id("bos_token"),
        "eos_token_id": list(stops) if len(stops) > 1 else next(iter(stops), None),
        "pad_token_id": tokenizer.special_id("pad_token"),
    }


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

"""A model as a Hub folder that transformers, vLLM and SGLang read: all of it appears at once, or nothing does."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import jax
import numpy as np

from jaxflash.adapters import has_adapters
from jaxflash.config import ModelConfig
from jaxflash.hf import safetensors
from jaxflash.hf.config import from_model_config
from jaxflash.hf.folder import first_process, new_folder, write_json
from jaxflash.hf.pieces import Piece, kept_scheme, packed_scheme, pieces
from jaxflash.hf.place import OnTensor
from jaxflash.hf.scheme import FP8, Scheme, to_config
from jaxflash.tokenizer import NoTokenizer, Tokenizer
from quant.formats.api import WRITTEN
from quant.formats.fp8 import BLOCK
from quant.fp8 import Fp8Tensor
from quant.matmul import holds_packed
from quant.split import is_weight
from sharding.names import did_you_mean

FileDType = Literal["float32", "bfloat16", "float16"]
FileFormat = Literal["dense", "gptq", "gptq_v2", "awq", "compressed-tensors", "fp8"]
FORMATS: tuple[str, ...] = ("dense", *WRITTEN, FP8)


def save_folder(
    config: ModelConfig,
    params: Any,
    tokenizer: Tokenizer,
    path: Path,
    *,
    dtype: FileDType | None = None,
    format: FileFormat | None = None,
    max_shard_bytes: int = 5_000_000_000,
    on_tensor: OnTensor | None = None,
) -> None:
    """Writes config.json, safetensors (with an index where there are several) and the tokenizer into a new folder.

    It is written beside `path` and renamed at the end: a kill leaves `.NAME.*.partial` there, and no half checkpoint
    under the name; the next call removes it. Every process calls it; the first one writes. dtype: of what is dense in
    the files (None: the parameters' own). format: see `jaxflash.save`.

    Raises:
      FileExistsError: `path` exists and is not an empty folder.
      OSError: too little free space, found before anything is written; or the first process failed, told to the others.
      Unsupported: no published architecture has this configuration's switches, or the format cannot hold the weights.
      ValueError: adapters that are not merged; float16 is asked for and a weight does not fit; a format that is
        unknown, or for other weights.
    """
    if has_adapters(params):
        raise ValueError("save: the model has adapters - merge them first, or save them alone (save_adapter).")
    path = path.expanduser().resolve()
    dtype = config.param_dtype if dtype is None else dtype
    ids = token_ids(tokenizer)
    values = from_model_config(config, dtype, ids)
    scheme, dense = _scheme(config, params, format)
    if scheme is not None:
        values["quantization_config"] = to_config(scheme, dense)
    shards = _shards(pieces(config, params, dtype, scheme), max_shard_bytes)
    with new_folder(path, sum(_size(piece) for shard in shards for piece in shard)) as folder:
        with first_process(f"write into {str(path)!r}"):
            if folder is not None:
                write_json(folder / "config.json", values)
                if any(value is not None for value in ids.values()):
                    write_json(folder / "generation_config.json", ids)
                tokenizer.save(folder)
        _write_shards(shards, folder, on_tensor)


def _scheme(config: ModelConfig, params: Any, format: str | None) -> tuple[Scheme | None, list[str]]:
    """(how the weights are written, None for dense; the linears that are dense all the same)."""
    leaves = jax.tree.leaves(params, is_leaf=is_weight)
    if format in (None, FP8, "compressed-tensors") and any(isinstance(leaf, Fp8Tensor) for leaf in leaves):
        return kept_scheme(params, format, config)
    packed = holds_packed(params)
    if format is None:
        format = "compressed-tensors" if packed else "dense"
    if format not in FORMATS:
        raise ValueError(f"save: unknown {format=}. {did_you_mean(format, FORMATS)}")
    if format in WRITTEN:
        if not packed:
            raise ValueError(f"save: {format=} - the model has no 4-bit weights. Use jaxflash.quantize first.")
        return packed_scheme(params, format, config)
    if format == FP8:
        if packed:
            raise ValueError(
                f"save: {format=} - the model is in 4 bits already. Save the model before it is quantised."
            )
        return Scheme(format=FP8, block=BLOCK), []
    return None, []


def _size(piece: Piece) -> int:
    return sum(piece.sizes().values())


def _shards(all_pieces: Sequence[Piece], limit: int) -> list[list[Piece]]:
    """The pieces file by file; one larger than `limit` has a file of its own."""
    if limit < 1:
        raise ValueError(f"save: max_shard_bytes={limit} - must be at least 1.")
    shards: list[list[Piece]] = [[]]
    held = 0
    for piece in all_pieces:
        size = _size(piece)
        if shards[-1] and held + size > limit:
            shards.append([])
            held = 0
        shards[-1].append(piece)
        held += size
    return shards


def _write_shards(shards: Sequence[Sequence[Piece]], folder: Path | None, on_tensor: OnTensor | None) -> None:
    files = {}
    for number, shard in enumerate(shards, 1):
        file = safetensors.SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        held = {name: tensor for piece in shard for name, tensor in piece.tensors.items()}
        files |= dict.fromkeys(held, file)
        out: BinaryIO | None = None
        with contextlib.ExitStack() as opened:
            with first_process(f"write {file!r}"):
                if folder is not None:
                    out = opened.enter_context((folder / file).open("wb"))
                    out.write(safetensors.encode_header((name, *tensor) for name, tensor in held.items()))
            for piece in shard:
                values = piece.fetch()
                with first_process(f"write {next(iter(piece.tensors))!r}"):
                    if out is not None:
                        tensors = piece.encode(values)
                        for name in piece.tensors:
                            out.write(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8))
                        out.flush()  # a full disk is told here, and not on closing
                for name, size in piece.sizes().items() if on_tensor is not None else ():
                    on_tensor(name, size)  # pyright: ignore[reportOptionalCall]
    with first_process(f"write {safetensors.INDEX!r}"):
        if folder is not None and len(shards) > 1:
            total = sum(_size(piece) for shard in shards for piece in shard)
            write_json(folder / safetensors.INDEX, {"metadata": {"total_size": total}, "weight_map": files})


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

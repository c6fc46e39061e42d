"""The weights of a GGUF file as a checkpoint: its keys as a ModelConfig, its tensors under their Hub names."""

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from jaxtyping import Int, Shaped, UInt8

from jaxflash.config import ModelConfig, RopeScaling
from jaxflash.gguf.file import Header, TensorInfo, read_header
from jaxflash.hf.load import Checkpoint, checked
from jaxflash.hf.tensors import Index, MappedFile, StoredTensor
from jaxflash.layers import rotary_frequencies
from pallas_kernels.dispatch import Unsupported
from sharding.names import did_you_mean

# (qkv_bias, qk_norm, rotary pairs stored as neighbours): llama.cpp permutes q and k of its "llama" family only.
_ARCHITECTURES = {"llama": (False, False, True), "qwen2": (True, False, False), "qwen3": (False, True, False)}
_DENSE = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16)}
TYPES = (*_DENSE, "Q4_0", "Q4_1", "Q8_0", "Q6_K")
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
# Keys of what the model does not have, with the value that says so.
_ABSENT = (("expert_count", 0), ("attention.sliding_window", 0))
# Elements that are dequantised at a time; the package keeps several float32 copies of them.
_BLOCK = 1 << 18


def open_gguf(path: Path) -> Checkpoint:
    """The checkpoint in a GGUF file, without its weights. Quantised ones are read as the float32 that they stand for.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a broken file, a missing key, or tensors that are not those of its configuration; where weights are
        read, scales of blocks that are not finite.
      Unsupported: an architecture, rotary scaling or tensor type that is not served.
    """
    header = read_header(path)
    config = _config(header)
    neighbours = _ARCHITECTURES[header.metadata["general.architecture"]][2]
    heads = {"attn_q": config.n_heads, "attn_k": config.n_kv_heads} if neighbours else {}
    stored = {}
    for name, info in header.tensors.items():
        if name != _ROPE_FACTORS:
            hub = _hub_name(name)
            stored[hub] = _stored(hub, info, header, heads.get(name.split(".")[-2]) if "." in name else None)
    return checked(config, stored)


def _config(header: Header) -> ModelConfig:
    values, name = header.metadata, header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        reason = f"is not a known GGUF architecture. {did_you_mean(str(name), _ARCHITECTURES)}"
        raise Unsupported(f"load: {name!r} {reason}", [(str(name), reason)])
    qkv_bias, qk_norm, _ = _ARCHITECTURES[name]
    size = functools.partial(_size, values)
    heads, width = size(f"{name}.attention.head_count"), size(f"{name}.embedding_length")
    head_dim = size(f"{name}.attention.key_length", size(f"{name}.rope.dimension_count", width // heads or 1))
    problems = []
    if values.get("split.count", 1) not in (0, 1):
        problems.append(
            f"split.count={values['split.count']}; the parts must be merged first (llama-gguf-split --merge)"
        )
    for key, served in (("attention.value_length", head_dim), ("rope.dimension_count", head_dim), *_ABSENT):
        if values.get(f"{name}.{key}", served) != served:
            problems.append(f"{name}.{key}={values[f'{name}.{key}']}; {served} is served")
    problems += _rope_problems(values, f"{name}.rope.")
    if problems:
        raise Unsupported(f"load: {header.path.name!r} with {'; '.join(problems)}.", [(name, p) for p in problems])
    table = header.tensors.get("token_embd.weight")
    theta = _number(values, f"{name}.rope.freq_base", 10_000.0)
    return ModelConfig(
        vocab_size=size(f"{name}.vocab_size", table.shape[0] if table and len(table.shape) == 2 else None),
        d_model=width,
        n_layers=size(f"{name}.block_count"),
        n_heads=heads,
        n_kv_heads=size(f"{name}.attention.head_count_kv", heads),
        head_dim=head_dim,
        d_ff=size(f"{name}.feed_forward_length"),
        context=size(f"{name}.context_length"),
        rope_theta=theta,
        rope_scaling=_rope_scaling(header, head_dim, theta),
        norm_eps=_number(values, f"{name}.attention.layer_norm_rms_epsilon"),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        tie_embeddings="output.weight" not in header.tensors,
    )


def _rope_problems(values: Mapping[str, Any], prefix: str) -> list[str]:
    """Scaling of positions. As in llama.cpp, a factor without a type is linear, and 0 is the same as 1."""
    kind = values.get(f"{prefix}scaling.type", "linear")
    factor = values.get(f"{prefix}scaling.factor", values.get(f"{prefix}scale_linear", 0))
    attention = values.get(f"{prefix}scaling.attn_factor", 1)
    problems = []
    if kind not in ("none", "linear") or (kind == "linear" and factor not in (0, 1)):
        problems.append(f"rotary scaling of type {kind!r} and {factor=}; only llama3's is served")
    if attention not in (0, 1):
        problems.append(f"{prefix}scaling.attn_factor={attention!r}; 1 is served")
    return problems


def _rope_scaling(header: Header, head_dim: int, theta: float) -> RopeScaling | None:
    """llama.cpp stores what Llama-3 scaling divides each frequency by; only the published kind of it is recognised."""
    info = header.tensors.get(_ROPE_FACTORS)
    if info is None:
        return None
    # The shape first: a head_dim that only the header claims must not decide how much is computed.
    if info.shape == (head_dim // 2,):
        factors = _stored(_ROPE_FACTORS, info, header, None).read((slice(None),))
        scaling = RopeScaling(factor=max(float(factors.max()), 1.0))
        with jax.ensure_compile_time_eval():
            divided = rotary_frequencies(head_dim, theta, None) / rotary_frequencies(head_dim, theta, scaling)
        # Both sides are a few float32 operations of numbers up to `factor`; a wrong kind is off by far more.
        if np.allclose(factors, np.asarray(divided), rtol=1e-4):
            return scaling
    reason = f"{_ROPE_FACTORS} is not Llama-3 scaling with the published frequencies and context"
    raise Unsupported(f"load: {header.path.name!r}: {reason}. Use the model's safetensors.", [("rotary", reason)])


def _hub_name(name: str) -> str:
    """The Hub's name for one of ggml's; one that is none of them is marked, so that it is no Hub name by chance."""
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in _WHOLE:
        return f"{_WHOLE[parts[0]]}.{parts[1]}"
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
    return f"(ggml) {name}"


def _stored(name: str, info: TensorInfo, header: Header, heads: int | None) -> StoredTensor:
    known = {int(kind): kind.name for kind in GGMLQuantizationType}
    kind = known.get(info.type, f"number {info.type}")
    if kind not in TYPES:
        reason = f"type {kind}; served are {', '.join(TYPES)}"
        raise Unsupported(f"load: {name!r} has {reason}. Quantise the model to one of them.", [(name, reason)])
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    nbytes = math.prod(info.shape) // block * block_bytes
    if info.shape[-1] % block or not info.shape[-1] or nbytes > len(header.mapped.bytes) - info.offset:
        raise ValueError(
            f"load: {name!r} of shape={info.shape} and type {kind} has no whole blocks of {block}, or reaches beyond "
            f"the end of {header.path.name!r} - the file is truncated. Fetch it again."
        )
    read = functools.partial(_read, name, header.mapped, info, GGMLQuantizationType[kind], heads)
    return StoredTensor(
        name=name,
        shape=info.shape,
        dtype=_DENSE.get(kind, np.dtype(np.float32)),
        stored_as=kind,
        nbytes=nbytes,
        file=header.path,
        read=read,
    )


def _from_neighbours(rows: int, heads: int) -> Int[np.ndarray, " rows"]:
    """Row of the file for each row of the model: there rotary pairs are neighbours, here half a head apart."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)


def _read(
    name: str, mapped: MappedFile, info: TensorInfo, kind: GGMLQuantizationType, heads: int | None, index: Index
) -> Shaped[np.ndarray, "..."]:
    """The rectangle `index`, dequantised a few rows at a time. heads: rotary pairs are neighbours in so many heads.

    Called once the shape is known to be the configuration's, so that the rows are whole heads of pairs. Raises
    ValueError, with `name`, for rows of quantised blocks with a scale that is not finite.
    """
    matrix = info.shape if len(info.shape) == 2 else (1, math.prod(info.shape))
    rows, columns = index if len(info.shape) == 2 else (slice(None), index[-1])
    block, block_bytes = GGML_QUANT_SIZES[kind]
    row_bytes = matrix[1] // block * block_bytes
    source = mapped.bytes[info.offset : info.offset + matrix[0] * row_bytes].reshape(matrix[0], row_bytes)
    chosen = (np.arange(matrix[0]) if heads is None else _from_neighbours(matrix[0], heads))[rows]
    dtype = _DENSE.get(kind.name, np.dtype(np.float32))
    out = np.empty((len(chosen), len(range(*columns.indices(matrix[1])))), dtype)
    step = max(_BLOCK // matrix[1], 1)
    for start in range(0, len(chosen), step):
        raw = source[chosen[start : start + step]]
        values = raw.view(dtype) if kind.name in _DENSE else _dequantised(name, raw, kind)
        out[start : start + step] = values[:, columns]
        if heads is None:  # else the next rows lie on the same pages
            first, last = int(chosen[start]), int(chosen[start : start + step][-1])
            mapped.forget(info.offset + first * row_bytes, info.offset + (last + 1) * row_bytes)
    if heads is not None:
        mapped.forget(info.offset, info.offset + matrix[0] * row_bytes)
    return out if len(info.shape) == 2 else out[0]


def _dequantised(name: str, raw: UInt8[np.ndarray, "rows bytes"], kind: GGMLQuantizationType) -> Any:
    with np.errstate(invalid="ignore"):  # told below
        values = dequantize(raw, kind)
    bad = values.size - np.count_nonzero(np.isfinite(values))
    if bad:
        raise ValueError(
            f"load: {name!r} has {bad} weights that are NaN or infinite, by the scales of their {kind.name} blocks. "
            "Fetch the file again."
        )
    return values


def _size(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = values.get(key, default)
    if type(value) is not int or not 1 <= value < 1 << 31:
        raise ValueError(f"load: the GGUF file has {key}={value!r} - must be an integer from 1, below 2^31.")
    return value


def _number(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = values.get(key, default)
    if type(value) not in (int, float) or not 0 < value <= 1e30:
        raise ValueError(f"load: the GGUF file has {key}={value!r} - must be a positive number.")
    # Stored in float32: the shortest number that rounds to it is the one that was meant (1e-05, not 9.99999975e-06).
    return float(str(np.float32(value)))

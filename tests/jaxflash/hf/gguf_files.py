"""GGUF files by the `gguf` package's writer, and what their quantised types mean by the formats' own formulas."""

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors import safe_open

from jaxflash.config import ModelConfig
from jaxflash.hf.load import open_checkpoint
from tests.jaxflash import model_oracle
from tests.jaxflash.hf.tiny import GOLDEN, llama_folder

GGML = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def neighbours(w, heads):
    """llama.cpp's order of rows: the pairs (i, i + half) of a head one after the other."""
    half = len(w) // heads // 2
    rows = [head * 2 * half + half * part + i for head in range(heads) for i in range(half) for part in (0, 1)]
    return w[rows]


def writer(path, arch, config, **keys: Any) -> gguf.GGUFWriter:
    out = gguf.GGUFWriter(path, arch)
    out.add_block_count(config.n_layers)
    out.add_context_length(config.context)
    out.add_embedding_length(config.d_model)
    out.add_feed_forward_length(config.d_ff)
    out.add_head_count(config.n_heads)
    out.add_head_count_kv(config.n_kv_heads)
    out.add_key_length(config.head_dim)
    out.add_value_length(config.head_dim)
    out.add_layer_norm_rms_eps(config.norm_eps)
    out.add_rope_freq_base(config.rope_theta)
    for key, value in keys.items():
        add = {str: out.add_string, int: out.add_uint32, float: out.add_float32, list: out.add_array}[type(value)]
        add(key.replace("__", "."), value)
    return out


def finish(out: gguf.GGUFWriter) -> None:
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def ggml_name(name: str) -> str:
    if name.startswith("model.layers."):
        layer, rest = name.removeprefix("model.layers.").split(".", 1)
        module, _, kind = rest.rpartition(".")
        return f"blk.{layer}.{GGML[module]}.{kind}"
    return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}.get(
        name, "output.weight"
    )


def from_golden(name: str, path: Path, arch: str, *, change: dict | None = None, **extra: Any) -> Path:
    """A golden checkpoint in float32 as llama.cpp's converter writes it; `change` is of its configuration."""
    config = dataclasses.replace(open_checkpoint(GOLDEN / name).config, **(change or {}))
    out = writer(path, arch, config, **extra)
    for file in sorted((GOLDEN / name).glob("*.safetensors")):
        with safe_open(file, framework="flax") as opened:
            for tensor in opened.keys():
                value = np.asarray(opened.get_tensor(tensor)).astype(np.float32)
                if arch == "llama" and "q_proj" in tensor:
                    value = neighbours(value, config.n_heads)
                if arch == "llama" and "k_proj" in tensor:
                    value = neighbours(value, config.n_kv_heads)
                out.add_tensor(ggml_name(tensor), value)
    if config.rope_scaling is not None:
        plain = dataclasses.replace(config, rope_scaling=None)
        factors = model_oracle.frequencies(plain) / model_oracle.frequencies(config)
        out.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    finish(out)
    return path


def f16(raw):
    return raw.view(np.float16).astype(np.float32)


def q4_0(b):
    low, high = b[:, 2:] & 15, b[:, 2:] >> 4
    return f16(b[:, :2]) * (np.concatenate([low, high], 1).astype(np.float32) - 8)


def q4_1(b):
    low, high = b[:, 4:] & 15, b[:, 4:] >> 4
    return f16(b[:, :2]) * np.concatenate([low, high], 1).astype(np.float32) + f16(b[:, 2:4])


def q8_0(b):
    return f16(b[:, :2]) * b[:, 2:].view(np.int8).astype(np.float32)


def q6_k(blocks):
    """ggml-quants.c's loop: 4 low bits in ql, 2 high ones in qh, a signed scale for each 16."""
    out = np.empty((len(blocks), 256), np.float32)
    for block, y in zip(blocks, out, strict=True):
        ql, qh, scales, d = block[:128], block[128:192], block[192:208].view(np.int8), f16(block[208:])[0]
        for half in range(2):
            for i in range(32):
                for part in range(4):
                    low = ql[64 * half + 32 * (part % 2) + i] >> (4 * (part // 2)) & 15
                    high = qh[32 * half + i] >> (2 * part) & 3
                    scale = np.float32(d) * np.float32(scales[8 * half + 2 * part + i // 16])
                    y[128 * half + 32 * part + i] = scale * np.float32(int(low | high << 4) - 32)
    return out


FORMULAS = {
    Kind.Q4_0: (q4_0, 32, 18),
    Kind.Q4_1: (q4_1, 32, 20),
    Kind.Q8_0: (q8_0, 32, 34),
    Kind.Q6_K: (q6_k, 256, 210),
}
KINDS = {
    "self_attn.q_proj": Kind.Q4_0, "self_attn.k_proj": Kind.Q8_0, "self_attn.v_proj": Kind.Q6_K,
    "self_attn.o_proj": Kind.F16, "mlp.gate_proj": Kind.Q4_1, "mlp.up_proj": Kind.Q6_K, "mlp.down_proj": Kind.F32,
}  # fmt: skip


def stored(rng, shape, kind):
    """(what the file holds, the float32 that it stands for)"""
    if kind in FORMULAS:
        formula, block, size = FORMULAS[kind]
        raw = rng.integers(0, 256, (shape[0] * shape[1] // block, size), dtype=np.uint8)
        at = 208 if kind == Kind.Q6_K else 0
        raw[:, at + 1] &= 0xBB  # the scale's exponent: no inf or NaN, nothing huge
        if kind == Kind.Q4_1:
            raw[:, 3] &= 0xBB
        return raw.reshape(shape[0], -1), formula(raw).reshape(shape)
    values = rng.standard_normal(shape).astype(np.float16 if kind == Kind.F16 else np.float32)
    return values, values.astype(np.float32)


def quantised_file(folder: Path) -> tuple[Path, dict[str, np.ndarray], ModelConfig]:
    """(file, tensor name at the Hub -> its values, config) of a one-layer Llama with tensors of every type."""
    hub = llama_folder(folder / "hub", vocab=96, width=256)
    config = dataclasses.replace(open_checkpoint(hub).config, d_ff=16)
    rng = np.random.default_rng(3)
    out = writer(folder / "x.gguf", "llama", config)
    expected = {}
    for tensor in open_checkpoint(hub).stored.values():
        if len(tensor.shape) == 1:
            kind = Kind.F32
            raw = values = rng.standard_normal(tensor.shape).astype(np.float32)
        else:
            module = tensor.name.removeprefix("model.layers.0.").removesuffix(".weight")
            kind = KINDS.get(module, Kind.Q6_K)
            raw, values = stored(rng, tensor.shape, kind)
        expected[tensor.name] = values
        if "q_proj" in tensor.name or "k_proj" in tensor.name:
            raw = neighbours(raw, config.n_heads)
        out.add_tensor(ggml_name(tensor.name), raw, raw_dtype=kind)
    finish(out)
    return folder / "x.gguf", expected, config


TOKENS = ["<s>", "</s>", "<|u|>"]
ALPHABET = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "12 3", "1 2"[::-1]]


def with_tokenizer(path: Path, pre: str = "gpt-2", **keys: Any) -> Path:
    merged = ["".join(merge.split()) for merge in MERGES]
    tokens = [*TOKENS, *ALPHABET, *merged]
    kinds = [3, 3, 4, *[1] * (len(tokens) - 3)]
    values: dict[str, Any] = dict(
        tokenizer__ggml__model="gpt2", tokenizer__ggml__pre=pre, tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__merges=MERGES, tokenizer__ggml__token_type=kinds, tokenizer__ggml__bos_token_id=0,
        tokenizer__ggml__eos_token_id=1, tokenizer__chat_template="{{ bos_token }}{{ messages[0].content }}",
    )  # fmt: skip
    values = {key: value for key, value in (values | keys).items() if value is not ...}
    return from_golden("qwen2", path, "qwen2", **values)

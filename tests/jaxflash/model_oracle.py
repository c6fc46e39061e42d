"""The transformer written out in NumPy, one row and one query at a time, and small models of every supported shape.

`logits(..., dtype=float64)` is the truth. In float32 or bfloat16 the same text is the same-precision reference that
says how much of an error is rounding: matmuls round to `dtype`; norms, rotations and softmax to float32 at least.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxflash.config import ModelConfig, RopeScaling
from jaxflash.model import abstract


def small(**changes):
    sizes: dict[str, Any] = dict(
        vocab_size=37, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48, context=512,
        compute_dtype="float32",
    )  # fmt: skip
    return ModelConfig(**(sizes | changes))


# One of each published family; wavelengths of the scaled one are 6, 63, 628 and 6283: kept, between, slowed, slowed.
SHAPES = {
    "llama2": small(n_kv_heads=4),
    "llama3": small(rope_scaling=RopeScaling(factor=8.0, original_context=64), tie_embeddings=True),
    "mistral": small(n_kv_heads=1, sliding_window=4),
    "qwen2": small(qkv_bias=True, tie_embeddings=True, norm_eps=1e-6, rope_theta=1e6),
    "qwen3": small(qk_norm=True, head_dim=16),
    "smollm2": small(n_heads=3, n_kv_heads=1, tie_embeddings=True, n_layers=3),
}


def random_params(config, seed=0):
    """Parameters far from their initial values, so that every one of them, and attention, moves the logits."""
    rng = np.random.default_rng(seed)

    def leaf(path, shape):
        noise = rng.standard_normal(shape.shape)
        name = path[-1].key
        if name == "scale":
            value = 1 + 0.3 * noise
        elif name == "bias":
            value = 0.5 * noise
        elif name == "table":
            value = noise
        else:
            value = 1.5 * noise / math.sqrt(shape.shape[-2])
        return jnp.asarray(value, shape.dtype)

    return jax.tree_util.tree_map_with_path(leaf, abstract(config)[1])


def frequencies(config):
    """Radians a token of each pair, in Python floats; the scaling as published with Llama 3.1."""
    out = []
    for i in range(config.head_dim // 2):
        frequency = 1.0 / config.rope_theta ** (2 * i / config.head_dim)
        s = config.rope_scaling
        if s is not None:
            wavelength = 2 * math.pi / frequency
            if wavelength > s.original_context / s.low_freq_factor:
                frequency /= s.factor
            elif wavelength > s.original_context / s.high_freq_factor:
                smooth = s.original_context / wavelength - s.low_freq_factor
                smooth /= s.high_freq_factor - s.low_freq_factor
                frequency = (1 - smooth) * frequency / s.factor + smooth * frequency
        out.append(frequency)
    return np.array(out)


class _Arithmetic:
    def __init__(self, dtype):
        self.dtype = np.dtype(dtype)
        self.wide = np.dtype(jnp.promote_types(dtype, jnp.float32)) if dtype != np.float64 else np.dtype(np.float64)

    def matmul(self, a, b):
        a, b = (x.astype(self.dtype).astype(self.wide) for x in (a, b))
        return (a @ b).astype(self.dtype)

    def norm(self, x, scale, eps):
        x = x.astype(self.wide)
        mean_square = (x * x).mean(axis=-1, keepdims=True)
        return (x / np.sqrt(mean_square + self.wide.type(eps)) * scale.astype(self.wide)).astype(self.dtype)

    def rotate(self, x, position, frequency):
        """x (H,): pair (i, i + H/2) turned by position * frequency[i]."""
        x, half = x.astype(self.wide), len(x) // 2
        angle = self.wide.type(position) * frequency.astype(self.wide)
        out = np.empty_like(x)
        for i in range(half):
            cos, sin = np.cos(angle[i]), np.sin(angle[i])
            out[i] = x[i] * cos - x[i + half] * sin
            out[i + half] = x[i] * sin + x[i + half] * cos
        return out.astype(self.dtype)

    def attend(self, q, keys, values):
        """One query (H,) over the keys (S, H) that it sees."""
        scores = (keys.astype(self.wide) @ q.astype(self.wide)) / self.wide.type(math.sqrt(len(q)))
        weights = np.exp(scores - scores.max())
        out = weights.astype(self.dtype).astype(self.wide) @ values.astype(self.wide)
        return (out / weights.sum()).astype(self.dtype)

    def silu(self, x):
        x = x.astype(self.wide)
        return (x / (1 + np.exp(-x))).astype(self.dtype)


def logits(params, config, tokens, *, positions=None, segments=None, dtype: Any = np.float64, watch=None):
    """(T,) tokens -> (T, V) logits. Keys of another segment, later keys and keys outside the window are not seen.

    watch: called with the block, the name and the inputs (T, K) of every linear.
    """
    c, ops = config, _Arithmetic(dtype)
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    length, group = len(tokens), c.n_heads // c.n_kv_heads
    positions = range(length) if positions is None else positions
    segments = [0] * length if segments is None else segments
    frequency = frequencies(c)
    x = params["table"][np.asarray(tokens)].astype(ops.dtype)
    for index in range(c.n_layers):
        block = jax.tree.map(lambda leaf, index=index: leaf[index], params["blocks"])
        attention = block["attention"]

        def linear(name, h, index=index, block=block):
            if watch is not None:
                watch(index, name, h)
            part, _, name = name.partition("/")
            return ops.matmul(h, block[part][name]["weight"])

        def project(name, heads, h, attention=attention, linear=linear):
            y = linear(f"attention/{name}", h)
            if c.qkv_bias:
                y = y + attention[name]["bias"].astype(ops.dtype)
            y = y.reshape(length, heads, c.head_dim)
            if name != "v" and c.qk_norm:
                y = ops.norm(y, attention[f"{name}_norm"]["scale"], c.norm_eps)
            return y

        h = ops.norm(x, block["attention_norm"]["scale"], c.norm_eps)
        q, k, v = project("q", c.n_heads, h), project("k", c.n_kv_heads, h), project("v", c.n_kv_heads, h)
        for t in range(length):
            for head in range(c.n_heads):
                q[t, head] = ops.rotate(q[t, head], positions[t], frequency)
            for head in range(c.n_kv_heads):
                k[t, head] = ops.rotate(k[t, head], positions[t], frequency)
        mixed = np.zeros((length, c.n_heads, c.head_dim), ops.dtype)
        for t in range(length):
            seen = [s for s in range(t + 1) if segments[s] == segments[t]]
            if c.sliding_window is not None:
                seen = [s for s in seen if t - s < c.sliding_window]
            for head in range(c.n_heads):
                mixed[t, head] = ops.attend(q[t, head], k[seen, head // group], v[seen, head // group])
        x = x + linear("attention/out", mixed.reshape(length, -1))
        h = ops.norm(x, block["mlp_norm"]["scale"], c.norm_eps)
        hidden = ops.silu(linear("mlp/gate", h)) * linear("mlp/up", h)
        x = x + linear("mlp/down", hidden)
    x = ops.norm(x, params["norm"]["scale"], c.norm_eps)
    head = params["table"].T if c.tie_embeddings else params["head"]["weight"]
    return x.astype(ops.wide) @ head.astype(ops.dtype).astype(ops.wide)


def batch_logits(params, config, tokens, *, positions=None, segments=None, dtype: Any = np.float64):
    """`logits` of (B, T) rows."""
    rows = range(len(tokens))
    pick = lambda x, row: None if x is None else x[row]  # noqa: E731
    return np.stack(
        [
            logits(params, config, tokens[r], positions=pick(positions, r), segments=pick(segments, r), dtype=dtype)
            for r in rows
        ]
    )


def nats(all_logits, targets, mask):
    """Summed cross entropy over the places of `mask`, one place at a time."""
    total = 0.0
    for place in zip(*np.nonzero(mask), strict=True):
        row = np.asarray(all_logits[place], np.float64)
        peak = row.max()
        total += peak + math.log(np.exp(row - peak).sum()) - row[targets[place]]
    return total


def rounding_depth(config, length):
    """Longest chain of float32 additions and products from a parameter through the loss and back to its gradient.

    A sum of n products is off by at most n half-ulps of the sum of their magnitudes (Higham, Accuracy and Stability,
    section 3.1); forward and backward pass through the same matmuls, whose weight gradients sum over the tokens.
    """
    layer = 2 * config.d_model + config.n_heads * config.head_dim + config.head_dim + length + config.d_ff
    return 3 * (config.n_layers * layer + config.vocab_size + length)

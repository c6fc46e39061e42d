"""A decoder-only transformer in Flax NNX: blocks stacked on a leading layer axis and run by one `lax.scan`.

    tokens -> table -> [ x + attention(norm(x));  x + mlp(norm(x)) ] x n_layers -> norm -> head

Nothing here asks which backend or mesh is in force: attention picks its implementation by `why_not`, and `constrain`
names activations for whatever mesh `jax.set_mesh` has set.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxflash.config import ModelConfig
from jaxflash.layers import Linear, RMSNorm, matmul_float32, rotary_table, rotate
from pallas_kernels.attention.api import dot_product_attention
from pallas_kernels.fp8.derivative import SCALE
from sharding import ring
from sharding.lookup import take_rows
from sharding.rules import constrain, copies

_policies = jax.checkpoint_policies
_save_scales = _policies.save_only_these_names(SCALE)
_save_attention = _policies.save_only_these_names("attention_out", "attention_lse")
_save_dots = _policies.dots_with_no_batch_dims_saveable

# What the backward pass keeps of each block instead of computing it again; "none" keeps everything. Only the Hopper
# kernels name their output and LSE (in their derivative rule, pallas_kernels/attention/derivative.py). Under each of
# them scales of operands in 8 bits are kept too.
REMAT_POLICIES: dict[str, Any] = {
    "full": _policies.nothing_saveable,
    "dots": _save_dots,
    "attention": _save_attention,
    "dots_and_attention": _policies.save_from_both_policies(
        _policies.dots_with_no_batch_dims_saveable, _save_attention
    ),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of the tokens seen so far: (L, B, S, K, H) each; `lengths` (B,) int32 counts the live slots."""

    keys: jax.Array
    values: jax.Array
    lengths: jax.Array

    @classmethod
    def empty(cls, config: ModelConfig, batch: int, size: int) -> "KVCache":
        """A cache of `size` slots a row, in the compute dtype."""
        shape = (config.n_layers, batch, size, config.n_kv_heads, config.head_dim)
        zeros = jnp.zeros(shape, config.compute_dtype)
        return cls(zeros, zeros, jnp.zeros(batch, jnp.int32))

    def write(self, layer: Int[Array, ""], k: Float[Array, "b t k h"], v: Float[Array, "b t k h"]) -> "KVCache":
        """The cache with t new tokens in `layer`, from slot `lengths` of each row on; in place where it is a loop's."""
        rows = jnp.arange(k.shape[0])[:, None]
        slots = self.lengths[:, None] + jnp.arange(k.shape[1])[None, :]
        keys = self.keys.at[layer, rows, slots].set(k.astype(self.keys.dtype))
        values = self.values.at[layer, rows, slots].set(v.astype(self.values.dtype))
        return dataclasses.replace(self, keys=keys, values=values)


class Attention(nnx.Module):
    """Causal grouped-query attention with optional QKV bias, QK-norm (per head, before the rotation) and window."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c = self.config = config
        kw: dict[str, Any] = dict(
            dtype=c.compute_dtype, precision=c.linear_precision, param_dtype=c.param_dtype, rngs=rngs
        )
        q_size, kv_size = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        self.q = Linear(c.d_model, q_size, axes=("embed", "heads"), std=c.init_std, use_bias=c.qkv_bias, **kw)
        self.k = Linear(c.d_model, kv_size, axes=("embed", "kv_heads"), std=c.init_std, use_bias=c.qkv_bias, **kw)
        self.v = Linear(c.d_model, kv_size, axes=("embed", "kv_heads"), std=c.init_std, use_bias=c.qkv_bias, **kw)
        self.out = Linear(q_size, c.d_model, axes=("heads", "embed"), std=c.init_std / (2 * c.n_layers) ** 0.5, **kw)
        norm: dict[str, Any] = dict(eps=c.norm_eps, axes=("head_dim",), param_dtype=c.param_dtype)
        self.q_norm = RMSNorm(c.head_dim, **norm) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, **norm) if c.qk_norm else None

    def __call__(
        self,
        x: Float[Array, "b t d"],
        rope: tuple[Float[Array, "b t 1 half"], Float[Array, "b t 1 half"]],
        segment_ids: Int[Array, "b t"] | None,
        layer: Int[Array, ""],
        cache: KVCache | None,
        zigzag: int = 1,
    ) -> tuple[Float[Array, "b t d"], KVCache | None]:
        c, (b, t, _) = self.config, x.shape
        q = self.q(x).reshape(b, t, c.n_heads, c.head_dim)
        k = self.k(x).reshape(b, t, c.n_kv_heads, c.head_dim)
        v = self.v(x).reshape(b, t, c.n_kv_heads, c.head_dim)
        repeats = copies("act_heads", c.n_kv_heads)
        split = "act_heads" if repeats == 1 else None
        q = constrain(q, "batch", "sequence", "act_heads", "head_dim")
        k, v = (constrain(a, "batch", "sequence", split, "head_dim") for a in (k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rope), rotate(k, *rope)
        if cache is not None:
            cache = cache.write(layer, k, v)
        if cache is not None and t == 1:
            out = self._attend_cache(q, layer, cache)
        else:
            window = None if c.sliding_window is None else (c.sliding_window - 1, 0)
            if repeats > 1:  # fewer than the query heads are split over: each device takes the one it needs
                k, v = (
                    constrain(jnp.repeat(a, repeats, axis=2), "batch", "sequence", "act_heads", "head_dim")
                    for a in (k, v)
                )
            out = dot_product_attention(
                q, k, v, is_causal=True, segment_ids=segment_ids, local_window_size=window, implementation=c.attention,
                zigzag=zigzag, context_parallel=c.context_parallel, precision=c.attention_precision,
            )  # fmt: skip
        return self.out(out.reshape(b, t, c.n_heads * c.head_dim)), cache

    def _attend_cache(
        self, q: Float[Array, "b 1 n h"], layer: Int[Array, ""], cache: KVCache
    ) -> Float[Array, "b 1 n h"]:
        """One new token a row, already written to slot `lengths`, against every live slot."""
        keys, values, live = cache.keys[layer], cache.values[layer], cache.lengths + 1
        # A named implementation is for whole sequences; a single query is left to the dispatcher.
        if self.config.sliding_window is None:
            return dot_product_attention(q, keys, values, key_value_seq_lengths=live)
        slot, live = jnp.arange(keys.shape[1])[None, :], live[:, None]
        mask = (slot < live) & (slot >= live - self.config.sliding_window)
        return dot_product_attention(q, keys, values, mask=mask[:, None, None, :])


class MLP(nnx.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))` (2002.05202)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c = config
        kw: dict[str, Any] = dict(
            dtype=c.compute_dtype, precision=c.linear_precision, param_dtype=c.param_dtype, rngs=rngs
        )
        self.gate = Linear(c.d_model, c.d_ff, axes=("embed", "mlp"), std=c.init_std, **kw)
        self.up = Linear(c.d_model, c.d_ff, axes=("embed", "mlp"), std=c.init_std, **kw)
        self.down = Linear(c.d_ff, c.d_model, axes=("mlp", "embed"), std=c.init_std / (2 * c.n_layers) ** 0.5, **kw)

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        hidden = jax.nn.silu(self.gate(x)) * self.up(x)
        return self.down(constrain(hidden, "batch", "sequence", "act_mlp"))


class Block(nnx.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        norm: dict[str, Any] = dict(eps=config.norm_eps, axes=("norm",), param_dtype=config.param_dtype)
        self.attention_norm = RMSNorm(config.d_model, **norm)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.d_model, **norm)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "b t d"],
        rope: tuple[Float[Array, "b t 1 half"], Float[Array, "b t 1 half"]],
        segment_ids: Int[Array, "b t"] | None,
        layer: Int[Array, ""],
        cache: KVCache | None,
        zigzag: int = 1,
    ) -> tuple[Float[Array, "b t d"], KVCache | None]:
        mixed, cache = self.attention(self.attention_norm(x), rope, segment_ids, layer, cache, zigzag)
        x = constrain(x + mixed, "batch", "sequence", "act_embed")
        x = constrain(x + self.mlp(self.mlp_norm(x)), "batch", "sequence", "act_embed")
        return x, cache


class Transformer(nnx.Module):
    """The decoder. `model(tokens)` gives float32 logits; `prefill` and `decode` do the same through a KV cache."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c = self.config = config
        table = c.init_std * jax.random.normal(rngs.params(), (c.vocab_size, c.d_model), jnp.float32)
        self.table = nnx.Param(table.astype(c.param_dtype), axes=("table_rows", "table_width"))
        self.blocks = _stack_blocks(c, rngs)
        self.norm = RMSNorm(c.d_model, eps=c.norm_eps, axes=("norm",), param_dtype=c.param_dtype)
        kw: dict[str, Any] = dict(dtype=c.compute_dtype, param_dtype=c.param_dtype, rngs=rngs)
        self.head = (
            None if c.tie_embeddings else Linear(c.d_model, c.vocab_size, axes=("embed", "vocab"), std=c.init_std, **kw)
        )

    def __call__(
        self,
        tokens: Int[Array, "b t"],
        *,
        positions: Int[Array, "b t"] | None = None,
        segment_ids: Int[Array, "b t"] | None = None,
        zigzag: int = 1,
    ) -> Float[Array, "b t v"]:
        """Float32 logits of the next token at every place. positions: default 0..T-1; segment_ids: packed documents.

        zigzag: the number of devices in whose zigzag order all of these are stored (`sharding.ring.zigzag`).
        """
        return self.logits(self.hidden(tokens, positions=positions, segment_ids=segment_ids, zigzag=zigzag))

    def hidden(
        self,
        tokens: Int[Array, "b t"],
        *,
        positions: Int[Array, "b t"] | None = None,
        segment_ids: Int[Array, "b t"] | None = None,
        zigzag: int = 1,
    ) -> Float[Array, "b t d"]:
        """The normalised output of the last block, before the head."""
        if positions is None:
            places = ring.zigzag(jnp.arange(tokens.shape[1]), zigzag, axis=0)
            positions = jnp.broadcast_to(places[None, :], tokens.shape)
        return self._run(tokens, positions, segment_ids, None, zigzag)[0]

    def embed(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t d"]:
        """What the first block reads: the tokens' rows of the table, in the compute dtype."""
        # Gathered over fsdp first: a lookup in rows split both ways would reshuffle what it finds. Cast last: a row's
        # gradient is summed over all places of its token, which must not round to bfloat16.
        table = constrain(self.table[...], "vocab", "table_width")
        x = take_rows(table, tokens).astype(self.config.compute_dtype)
        return constrain(x, "batch", "sequence", "act_embed")

    def logits(self, hidden: Float[Array, "b t d"]) -> Float[Array, "b t v"]:
        """Float32 logits of `hidden` states; the table itself is the head where embeddings are tied."""
        if self.head is None:
            weight = constrain(self.table[...].astype(hidden.dtype), "vocab", "table_width").T
        else:
            weight = self.head.weight[...].astype(hidden.dtype)
        logits = matmul_float32(hidden, weight)
        return constrain(logits, "batch", "sequence", "act_vocab")

    def prefill(
        self, tokens: Int[Array, "b t"], lengths: Int[Array, " b"], cache: KVCache
    ) -> tuple[Float[Array, "b v"], KVCache]:
        """Reads right-padded prompts into an empty cache; gives the logits after each row's last token.

        The slots past a row's length hold the padding's keys; they are never live and are written over by `decode`.
        """
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
        hidden, filled = self._run(tokens, positions, None, cache)
        last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
        return self.logits(last)[:, 0], dataclasses.replace(filled, lengths=lengths)

    def decode(self, token: Int[Array, " b"], cache: KVCache) -> tuple[Float[Array, "b v"], KVCache]:
        """One more token a row: its logits, and the cache one longer. The caller sees to it that a slot is free."""
        hidden, filled = self._run(token[:, None], cache.lengths[:, None], None, cache)
        return self.logits(hidden)[:, 0], dataclasses.replace(filled, lengths=cache.lengths + 1)

    def _run(self, tokens, positions, segment_ids, cache, zigzag=1) -> tuple[Array, Any]:
        x = self.embed(tokens)
        x, cache = run_blocks(self.config, self.blocks, x, positions, segment_ids, cache, zigzag=zigzag)
        return self.norm(x), cache


def run_blocks(
    config: ModelConfig,
    blocks: Block,
    x: Float[Array, "b t d"],
    positions: Int[Array, "b t"],
    segment_ids: Int[Array, "b t"] | None,
    cache: KVCache | None = None,
    zigzag: int = 1,
) -> tuple[Float[Array, "b t d"], KVCache | None]:
    """x after the blocks that are stacked in `blocks`, and the cache. zigzag: as `Transformer` takes it."""
    rope = rotary_table(positions, config.head_dim, config.rope_theta, config.rope_scaling)
    graph, stacked = nnx.split(blocks)
    layers = jnp.arange(jax.tree.leaves(stacked)[0].shape[0])

    # The cache is carried, not scanned over: a loop updates its carry in place and would copy what it scans.
    def one(carry, xs):
        x, cache = carry
        params, layer = xs
        return nnx.merge(graph, params)(x, rope, segment_ids, layer, cache, zigzag), None

    if cache is None:
        one = _rematerialised(config, one)
    (x, cache), _ = jax.lax.scan(one, (x, cache), (stacked, layers))
    return x, cache


def run_block(
    config: ModelConfig,
    block: Block,
    x: Float[Array, "b t d"],
    positions: Int[Array, "b t"],
    segment_ids: Int[Array, "b t"] | None,
    zigzag: int = 1,
) -> Float[Array, "b t d"]:
    """x after one block, as `run_blocks` computes it."""
    graph, params = nnx.split(block)

    def one(params, x):
        # In here, where it is computed again: outside, every block would keep the table.
        rope = rotary_table(positions, config.head_dim, config.rope_theta, config.rope_scaling)
        return nnx.merge(graph, params)(x, rope, segment_ids, jnp.int32(0), None, zigzag)[0]

    return _rematerialised(config, one)(params, x)


def _rematerialised(config: ModelConfig, one: Callable[..., Any]) -> Callable[..., Any]:
    if config.remat == "none":
        return one
    policy = _policies.save_from_both_policies(REMAT_POLICIES[config.remat], _save_scales)
    return jax.checkpoint(one, policy=policy, prevent_cse=False)


def _stack_blocks(config: ModelConfig, rngs: nnx.Rngs) -> Block:
    """One Block whose parameters carry a leading layer axis, each layer from a key of its own."""

    def layer_params(key):
        return nnx.to_pure_dict(nnx.state(Block(config, rngs=nnx.Rngs(params=key)), nnx.Param))

    graph, state = nnx.split(nnx.eval_shape(lambda: Block(config, rngs=nnx.Rngs(0))))
    block = nnx.merge(graph, jax.vmap(layer_params)(jax.random.split(rngs.params(), config.n_layers)))
    for _, variable in nnx.to_flat_state(nnx.state(block, nnx.Param)):
        variable.set_metadata(axes=("layer", *variable.axes))
    return block


def abstract(config: ModelConfig) -> tuple[Any, dict, dict]:
    """The model without its numbers: (graph definition, shapes, logical axes), the last two nested dicts alike.

    `nnx.merge(graph, params)` makes a Transformer of any dict of arrays of those shapes.
    """
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model, nnx.Param)
    axes = jax.tree.map(lambda v: v.axes, state, is_leaf=lambda v: isinstance(v, nnx.Variable))
    return graph, nnx.to_pure_dict(state), nnx.to_pure_dict(axes)


def init_params(config: ModelConfig, seed: int) -> dict:
    """Fresh parameters as a nested dict; call it under `jit` with `out_shardings` and nothing is ever unsharded."""
    return nnx.to_pure_dict(nnx.state(Transformer(config, rngs=nnx.Rngs(seed)), nnx.Param))


def count_parameters(config: ModelConfig) -> int:
    """Number of parameters, a tied table counted once."""
    return sum(leaf.size for leaf in jax.tree.leaves(abstract(config)[1]))


def axis_units(config: ModelConfig) -> dict[str, int]:
    """What the logical axes of a model's own count: layers, and heads, of which a dim holds heads times head_dim."""
    return {"layer": config.n_layers, "heads": config.n_heads, "kv_heads": config.n_kv_heads}


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Model FLOPs of one training token, forward and backward: 6 a matmul weight, and those of attention.

    A table counts where it is the head; norms, biases and recomputation do not.
    """
    leaves = jax.tree_util.tree_leaves_with_path(abstract(config)[1])
    matmuls = sum(leaf.size for path, leaf in leaves if path[-1].key == "weight")
    if config.tie_embeddings:
        matmuls += config.vocab_size * config.d_model
    return 6.0 * matmuls + attention_flops_per_token(config, seq_len)


def attention_flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """12 L N H keys, a third of them forward.

    A token of a full row sees `seq_len / 2` keys on average, or, with a window w below it, w - w^2 / (2 seq_len).
    """
    window = min(config.sliding_window or seq_len, seq_len)
    keys = window - window**2 / (2 * seq_len)
    return 12.0 * config.n_layers * config.n_heads * config.head_dim * keys

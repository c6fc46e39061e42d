"""NVIDIA's fused kernel, through `jax.nn.dot_product_attention(implementation="cudnn")`, with this library's semantics.

The kernel multiplies masked values by 0 and leaves rows without keys undefined. So the adapter gives it operands in
which nothing undefined is left, and puts zeros and NaN where they belong afterwards, from facts that are linear in
the lengths. Where that would need a look at all pairs, `why_not` refuses.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention import tile
from pallas_kernels.attention.spec import AttentionSpec
from pallas_kernels.device import Device
from pallas_kernels.dispatch import Implementation


def why_not(spec: AttentionSpec, device: Device) -> str | None:
    """The first limit of cuDNN, or of jax.nn's way to it, that the call exceeds."""
    capability = device.compute_capability
    if device.platform not in ("gpu", "cuda") or capability is None or capability < (8, 0):
        return f"needs a CUDA device of compute capability 8.0 or more, not {device}"
    if spec.dtype not in ("float16", "bfloat16"):
        return f"takes float16 and bfloat16, not {spec.dtype}"
    most = 256 if capability >= (9, 0) else 128
    if spec.H % 8 or spec.H > most:
        return f"the head dim must be a multiple of 8 up to {most} on this device, not {spec.H}"
    if spec.H_v != spec.H:
        return f"jax.nn wants value and key of one shape, but the head dims are {spec.H_v} and {spec.H}"
    if spec.context > 1:
        return "jax.nn returns no LSE by which the shards of a sequence could be merged"
    if spec.segments:
        return "jax.nn has no segment ids"
    if spec.mask is not None:
        return "jax.nn turns a boolean mask into a bias of T x S numbers"
    if spec.bias is not None:
        return "a row whose bias is all -inf would be NaN"
    if spec.return_lse:
        return "jax.nn returns the LSE in the key dtype and without gradient"
    if spec.traced_scale:
        return "the scale must be a Python number, not an array"
    if spec.causal_alignment == "bottom_right" and spec.bounds != (None, None):
        if spec.T != spec.S or spec.query_lengths or spec.kv_lengths:
            return "jax.nn aligns causality and windows top-left"
    below, above = spec.bounds
    if spec.window is not None:
        if above != 0:
            return f"a window may reach right only up to the query itself, not {above} keys further"
        if spec.T > spec.S or spec.kv_lengths:
            return "a window may leave no row without keys, as it can with more queries than keys or with key lengths"
        if spec.S % 2:
            return f"a window needs an even number of keys, not {spec.S}"
    return None


def _forward(
    spec: AttentionSpec,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    scale: float,
    query_lengths: Int[Array, " B"] | None = None,
    kv_lengths: Int[Array, " B"] | None = None,
    **unused: None,
) -> tuple[Float[Array, "B T N H"], None]:
    """(out, None). Accumulates in float32; the weights are rounded to the input dtype before they meet the values."""
    below, above = spec.bounds
    query, query_poison = tile.split_finite(query)
    key, key_poison = tile.split_finite(key)
    value, value_poison = tile.split_finite(value)
    alive = jnp.ones((spec.B, spec.T), bool)
    if query_lengths is not None:
        # The kernel attends from all rows and the dead ones are dropped here: it need not know these lengths.
        alive = jnp.arange(spec.T)[None, :] < query_lengths[:, None]
        query = jnp.where(alive[:, :, None, None], query, 0)
    bad = jnp.isnan(key_poison) | jnp.isnan(value_poison)
    if kv_lengths is not None:
        kept = jnp.arange(spec.S)[None, :] < kv_lengths[:, None]
        bad &= kept[:, :, None]
        key, value = (jnp.where(kept[:, :, None, None], x, 0) for x in (key, value))
        alive &= kv_lengths[:, None] > 0
        # A kernel over no key at all would divide by 0; one key of zeros keeps it, and its gradient, finite.
        kv_lengths = kv_lengths.clip(1, spec.S).astype(jnp.int32)
    # jax.nn differentiates the kernel for even lengths only (it passes an empty bias, which its own check takes for a
    # real one). A row more is dropped below; a key more lies past the lengths.
    if spec.S % 2 and kv_lengths is None:
        kv_lengths = jnp.full(spec.B, spec.S, jnp.int32)
    out = jax.nn.dot_product_attention(
        _even(query),
        _even(key),
        _even(value),
        scale=scale,
        # A window that ends at the query is causal, and only with the causal mask does cuDNN end it there.
        is_causal=above == 0,
        key_value_seq_lengths=kv_lengths,
        local_window_size=None if below is None else (below, 0),
        implementation="cudnn",
    )[:, : spec.T]
    poison = jnp.isnan(query_poison) | jnp.repeat(_sees_any(bad, spec), spec.G, axis=2)
    out = out * jnp.where(poison, jnp.nan, 1.0)[..., None].astype(out.dtype)
    return jnp.where(alive[:, :, None, None], out, 0), None


def _even(x: Float[Array, "B L N H"]) -> Float[Array, "B even N H"]:
    """With a row of zeros at the end if the length is odd."""
    return jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0)))


def _sees_any(bad: Bool[Array, "B S K"], spec: AttentionSpec) -> Bool[Array, "B T K"]:
    """Whether each query sees a bad key, by differences of running counts."""
    below, above = spec.bounds
    count = jnp.pad(jnp.cumsum(bad, axis=1, dtype=jnp.int32), ((0, 0), (1, 0), (0, 0)))
    row = jnp.arange(spec.T)
    first = jnp.zeros_like(row) if below is None else (row - below).clip(0, spec.S)
    end = jnp.full_like(row, spec.S) if above is None else (row + above + 1).clip(0, spec.S)
    return count[:, end] > count[:, first]


IMPLEMENTATION = Implementation(name="cudnn", why_not=why_not, forward=_forward)

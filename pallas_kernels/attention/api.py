"""The public attention call: checks, chooses an implementation, and gives every one of them the same semantics."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_kernels import dispatch
from pallas_kernels.attention import (
    context,
    cudnn,
    fp8,
    hopper,
    hopper_bwd,
    hopper_bwd_wide,
    hopper_config,
    hopper_fp8,
    hopper_fp8_config,
    hopper_fp8_prologue,
    reference,
    reference_fp8,
)
from pallas_kernels.attention.derivative import differentiable, without_derivative
from pallas_kernels.attention.spec import (
    AttentionSpec,
    CausalAlignment,
    ContextParallel,
    Precision,
    make_spec,
    segment_sides,
)
from pallas_kernels.device import Device, current_device
from pallas_kernels.dispatch import Implementation


def _hopper(spec: AttentionSpec, query: Any, key: Any, value: Any, **operands: Any) -> tuple[Any, Any]:
    device = current_device()
    config = hopper_config.forward_config(spec, device)
    return hopper.attend(spec, query, key, value, config=config, device=device, **operands)


def _hopper_backward(spec: AttentionSpec, *arrays: Any, **operands: Any) -> tuple[Any, Any, Any]:
    config = hopper_config.backward_config(spec, current_device())
    kernel: Any = hopper_bwd_wide if hopper_config.is_wide(spec) else hopper_bwd
    return kernel.backward(spec, *arrays, config=config, **operands)


_exact = context.in_order(reference.XLA_CHUNKED.forward)


def _describe(spec: AttentionSpec, device: Device) -> str:
    q_block, kv_block = hopper_config.backward_tiles(spec)
    backward = f"{q_block} queries x {kv_block} keys, {hopper_config.backward_config(spec, device)}"
    return f"forward: {hopper_config.forward_config(spec, device)}; backward: {backward}"


HOPPER = Implementation(
    name="hopper",
    why_not=hopper_config.why_not,
    forward=differentiable(context.over(_hopper), context.backward_over(_hopper_backward), exact=_exact),
    describe=_describe,
)


def _hopper_fp8(spec: AttentionSpec, query: Any, key: Any, value: Any, **operands: Any) -> tuple[Any, Any]:
    config = hopper_fp8_config.default(spec)
    return hopper_fp8.attend(spec, query, key, value, config=config, device=current_device(), **operands)


_exact_fp8 = context.in_order(fp8.exact(reference.XLA_CHUNKED.forward))


def _describe_fp8(spec: AttentionSpec, device: Device) -> str:
    """The backward pass is that of 16 bits."""
    _, _, backward = _describe(spec, device).partition("; ")
    return f"forward: {hopper_fp8_config.default(spec)}; {backward}"


def _of_arrays_or_codes(arrays: Callable[..., Any], codes: Callable[..., Any]) -> Callable[..., Any]:
    """A forward of 16-bit arrays, and of e4m3 numbers where there are descales."""
    codes = without_derivative(codes)

    def forward(spec: AttentionSpec, query: Any, key: Any, value: Any, *, descales: Any = None, **operands: Any) -> Any:
        if descales is None:
            return arrays(spec, query, key, value, **operands)
        return codes(spec, query, key, value, *descales, **operands)

    return forward


def _hopper_codes(spec: AttentionSpec, *arrays: Any, **operands: Any) -> tuple[Any, Any]:
    return hopper_fp8.attend_codes(spec, *arrays, device=current_device(), **operands)


HOPPER_FP8 = Implementation(
    name="hopper_fp8",
    why_not=hopper_fp8_config.why_not,
    forward=_of_arrays_or_codes(
        differentiable(
            context.over(_hopper_fp8),
            context.backward_over(fp8.through_rounding(_hopper_backward, hopper_fp8_prologue.quantise)),
            exact=_exact_fp8,
        ),
        _hopper_codes,
    ),
    describe=_describe_fp8,
)

XLA_FP8 = Implementation(
    name="xla_fp8",
    why_not=reference_fp8.why_not,
    forward=_of_arrays_or_codes(
        differentiable(
            context.over(reference_fp8.attend),
            context.backward_over(fp8.through_rounding(context.by_vjp(reference.XLA_CHUNKED.forward))),
            exact=_exact_fp8,
        ),
        reference_fp8.attend_codes,
    ),
)

_chunked_over = differentiable(
    context.over(reference.XLA_CHUNKED.forward),
    context.backward_over(context.by_vjp(reference.XLA_CHUNKED.forward)),
    exact=_exact,
)


def _chunked(spec: AttentionSpec, *arrays: Any, **operands: Any) -> tuple[Any, Any]:
    """As jax differentiates and XLA partitions it; over shards of a sequence by the rules of a kernel."""
    return (_chunked_over if spec.context > 1 else _exact)(spec, *arrays, **operands)


def _in_order(implementation: Implementation) -> Implementation:
    return dataclasses.replace(implementation, forward=context.in_order(implementation.forward))


def _of(precision: Precision, implementation: Implementation) -> Implementation:
    """For calls of this precision alone: no other is ever chosen silently."""

    def why_not(spec: AttentionSpec, device: Device) -> str | None:
        if spec.precision == precision:
            return implementation.why_not(spec, device)
        return f"is of precision={precision!r}, not {spec.precision!r}"

    return dataclasses.replace(implementation, why_not=why_not)


# In order of preference.
IMPLEMENTATIONS = (
    _of("input", HOPPER),
    _of("input", _in_order(cudnn.IMPLEMENTATION)),
    _of("input", dataclasses.replace(reference.XLA_CHUNKED, forward=_chunked)),
    _of("input", _in_order(reference.XLA)),
    _of("fp8", HOPPER_FP8),
    _of("fp8", XLA_FP8),
)

SegmentIds = ArrayLike | tuple[ArrayLike, ArrayLike]


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    return_residual: bool = False,
    implementation: str | None = None,
    causal_alignment: CausalAlignment = "top_left",
    segment_ids: SegmentIds | None = None,
    return_lse: bool = False,
    zigzag: int = 1,
    context_parallel: ContextParallel = "ring",
    precision: Precision = "input",
    descales: Sequence[ArrayLike] | None = None,
) -> Any:
    """Scaled dot-product attention: a drop-in for `jax.nn.dot_product_attention`.

        out_i = sum_j softmax_j(scale * q_i . k_j + bias_ij) v_j    over the keys j that query i sees

    Args:
      query: (B, T, N, H), or (T, N, H), which is a batch of one.
      key: (B, S, K, H) with N a multiple of K; query head n reads key/value head n // (N // K).
      value: (B, S, K, H_v). query, key and value share one dtype: float16, bfloat16, float32 or float64.
      bias: floating, broadcastable to (B, N, T, S) (never expanded in memory). -inf hides the pair.
      mask: bool, broadcastable to (B, N, T, S); True where attention is allowed.
      scale: a number or a scalar array; None: 1 / sqrt(H).
      is_causal: query i sees keys j <= i + shift, where `causal_alignment` sets the shift.
      query_seq_lengths: int (B,); rows from the length on see nothing.
      key_value_seq_lengths: int (B,); keys from the length on are seen by nothing.
      local_window_size: (left, right): query i sees keys i + shift - left ... i + shift + right, both included; an
        int w means (w, w), also with `is_causal`.
      return_residual: also return jax.nn's residual: the LSE in the key dtype, without gradient.
      implementation: a name to get that implementation or an error; None: the first that applies, never an error.
      causal_alignment: "top_left": shift 0. "bottom_right": shift S - T, or with lengths the difference of each batch
        entry's two lengths: the last query is level with the last key. Applies to `is_causal` and the window.
      segment_ids: int (B, T) where T == S, or a pair of int (B, T) and (B, S). Tokens attend within equal ids only,
        wherever those stand. A negative id is padding: it sees nothing and nothing sees it.
      return_lse: also return the LSE, natural log, in float32 (float64 for float64 inputs), differentiable.
      zigzag: all that belongs to queries or keys, and the results, are stored in the zigzag order of so many devices
        (`sharding.ring.zigzag`); causality, windows and lengths go by places in the sequence, so that only the order of
        the results differs. On a mesh with as many devices on `context` nothing has to be moved for it.
      context_parallel: how shards of a sequence meet on a mesh with a `context` axis: "ring", keys and values go round
        while queries attend; "all_gather", every device holds all of them. The results are the same. Sequences that do
        not divide, and calls with a bias, a mask or an array for a scale, are whole on every device instead.
      precision: "fp8": queries, keys, values and weights are rounded to e4m3 for the products, about 4 % of rms error
        on normal inputs; softmax, sums and LSE stay float32. Queries and keys are rotated by a fixed random orthogonal
        transform of the head dim. 64 queries and up to 224 keys share a scale, so that a hidden token moves the
        rounding of those in its block, unless lengths or a negative segment id exclude it. Gradients are those of the
        rounded operands, straight through the rounding, in 16-bit products. Takes no float64, bias, mask or array for a
        scale.
        On an H200 and long sequences a call is 1.5 times as fast as in 16 bits at head dim 256 and 1.1 to 1.2 times at
        128; at 64 it is not faster. But at value head dims above 128 sums are the tensor cores' own and lose up to a
        quarter where thousands of keys weigh alike and values have one sign; up to 128 they go over to float32 every
        1792 keys, and lose 3 % then.
        "input": products of the inputs' dtype; fp8 is used only where it is asked for.
      descales: with precision="fp8", (query's, key's, value's): the three arrays are float8_e4m3fn, and stand for
        themselves times these float32 numbers >= 0, each either one number, (B, heads), or (B, heads, blocks), blocks
        of 64 queries, 128 keys and 128 values. Nothing is rotated. Results are bfloat16, without derivative.

    Returns:
      out (B, T, N, H_v) in the query's dtype; with `return_residual` or `return_lse` a pair (out, (B, T, N)). A 3-D
      query gives results without B.

    A row that sees no key gives out 0 and LSE -inf, with zero gradients. What is masked, by whichever argument,
    contributes nothing whatever it holds, NaN and inf included, forward and in gradients; a row that sees one comes
    out as IEEE arithmetic has it, or NaN throughout. Softmax and sums are float32 (float64 for float64 inputs).

    Raises:
      ValueError: the arguments have no meaning together, or a name is unknown.
      Unsupported: the named implementation cannot serve the call; the message says why.

    Sources: arXiv 1706.03762, section 3.2.1; arXiv 2205.14135, section 3.1; arXiv 2305.13245 (K < N); arXiv 2407.08608,
    section 3.3 (fp8).

    >>> import jax.numpy as jnp
    >>> q = jnp.zeros((1, 2, 1, 4))
    >>> v = jnp.array([1.0, 3.0]).reshape(1, 2, 1, 1)
    >>> dot_product_attention(q, q, v, is_causal=True).ravel()
    Array([1., 2.], dtype=float32)
    """
    q, k, v = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    # NumPy's numbers count as numbers: only an array is traced, differentiable and unknown to a kernel builder.
    scale = float(scale) if isinstance(scale, (int, float, np.number)) else _array(scale)
    full_bias, full_mask = _array(bias, rank=4), _array(mask, rank=4)
    query_lengths, kv_lengths = _array(query_seq_lengths), _array(key_value_seq_lengths)
    query_segments, kv_segments = (None, None) if segment_ids is None else map(_array, segment_sides(segment_ids))
    spec = make_spec(
        q,
        k,
        v,
        full_bias,
        full_mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_lengths,
        key_value_seq_lengths=kv_lengths,
        local_window_size=local_window_size,
        return_residual=return_residual,
        causal_alignment=causal_alignment,
        segment_ids=None if segment_ids is None else (query_segments, kv_segments),
        return_lse=return_lse,
        zigzag=zigzag,
        context_parallel=context_parallel,
        precision=precision,
        descales=descales,
    )
    spec = dataclasses.replace(spec, context=context.ways(spec))
    chosen = dispatch.choose(IMPLEMENTATIONS, spec, current_device(), implementation)
    if spec.empty:
        out = jnp.zeros((spec.B, spec.T, spec.N, spec.H_v), spec.dtype)
        lse = jnp.full((spec.B, spec.T, spec.N), -jnp.inf, spec.accumulation_dtype)
    else:
        out, lse = chosen.forward(
            spec,
            q.reshape(spec.B, spec.T, spec.N, spec.H),
            k.reshape(spec.B, spec.S, spec.K, spec.H),
            v.reshape(spec.B, spec.S, spec.K, spec.H_v),
            scale=spec.default_scale if scale is None else scale,
            bias=full_bias,
            mask=full_mask,
            query_lengths=query_lengths,
            kv_lengths=kv_lengths,
            query_segments=query_segments,
            kv_segments=kv_segments,
            **({} if descales is None else {"descales": _descales(spec, descales)}),
        )
    out = out.reshape(*q.shape[:-1], spec.H_v)
    if not spec.return_lse:
        return out
    lse = lse.reshape(q.shape[:-1])
    return out, jax.lax.stop_gradient(lse.astype(spec.dtype)) if return_residual else lse


def _descales(spec: AttentionSpec, descales: Sequence[ArrayLike]) -> list[Any]:
    """(B, heads, blocks), or (B, heads, 1) for one number a head."""
    found = []
    for scale, heads in zip((jnp.asarray(x, jnp.float32) for x in descales), (spec.N, spec.K, spec.K), strict=True):
        scale = scale if scale.ndim == 3 else scale[..., None]
        found.append(jnp.broadcast_to(scale, (spec.B, heads, scale.shape[-1])))
    return found


def explain(
    spec_or_query: AttentionSpec | Any, *arrays: Any, device: Device | None = None, **arguments: Any
) -> dispatch.Explanation:
    """What a call would run, and the reason against every other implementation; prints as a table.

    Takes an AttentionSpec, or the arguments of `dot_product_attention` with arrays or `jax.ShapeDtypeStruct`s in the
    place of arrays. `device` is the present one unless given. Raises ValueError as the call would.

    >>> from pallas_kernels.device import Device
    >>> q = jax.ShapeDtypeStruct((1, 8, 2, 16), "float32")
    >>> explain(q, q, q, device=Device(platform="cpu", kind="cpu")).chosen
    'xla_chunked'
    """
    name = arguments.pop("implementation", None)
    if isinstance(spec_or_query, AttentionSpec):
        spec = spec_or_query
    else:
        spec = make_spec(spec_or_query, *arrays, **arguments)
        spec = dataclasses.replace(spec, context=context.ways(spec))
    return dispatch.explain(IMPLEMENTATIONS, spec, device or current_device(), name)


def _array(x: ArrayLike | None, *, rank: int = 0) -> Any:
    """The array, with axes of size 1 put in front up to the rank."""
    if x is None:
        return None
    x = jnp.asarray(x)
    return x.reshape((1,) * (rank - x.ndim) + x.shape)

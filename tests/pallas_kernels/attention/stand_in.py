"""Stand-ins for a forward and a backward kernel, made differentiable, and what tests hold them against."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import mosaic_turns
from pallas_kernels.attention import derivative, reference, tile
from pallas_kernels.attention.spec import AttentionSpec, make_spec
from tests.oracle import attention as oracle
from tests.tolerance import assert_close

COLLECTIVES = "all-gather|all-reduce|all-to-all|collective-permute|collective-broadcast|reduce-scatter"
OPTIONAL = ("query_seq_lengths", "key_value_seq_lengths", "segment_ids")


def counting(results):
    """The results, by way of a counter as the kernels have it in global memory: some transformations refuse a ref."""

    def launch(counter):
        counter[0] += 1
        return results

    out_type = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]
    return tuple(mosaic_turns.with_zeros(1, launch, out_type))


def forward(spec: AttentionSpec, q, k, v, *, scale, **optional):
    def forward_kernel(q, k, v, optional):
        return counting(reference.attend(spec, q, k, v, scale=scale, **optional))

    return jax.jit(forward_kernel)(q, k, v, optional)


def backward(spec: AttentionSpec, q, k, v, out, lse, dout, dlse, *, scale, **optional):
    """The formulas of arXiv 2205.14135, algorithm 4, with all pairs at once."""
    assert (spec.B, spec.T, spec.N, spec.H) == q.shape and (spec.B, spec.S, spec.K, spec.H_v) == v.shape

    def backward_kernel(q, k, v, out, lse, dout, dlse, optional):
        def grouped(x):
            return x.astype(jnp.float32).reshape(*x.shape[:2], spec.K, spec.G, *x.shape[3:])

        einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
        q_, dout_, delta = grouped(q), grouped(dout), (grouped(out) * grouped(dout)).sum(-1)
        k_, v_ = k.astype(jnp.float32), v.astype(jnp.float32)
        lse_ = grouped(lse)
        if dlse is not None:
            delta -= grouped(dlse)
        logits = scale * einsum("btkgh,bskh->bkgts", q_, k_)
        seen = _visible(spec, **optional)
        lse_ = lse_.transpose(0, 2, 3, 1)[..., None]
        dead = jnp.isinf(lse_)
        weights = jnp.where(dead | ~seen, 0, jnp.exp(logits - jnp.where(dead, 0, lse_)))
        # The LSE's own rounding is not at test here: divided out where it is rounding, NaN where it is another row's.
        total = jnp.where(dead, 1, weights.sum(-1, keepdims=True))
        weights = weights / jnp.where(abs(total - 1) < 1e-4, total, jnp.nan)
        dweights = einsum("btkgh,bskh->bkgts", dout_, v_)
        dlogits = scale * weights * (dweights - delta.transpose(0, 2, 3, 1)[..., None])
        dq = einsum("bkgts,bskh->btkgh", dlogits, k_).reshape(q.shape)
        dk = einsum("bkgts,btkgh->bskh", dlogits, q_)
        dv = einsum("bkgts,btkgh->bskh", weights, dout_)
        return counting((dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)))

    backward_kernel.__name__ += "_with_dlse" * (dlse is not None)
    return jax.jit(backward_kernel)(q, k, v, out, lse, dout, dlse, optional)


def _visible(spec: AttentionSpec, *, query_lengths, kv_lengths, query_segments, kv_segments):
    lengths = [None if x is None else x.reshape(-1, 1, 1, 1, 1) for x in (query_lengths, kv_lengths)]
    shift = spec.shift
    if shift is None:
        shift = (spec.S if lengths[1] is None else lengths[1]) - (spec.T if lengths[0] is None else lengths[0])
    seen = tile.visible(
        jnp.arange(spec.T).reshape(1, 1, 1, -1, 1),
        jnp.arange(spec.S).reshape(1, 1, 1, 1, -1),
        shift=shift,
        bounds=spec.bounds,
        query_length=lengths[0],
        kv_length=lengths[1],
        query_segment=None if query_segments is None else query_segments[:, None, None, :, None],
        kv_segment=None if kv_segments is None else kv_segments[:, None, None, None, :],
    )
    return jnp.bool_(True) if seen is None else seen


attend = derivative.differentiable(forward, backward, exact=reference.attend)
attend_chunked = derivative.differentiable(forward, backward, exact=functools.partial(reference.attend, chunks=(3, 4)))


def call(arguments: dict[str, Any], function: Callable = attend) -> Callable:
    """The function of (q, k, v) and, by keyword, of what is optional; spec and scale are those of the arguments."""
    spec, scale = make_spec(**arguments), arguments.get("scale")
    scale = spec.default_scale if scale is None else scale

    def attended(q, k, v, query_seq_lengths=None, key_value_seq_lengths=None, segment_ids=None):
        query_segments, kv_segments = (None, None) if segment_ids is None else segment_ids
        return function(
            spec, q, k, v, scale=scale, query_lengths=query_seq_lengths, kv_lengths=key_value_seq_lengths,
            query_segments=query_segments, kv_segments=kv_segments,
        )  # fmt: skip

    return attended


def operands(arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    qkv = tuple(arguments[name] for name in ("query", "key", "value"))
    return qkv, {name: arguments[name] for name in OPTIONAL if name in arguments}


def cotangents(arguments: dict[str, Any], seed: int = 1) -> tuple[Any, Any]:
    q, v = arguments["query"], arguments["value"]
    rng = np.random.default_rng(seed)
    dout = jnp.asarray(rng.standard_normal((*q.shape[:-1], v.shape[-1])), q.dtype)
    return dout, jnp.asarray(rng.standard_normal(q.shape[:-1]), jnp.float32)


def pullback(arguments: dict[str, Any], used: str = "both", function: Callable = attend) -> Callable:
    """(q, k, v, dout, dlse, **optional) -> (out, lse, dq, dk, dv); `used` is which results the loss depends on."""

    def both(q, k, v, dout, dlse, **optional):
        attended = call(arguments, function)

        def loss(q, k, v):
            out, lse = attended(q, k, v, **optional)
            total = jnp.zeros((), jnp.float32)
            if used != "lse":
                total += (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum()
            if used != "out":
                total += jnp.where(jnp.isinf(lse), 0, lse * dlse).sum()
            return total, (out, lse)

        gradients, (out, lse) = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
        return out, lse, *gradients

    return both


def against_oracle(results: Any, arguments: dict[str, Any], dout: Any, dlse: Any) -> None:
    # A call without cotangents has no gradients; zeros stand for the result that the loss does not use.
    want = oracle(**arguments, dout=dout, dlse=dlse)
    plain = oracle(**arguments, dout=dout, dlse=dlse, precision=arguments["query"].dtype)
    for result, name in zip(results, ("out", "lse", "dq", "dk", "dv"), strict=True):
        assert_close(result, getattr(want, name), getattr(plain, name), name)


def calls(lowered: str) -> tuple[int, int]:
    """How often a lowered function calls (the forward kernel, the backward kernel)."""
    return len(re.findall("call @forward_kernel", lowered)), len(re.findall("call @backward_kernel", lowered))


def collectives(compiled: Any) -> list[str]:
    return re.findall(COLLECTIVES, compiled.as_text())

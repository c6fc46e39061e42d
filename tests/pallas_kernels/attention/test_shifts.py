"""Kernels on shards of the keys, placed by shifts, with the out and lse of all keys in the backward pass.

Queries 32 ... 95 of a sequence meet keys 0 ... 63, 64 ... 127 and a shard that none of them sees and that holds NaN.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import context, hopper, hopper_bwd, hopper_bwd_wide, reference, tile
from pallas_kernels.attention.hopper_config import Config
from pallas_kernels.attention.spec import AttentionSpec
from tests.mosaic.interpreter import interpreted
from tests.oracle import attention as oracle
from tests.pallas_kernels.attention.check import jit
from tests.tolerance import assert_close

T, S, FIRST = 64, 128, 32
SHIFTS = (FIRST, FIRST - T, -300)
BOUNDS: dict[str, dict[str, Any]] = {"causal": {"is_causal": True}, "window": {"window": (20, 10)}}


xla = functools.partial(reference.attend, chunks=(16, 32))


def compile(kernel):
    return lambda spec, *arrays, **operands: jit(functools.partial(kernel, spec))(*arrays, **operands)


def interpret(kernel):
    def run(spec, *arrays, **operands):
        with interpreted():
            return jax.block_until_ready(kernel(spec, *arrays, config=None, **operands))

    return run


def forward_kernel(spec, *arrays, config, **operands):
    return hopper.attend(spec, *arrays, config=Config(kv_block=64), **operands)


KERNELS: dict[str, Any] = {
    "xla_chunked": (compile(xla), compile(context.by_vjp(xla))),
    "hopper": (interpret(forward_kernel), interpret(hopper_bwd.backward)),
    "hopper_wide": (interpret(forward_kernel), interpret(hopper_bwd_wide.backward)),
}


QUICK = [("xla_chunked", "window"), ("hopper", "causal")]
REST = [("xla_chunked", "causal"), ("hopper", "window"), ("hopper_wide", "causal"), ("hopper_wide", "window")]


@pytest.mark.parametrize(("kernel", "bounds"), [*QUICK, *(pytest.param(*row, marks=pytest.mark.slow) for row in REST)])
def test_shards_of_keys_add_up(kernel, bounds):
    forward, backward = KERNELS[kernel]
    N, K, H = 1, 1, 192 if kernel == "hopper_wide" else 64
    dtype = "float32" if kernel == "xla_chunked" else "bfloat16"
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    q, k, v, dout = normal(1, T, N, H), normal(1, S, K, H), normal(1, S, K, H), normal(1, T, N, H)
    dlse = jnp.asarray(rng.standard_normal((1, T, N)), jnp.float32)
    spec = AttentionSpec(B=3, T=T, S=T, N=N, K=K, H=H, H_v=H, dtype=dtype, shifted=True, **BOUNDS[bounds])
    below, above = spec.bounds
    distance = np.arange(S)[None] - (np.arange(T)[:, None] + FIRST)
    seen = (distance <= (above or 0)) & (distance >= -(S if below is None else below))
    facts: dict[str, Any] = {"mask": jnp.asarray(seen)[None, None], "dout": dout, "dlse": dlse}
    want, plain = (oracle(q, k, v, **facts, precision=x) for x in (None, dtype))

    def stacked(x, bad: float = 0.0):
        """The three shards of keys."""
        return jnp.concatenate([x[:, :T], x[:, T:], jnp.full_like(x[:, :T], bad)])

    def thrice(x):
        return jnp.concatenate([x] * 3)

    keys, values = stacked(k, np.nan), stacked(v, np.nan)
    operands = {"scale": spec.default_scale, "shifts": jnp.asarray(SHIFTS, jnp.int32)}
    outs, lses = forward(spec, thrice(q), keys, values, **operands)
    assert (np.asarray(outs[2]) == 0).all() and (np.asarray(lses[2]) == -np.inf).all()
    parts = [(outs[i : i + 1].astype(jnp.float32), lses[i : i + 1]) for i in range(3)]
    out, lse = functools.reduce(lambda total, part: tile.merge(*total, *part), parts)
    out = out.astype(dtype)
    assert_close(out, want.out, plain.out, "out")
    assert_close(lse, want.lse, plain.lse, "lse")

    dq, dk, dv = backward(spec, thrice(q), keys, values, *(thrice(x) for x in (out, lse, dout, dlse)), **operands)
    assert all((np.asarray(x[2]) == 0).all() for x in (dq, dk, dv))
    assert_close(dq.astype(jnp.float32).sum(0, keepdims=True).astype(dtype), want.dq, plain.dq, "dq")
    for got, exact, near, name in ((dk, want.dk, plain.dk, "dk"), (dv, want.dv, plain.dv, "dv")):
        assert_close(jnp.concatenate([got[:1], got[1:2]], axis=1).astype(dtype), exact, near, name)

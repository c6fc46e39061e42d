"""Runs one implementation on one call and holds values and gradients against the float64 oracle."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import reference
from pallas_kernels.attention.api import dot_product_attention
from tests.oracle import attention
from tests.tolerance import assert_close

DIFFERENTIABLE = ("query", "key", "value", "bias")
ARRAYS = ("mask", "query_seq_lengths", "key_value_seq_lengths", "segment_ids")


def jit(function: Callable) -> Callable:
    """jax.jit for code that runs once or twice: on a CPU nearly all of the time is spent optimising it."""
    cheap = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(function, compiler_options=cheap if jax.default_backend() == "cpu" else None)


def run(arguments: dict[str, Any], implementation: str | None, *, seed: int = 1, return_lse: bool = True) -> Any:
    """(out, lse, gradients by name, cotangents) of a call, jitted; without LSE its places hold None."""
    arguments = {name: x for name, x in arguments.items() if x is not None}
    operands = {name: arguments[name] for name in DIFFERENTIABLE if name in arguments}
    arrays = {name: arguments[name] for name in ARRAYS if name in arguments}
    static = {name: x for name, x in arguments.items() if name not in operands and name not in arrays}
    query, value = arguments["query"], arguments["value"]
    rng = np.random.default_rng(seed)
    dout = jnp.asarray(rng.standard_normal((*query.shape[:-1], value.shape[-1])), query.dtype)
    dlse = jnp.asarray(rng.standard_normal(query.shape[:-1]), jnp.promote_types(query.dtype, jnp.float32))
    # The chunk sizes are part of the key because tests replace them.
    call = _call(tuple(static.items()), implementation, return_lse, reference.chunk_sizes)
    results, gradients = call(operands, arrays, (dout, dlse) if return_lse else dout)
    out, lse = results if return_lse else (results, None)
    return out, lse, gradients, {"dout": dout, "dlse": dlse if return_lse else None}


@functools.cache
def _call(static: tuple, implementation: str | None, return_lse: bool, chunk_sizes: Callable) -> Callable:
    def both(operands, arrays, cotangents):
        def call(operands):
            return dot_product_attention(
                **operands, **arrays, **dict(static), implementation=implementation, return_lse=return_lse
            )

        results, pullback = jax.vjp(call, operands)
        return results, pullback(cotangents)[0]

    return jit(both)


def against_oracle(arguments: dict[str, Any], implementation: str | None, *, return_lse: bool = True) -> None:
    """Asserts that out, lse, dq, dk, dv and dbias are as right as their precision allows."""
    out, lse, gradients, cotangents = run(arguments, implementation, return_lse=return_lse)
    dtype = arguments["query"].dtype
    oracle = attention(**arguments, **cotangents)
    plain = attention(**arguments, **cotangents, precision=dtype)
    assert out.dtype == dtype
    assert_close(out, oracle.out, plain.out, "out")
    if lse is not None:
        assert lse.dtype == jnp.promote_types(dtype, jnp.float32)
        # That kernel's logits are relative to something up to 8 bits above the largest.
        assert_close(lse, oracle.lse, plain.lse, "lse", through=8.0 if implementation == "hopper" else 0.0)
    for name, short in zip(DIFFERENTIABLE, ("dq", "dk", "dv", "dbias"), strict=True):
        if name in gradients:
            assert gradients[name].dtype == arguments[name].dtype
            assert_close(gradients[name], getattr(oracle, short), getattr(plain, short), short)

"""A backward kernel on one case: interpreted on a CPU against the float64 oracle, and lowered for CUDA."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import hopper_bwd, hopper_bwd_wide, hopper_config
from pallas_kernels.attention.cases import Case
from pallas_kernels.attention.spec import segment_sides
from tests.mosaic.interpreter import interpreted
from tests.mosaic.lowering import lower_for_cuda
from tests.oracle import attention
from tests.tolerance import assert_close

NAMES = ("dq", "dk", "dv")


def call(case: Case, change: Any = None) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """Arguments of the call and its cotangents, after `change` has written to them as numpy arrays."""
    arguments = {name: x for name, x in case.arguments().items() if x is not None}
    rng = np.random.default_rng(1)
    query, value = arguments["query"], arguments["value"]
    cotangents = {
        "dout": jnp.asarray(rng.standard_normal((*query.shape[:-1], value.shape[-1])), query.dtype),
        "dlse": jnp.asarray(rng.standard_normal(query.shape[:-1]), jnp.float32),
    }
    if change is not None:
        arrays = {name: np.array(x) for name, x in (arguments | cotangents).items() if isinstance(x, jax.Array)}
        change(arrays)
        arguments |= {name: jnp.asarray(x) for name, x in arrays.items() if name not in cotangents}
        cotangents = {name: jnp.asarray(arrays[name]) for name in cotangents}
    return arguments, cotangents


def backward(case: Case, arguments: dict[str, Any], cotangents: dict[str, Any], out: Any, lse: Any) -> Any:
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    dout, dlse = cotangents["dout"], cotangents["dlse"]
    sides: Any = (None, None)
    if "segment_ids" in arguments:
        sides = segment_sides(arguments["segment_ids"])
    scale = arguments.get("scale")
    kernel: Any = hopper_bwd_wide if hopper_config.is_wide(case.spec()) else hopper_bwd
    return kernel.backward(
        case.spec(), query, key, value, out, lse, dout, dlse,
        scale=case.spec().default_scale if scale is None else scale,
        query_lengths=arguments.get("query_seq_lengths"),
        kv_lengths=arguments.get("key_value_seq_lengths"),
        query_segments=sides[0],
        kv_segments=sides[1],
    )  # fmt: skip


def interpret(case: Case, change: Any = None) -> tuple[Any, Any, Any]:
    """(gradients of the kernel, of the oracle, of plain arithmetic in the dtype)."""
    arguments, cotangents = call(case, change)
    exact, plain = ({**arguments, **cotangents, "precision": x} for x in (None, case.dtype))
    with np.errstate(invalid="ignore"):
        oracle, plain = attention(**exact), attention(**plain)
    # Together the CTAs wait for each other's turns, and races are seen; a few of them are all that fit.
    kv_block = hopper_config.backward_tiles(case.spec())[1]
    together = (case.B * case.K * -(-case.S // kv_block)) <= 4
    with interpreted(together=together, detect_races=together):
        got = backward(
            case, arguments, cotangents, jnp.asarray(oracle.out, case.dtype), jnp.asarray(oracle.lse, jnp.float32)
        )
        got = jax.block_until_ready(got)
    want, near = (tuple(getattr(x, name) for name in NAMES) for x in (oracle, plain))
    return got, want, near


def check(case: Case, change: Any = None) -> None:
    for name, got, want, plain in zip(NAMES, *interpret(case, change), strict=True):
        assert got.dtype == jnp.dtype(case.dtype)
        assert_close(got, want, plain, name)


def check_reach(case: Case, operand: str, at: int) -> None:
    """NaN at one place of an operand reaches exactly those gradients that arithmetic takes it to; the rest is right."""

    def change(x: dict[str, Any]) -> None:
        x[operand][:, at] = np.nan

    results = interpret(case, change)
    with np.errstate(invalid="ignore"):
        for name, got, want, plain in zip(NAMES, *results, strict=True):
            got, nan = np.asarray(got), np.isnan(want)
            if operand == "value" and name == "dv":
                # The library makes whole rows NaN: what the row's keys get is, too.
                nan = nan | np.isnan(results[1][1])[..., : nan.shape[-1]]
            np.testing.assert_array_equal(np.isnan(got), nan, err_msg=name)
            got, want, plain = (jnp.where(nan, 0, x) for x in (got, want, plain))
            assert_close(got, want, plain, name)


def lower(case: Case) -> str:
    arguments, cotangents = call(case)
    static = {name: arguments.pop(name) for name in list(arguments) if not hasattr(arguments[name], "dtype")}
    ids = static.pop("segment_ids", None)

    def function(arguments: Any, cotangents: Any, ids: Any, out: Any, lse: Any) -> Any:
        segments = {} if ids is None else {"segment_ids": ids}
        return backward(case, arguments | static | segments, cotangents, out, lse)

    lse = jnp.zeros(arguments["query"].shape[:3], jnp.float32)
    return lower_for_cuda(function, arguments, cotangents, ids, cotangents["dout"], lse).as_text()

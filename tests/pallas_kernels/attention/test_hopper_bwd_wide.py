"""The fused backward kernel for head dims above 128, interpreted on a CPU, against the float64 oracle; and lowered."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import hopper_bwd_wide, hopper_config
from pallas_kernels.attention.cases import Case
from pallas_kernels.attention.hopper_config import WideConfig
from pallas_kernels.attention.spec import segment_sides
from tests.mosaic.interpreter import interpreted
from tests.mosaic.lowering import lower_for_cuda
from tests.oracle import attention
from tests.tolerance import assert_close

NAMES = ("dq", "dk", "dv")


def case(**changes: Any) -> Case:
    return dataclasses.replace(Case(B=1, T=128, S=128, N=1, K=1, H=192, H_v=128, dtype="bfloat16"), **changes)


WIDE = {"H": 256, "H_v": 256}
CASES = {
    "plain": case(),
    "plain_256": case(**WIDE),
    "causal_256": case(**WIDE, is_causal=True, N=2, K=1, dtype="float16"),
    "causal_bottom_right": case(T=72, S=136, is_causal=True, causal_alignment="bottom_right"),
    "dead_rows": case(T=136, S=72, is_causal=True, causal_alignment="bottom_right"),
    "unseen_keys": case(T=64, S=136, is_causal=True),
    "heads": case(B=2, T=64, S=40, N=6, K=3, is_causal=True),
    "tails_256_128": case(H=256, H_v=128, T=67, S=69),
    "tails_128_256": case(H=128, H_v=256, T=69, S=67),
    "head_dims": case(H=136, H_v=40, T=64, S=64),
    "window_group": case(T=200, S=200, N=3, window=(40, 25)),
    "window_bottom_right": case(T=72, S=136, window=(20, 30), causal_alignment="bottom_right"),
    "lengths": case(B=2, query_lengths=(128, 35), kv_lengths=(70, 128)),
    "lengths_zero": case(B=3, T=64, S=72, query_lengths=(0, 64, 64), kv_lengths=(72, 0, 1), is_causal=True),
    "segments": case(query_runs=((3, 40), (0, 30), (3, 40), (-1, 18))),
    "segments_cross": case(T=72, S=136, query_runs=((0, 40), (1, 22), (-1, 10)), kv_runs=((1, 70), (0, 40), (5, 26))),
    "hides_nothing": case(T=1, S=64, is_causal=True, causal_alignment="bottom_right"),
    "scale_negative": case(T=64, scale=-0.4, is_causal=True, S=72),
    "scale_zero": case(T=64, scale=0.0, is_causal=True),
    "everything_256": case(
        **WIDE, B=2, T=136, S=150, N=2, query_runs=((0, 60), (1, 76)), kv_runs=((0, 65), (1, 85)), window=(90, 20),
        is_causal=True, causal_alignment="bottom_right", query_lengths=(136, 100), kv_lengths=(150, 110),
    ),
    "long": case(T=448, S=448, is_causal=True),
    "long_window": case(T=448, S=448, window=(100, 50)),
}  # fmt: skip
# One of each kind; `make test-slow` runs the rest.
QUICK = ("causal_256", "segments_cross")
CONFIGS = {
    "pair": WideConfig(cluster=2),
    "four": WideConfig(cluster=4),
    "two_buffers": WideConfig(buffers=2),
    "three_slots": WideConfig(slots=3, cluster=2),
}


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


def backward(
    case: Case,
    arguments: dict[str, Any],
    cotangents: dict[str, Any],
    out: Any,
    lse: Any,
    config: WideConfig | None = None,
) -> Any:
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    dout, dlse = cotangents["dout"], cotangents["dlse"]
    sides: Any = (None, None)
    if "segment_ids" in arguments:
        sides = segment_sides(arguments["segment_ids"])
    scale = arguments.get("scale")
    return hopper_bwd_wide.backward(
        case.spec(), query, key, value, out, lse, dout, dlse,
        scale=case.spec().default_scale if scale is None else scale,
        query_lengths=arguments.get("query_seq_lengths"),
        kv_lengths=arguments.get("key_value_seq_lengths"),
        query_segments=sides[0],
        kv_segments=sides[1],
        config=config,
    )  # fmt: skip


def interpret(case: Case, change: Any = None, config: WideConfig | None = None) -> tuple[Any, Any, Any]:
    """(gradients of the kernel, of the oracle, of plain arithmetic in the dtype)."""
    arguments, cotangents = call(case, change)
    exact, plain = ({**arguments, **cotangents, "precision": x} for x in (None, case.dtype))
    with np.errstate(invalid="ignore"):
        oracle, plain = attention(**exact), attention(**plain)
    # Together the CTAs wait for each other's turns, and races are seen; a few of them are all that fit.
    # Added in any order, dQ would rightly be one, so that such CTAs run one after another.
    together = (case.B * case.K * -(-case.S // 64)) <= 4
    with interpreted(together=together, detect_races=together):
        got = backward(
            case, arguments, cotangents, jnp.asarray(oracle.out, case.dtype), jnp.asarray(oracle.lse, jnp.float32),
            config,
        )  # fmt: skip
        got = jax.block_until_ready(got)
    want, near = (tuple(getattr(x, name) for name in NAMES) for x in (oracle, plain))
    return got, want, near


def check(case: Case, change: Any = None, config: WideConfig | None = None) -> None:
    for name, got, want, plain in zip(NAMES, *interpret(case, change, config), strict=True):
        assert got.dtype == jnp.dtype(case.dtype)
        assert_close(got, want, plain, name)


EVERY_CASE = pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)


@EVERY_CASE
def test_gradients(name):
    check(CASES[name])


# Clusters are no candidate for tuning (they were slower): one case of each kind of mask.
@pytest.mark.parametrize("name", ["causal_256", "dead_rows", "tails_256_128", "segments_cross"])
@pytest.mark.slow
def test_gradients_of_pairs_of_ctas(name):
    check(CASES[name], config=CONFIGS["pair"])


@pytest.mark.parametrize("config", ["pair", *(pytest.param(x, marks=pytest.mark.slow) for x in CONFIGS if x != "pair")])
def test_gradients_with_other_configurations(config):
    # Seven steps, so that every ring is walked twice; two query heads add to one dK and dV.
    check(case(T=200, S=72, N=2, is_causal=True), config=CONFIGS[config])


def test_a_ring_of_one_and_other_clusters_are_refused():
    wrong: list[dict[str, Any]] = [{"slots": 1}, {"buffers": 1}, {"cluster": 3}, {"l2_mib": 0}]
    for changes in wrong:
        with pytest.raises(ValueError, match=f"Config: .*{next(iter(changes))}.* - "):
            WideConfig(**changes)


def test_too_much_shared_memory_is_refused():
    with pytest.raises(ValueError, match="shared memory"):
        lower(case(**WIDE), WideConfig(slots=3))


def spoil_padding(x: dict[str, Any]) -> None:
    """NaN and inf where the lengths (128, 35) and (70, 128) end."""
    x["key"][0, 70:] = np.nan
    x["value"][0, 70:] = np.inf
    x["query"][1, 35:] = np.nan
    x["dout"][1, 40:] = -np.inf
    x["dlse"][1, 35:] = np.nan


def spoil_segments(x: dict[str, Any]) -> None:
    """The last 18 tokens are padding."""
    for name in ("query", "key", "value", "dout"):
        x[name][:, -18:] = np.nan if name in ("query", "value") else np.inf


def spoil_unseen_keys(x: dict[str, Any]) -> None:
    x["key"][:, 64:] = np.nan
    x["value"][:, 64:] = np.nan


@pytest.mark.parametrize(
    "name, change",
    [
        ("lengths", spoil_padding),
        pytest.param("segments", spoil_segments, marks=pytest.mark.slow),
        pytest.param("unseen_keys", spoil_unseen_keys, marks=pytest.mark.slow),
    ],
)
def test_what_is_masked_contributes_nothing(name, change):
    check(CASES[name], change)


@pytest.mark.parametrize("operand, at", [("query", 100), ("dout", 95), ("key", 75), ("value", 70)])
@pytest.mark.parametrize("window", [None, (20, 0)])
@pytest.mark.slow
def test_nan_reaches_only_those_who_see_it(operand, at, window):
    def change(x: dict[str, Any]) -> None:
        x[operand][:, at] = np.nan

    results = interpret(case(T=136, S=136, is_causal=True, window=window), change)
    with np.errstate(invalid="ignore"):
        for name, got, want, plain in zip(NAMES, *results, strict=True):
            got, nan = np.asarray(got), np.isnan(want)
            if operand == "value" and name == "dv":
                # The library makes whole rows NaN: what the row's keys get is, too.
                nan = nan | np.isnan(results[1][1])[..., : nan.shape[-1]]
            np.testing.assert_array_equal(np.isnan(got), nan, err_msg=name)
            got, want, plain = (jnp.where(nan, 0, x) for x in (got, want, plain))
            assert_close(got, want, plain, name)


def test_order_of_dq():
    """What the threads hold, put in order: by the accumulator's own register layout."""
    x = np.arange(2 * 3 * 64 * 128.0).reshape(1, 128, 3, 128).astype(np.float32)
    tiles = x.reshape(1, 2, 64, 3, 2, 64).transpose(0, 3, 1, 4, 2, 5)
    flat = [hopper_bwd_wide._by_threads(tile).reshape(8, 128, 4) for tile in tiles.reshape(-1, 64, 64)]
    thread = np.arange(128)
    # Thread 37: warp 1, quad row 1, columns 2 and 3 of every 8; 16 bytes are columns of two 8-column tiles.
    np.testing.assert_array_equal(flat[0][1, 37], tiles[0, 0, 0, 0, 16 + 8 + 1, [2, 3, 10, 11]])
    assert len({tuple(tile[k, t]) for tile in flat for k in range(8) for t in thread}) == len(flat) * 1024
    dq = jnp.asarray(np.stack(flat).reshape(1, 3, 2, 2, 8, 128, 4))
    np.testing.assert_array_equal(hopper_bwd_wide._in_order(dq), x)


def lower(case: Case, config: WideConfig | None = None) -> str:
    arguments, cotangents = call(case)
    static = {name: arguments.pop(name) for name in list(arguments) if not hasattr(arguments[name], "dtype")}
    ids = static.pop("segment_ids", None)

    def function(arguments: Any, cotangents: Any, ids: Any, out: Any, lse: Any) -> Any:
        segments = {} if ids is None else {"segment_ids": ids}
        return backward(case, arguments | static | segments, cotangents, out, lse, config)

    lse = jnp.zeros(arguments["query"].shape[:3], jnp.float32)
    return lower_for_cuda(function, arguments, cotangents, ids, cotangents["dout"], lse).as_text()


@EVERY_CASE
def test_lowers_for_cuda(name):
    assert "mosaic_gpu" in lower(CASES[name])


@pytest.mark.parametrize("H, H_v", [(256, 256), (192, 128)])
@pytest.mark.slow
def test_every_candidate_lowers_for_cuda(H, H_v):
    one = case(T=264, S=264, H=H, H_v=H_v, query_runs=((0, 200), (1, 64)), is_causal=True)
    (candidate,) = hopper_config.backward_candidates(one.spec())
    assert candidate == hopper_config.backward_default(one.spec()) == WideConfig(l2_mib=128)
    for config in (WideConfig(l2_mib=128), WideConfig(cluster=2), WideConfig(cluster=4)):
        assert "mosaic_gpu" in lower(one, config)

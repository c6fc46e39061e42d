"""The fused backward kernel for head dims above 128, interpreted on a CPU, against the float64 oracle; and lowered."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import hopper_bwd_wide
from pallas_kernels.attention.cases import Case
from tests.pallas_kernels.attention.backward_check import check, check_reach, lower


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
    # Seven steps, so that every ring is walked twice; two query heads add to one dK and dV.
    "rings": case(T=200, S=72, N=2, is_causal=True),
    "long": case(T=448, S=448, is_causal=True),
    "long_window": case(T=448, S=448, window=(100, 50)),
}  # fmt: skip
# One of each kind; `make test-slow` runs the rest.
QUICK = ("causal_256", "segments_cross", "rings")


def cases(but: tuple[str, ...] = ()) -> list[Any]:
    names = [name for name in CASES if name not in but]
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", cases())
def test_gradients(name):
    check(CASES[name])


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
    check_reach(case(T=136, S=136, is_causal=True, window=window), operand, at)


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


# Without the programs of "causal_bottom_right", "unseen_keys" and "scale_zero" of other numbers.
@pytest.mark.parametrize("name", cases(but=("dead_rows", "scale_negative", "long")))
def test_lowers_for_cuda(name):
    assert "mosaic_gpu" in lower(CASES[name])

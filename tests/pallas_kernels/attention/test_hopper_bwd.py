"""The fused backward kernel, interpreted on a CPU, against the float64 oracle; and lowered for CUDA."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from pallas_kernels.attention import blocks, hopper_bwd_plan
from pallas_kernels.attention.cases import Case
from pallas_kernels.attention.spec import segment_sides
from tests.pallas_kernels.attention.backward_check import check, check_reach, lower


def case(**changes: Any) -> Case:
    return dataclasses.replace(Case(B=1, T=256, S=256, N=1, K=1, H=64, H_v=64, dtype="bfloat16"), **changes)


CASES = {
    "plain": case(),
    "plain_128": case(H=128, H_v=128, T=128, N=2, K=2, dtype="float16"),
    "causal": case(is_causal=True),
    "causal_128": case(H=128, H_v=128, N=2, K=1, T=192, is_causal=True),
    "causal_bottom_right": case(T=136, S=264, is_causal=True, causal_alignment="bottom_right"),
    "dead_rows": case(T=300, S=136, is_causal=True, causal_alignment="bottom_right"),
    "unseen_keys": case(T=128, S=300, is_causal=True),
    "heads": case(B=2, T=128, S=96, N=6, K=3, is_causal=True),
    "group_window": case(T=264, S=264, N=3, window=(40, 25)),
    "group_128": case(H=128, H_v=128, T=136, S=256, N=3, is_causal=True),
    "tails": case(T=131, S=133),
    "head_dims": case(H=40, H_v=24, T=64, S=64),
    "window": case(T=384, window=(40, 25)),
    "window_causal": case(H=128, H_v=128, window=(70, 0), is_causal=True),
    "window_bottom_right": case(T=136, S=264, window=(20, 30), causal_alignment="bottom_right"),
    "lengths": case(B=2, query_lengths=(256, 51), kv_lengths=(130, 256)),
    "lengths_zero": case(B=3, T=128, S=136, query_lengths=(0, 128, 128), kv_lengths=(136, 0, 1), is_causal=True),
    "lengths_bottom_right": case(
        B=2, T=160, S=264, query_lengths=(160, 40), kv_lengths=(264, 150), is_causal=True,
        causal_alignment="bottom_right",
    ),
    "segments": case(query_runs=((0, 100), (1, 60), (2, 96)), is_causal=True),
    "segments_out_of_order": case(query_runs=((3, 70), (0, 40), (3, 90), (-1, 56))),
    "segments_cross": case(T=160, S=264, query_runs=((0, 90), (1, 60), (-1, 10)), kv_runs=((1, 150), (0, 60), (5, 54))),
    "causal_hides_nothing": case(T=1, S=128, is_causal=True, causal_alignment="bottom_right"),
    "window_hides_nothing": case(T=128, S=128, window=(200, 200)),
    "scale": case(T=128, scale=0.9, is_causal=True),
    "scale_negative": case(T=128, scale=-0.4, is_causal=True, S=136),
    "scale_zero": case(T=128, scale=0.0, is_causal=True),
}  # fmt: skip
# One of each kind; `make test-slow` runs the rest.
QUICK = (
    "plain_128", "causal", "dead_rows", "heads", "group_window", "tails", "head_dims", "window_bottom_right",
    "lengths_zero", "segments_cross", "scale_negative",
    "causal_hides_nothing",
)  # fmt: skip
SLOW = {
    "everything": case(
        B=2, T=264, S=300, N=2, K=1, query_runs=((0, 120), (1, 144)), kv_runs=((0, 130), (1, 170)), window=(150, 20),
        is_causal=True, causal_alignment="bottom_right", query_lengths=(264, 200), kv_lengths=(300, 210),
    ),
    "group_window_128": case(H=128, H_v=128, T=264, S=264, N=6, K=2, window=(100, 30)),
    "long": case(T=768, S=768, is_causal=True),
    "long_window": case(T=768, S=768, window=(200, 100)),
}  # fmt: skip


def cases(but: tuple[str, ...] = ()) -> list[Any]:
    names = [name for name in CASES | SLOW if name not in but]
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", cases())
def test_gradients(name):
    check((CASES | SLOW)[name])


def spoil_padding(x: dict[str, Any]) -> None:
    """NaN and inf where the lengths (256, 51) and (130, 256) end."""
    x["key"][0, 130:] = np.nan
    x["value"][0, 130:] = np.inf
    x["query"][1, 51:] = np.nan
    x["dout"][1, 60:] = -np.inf
    x["dlse"][1, 51:] = np.nan


def spoil_segments(x: dict[str, Any]) -> None:
    """The last 56 tokens are padding."""
    for name in ("query", "key", "value", "dout"):
        x[name][:, -50:] = np.nan if name in ("query", "value") else np.inf


def spoil_unseen_keys(x: dict[str, Any]) -> None:
    x["key"][:, 128:] = np.nan
    x["value"][:, 128:] = np.nan


@pytest.mark.parametrize(
    "name, change",
    [
        ("lengths", spoil_padding),
        ("segments_out_of_order", spoil_segments),
        ("unseen_keys", spoil_unseen_keys),
    ],
)
def test_what_is_masked_contributes_nothing(name, change):
    check(CASES[name], change)


@pytest.mark.parametrize("operand, at", [("query", 200), ("dout", 190), ("key", 150), ("value", 140)])
@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), (40, 0)])
def test_nan_reaches_only_those_who_see_it(operand, at, window):
    check_reach(case(T=264, S=264, is_causal=True, window=window), operand, at)


def plan(case: Case, q_block: int) -> tuple[np.ndarray, hopper_bwd_plan.Plan]:
    """(live pairs of blocks, plan) of a call."""
    arguments = case.arguments()
    sides: Any = segment_sides(arguments.get("segment_ids"))
    arrays = {"query_lengths": arguments.get("query_seq_lengths"), "kv_lengths": arguments.get("key_value_seq_lengths")}
    arrays |= {"query_segments": sides[0], "kv_segments": sides[1]}
    known: dict[str, Any] = {name: None if x is None else np.asarray(x) for name, x in arrays.items()}
    live, full = blocks.overlaps(case.spec(), q_block, 128, **known)
    return live, hopper_bwd_plan.make_plan(live, full, 0, case.S)


@pytest.mark.parametrize("name", CASES | SLOW)
@pytest.mark.parametrize("q_block", [64, 128])
def test_the_visitors_of_a_block_of_queries_are_neighbours(name, q_block):
    live, (steps, first) = plan((CASES | SLOW)[name], q_block)
    start, full_start, full_stop, stop = (steps[..., k] for k in range(4))
    assert ((start <= full_start) & (full_start <= full_stop) & (full_stop <= stop)).all()
    index = np.arange(live.shape[1])
    visits = (start[..., None] <= index) & (index < stop[..., None])  # (b, nkv, nq)
    assert (visits | ~live.swapaxes(1, 2)).all(), "a block that is needed is not visited"
    turns = np.arange(live.shape[2])[:, None] - first[:, None]
    want = np.cumsum(visits, axis=1) - 1
    np.testing.assert_array_equal(turns[visits], want[visits])
    assert (first[~visits.any(1)] == live.shape[2]).all()


# The programs of "causal", "dead_rows", "scale_negative" and "window", of other numbers.
SAME_PROGRAM = (
    "scale", "scale_zero", "long", "causal_bottom_right", "unseen_keys", "window_hides_nothing", "long_window",
)  # fmt: skip


@pytest.mark.parametrize("name", cases(but=SAME_PROGRAM))
def test_lowers_for_cuda(name):
    assert "mosaic_gpu" in lower((CASES | SLOW)[name])

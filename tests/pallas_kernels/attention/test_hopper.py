"""The forward kernel: interpreted on a CPU against the float64 oracle, with poison where it is masked; and lowered."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import hopper, hopper_config
from pallas_kernels.attention.cases import Case, Runs
from pallas_kernels.attention.hopper_config import Config
from pallas_kernels.attention.spec import AttentionSpec, segment_sides
from pallas_kernels.device import H200, Device
from tests.mosaic.interpreter import run_interpreted
from tests.mosaic.lowering import lower_for_cuda
from tests.oracle import attention, visible
from tests.tolerance import assert_close

MASKS: dict[str, dict[str, Any]] = {
    "whole": {},
    "causal": {"is_causal": True},
    "window": {"window": (40, 10)},
    "causal_window": {"is_causal": True, "window": (70, 70)},
}
SIZES = [(100, 100), (1, 150), (65, 256), (150, 63)]
RAGGED = ["", "lengths", "documents", "disorder", "lengths+documents"]
HEAD_DIMS = [(64, 64), (128, 128), (192, 128), (256, 256), (40, 72)]
HEADS = [(1, 1), (2, 1)]  # of queries, of keys
CONFIGS = {
    "2x64": Config(kv_block=64),
    "2x128": Config(kv_block=128, uncleared=True, lazy=True),
    "2x64_turns_alone": Config(kv_block=64, turns=True, persistent=False, lazy=True),
    "2x64_stages_shared_output": Config(kv_block=64, stages=3, own_output=False),
    "3x64_alone_shared_output": Config(warpgroups=3, kv_block=64, persistent=False, own_output=False, lazy=True),
    "3x128_turns": Config(warpgroups=3, kv_block=128, turns=True),
}
FACTORS: dict[str, list[Any]] = {
    "mask": list(MASKS),
    "alignment": ["top_left", "bottom_right"],
    "sizes": SIZES,
    "ragged": RAGGED,
    "dims": HEAD_DIMS,
    "heads": HEADS,
    "dtype": ["bfloat16", "float16"],
    "config": list(CONFIGS),
}
Row = dict[str, Any]


def fits(row: Row, spare: int = 2048) -> bool:
    """Whether the configuration can serve the head dims."""
    return _fits(row["dims"], row["config"], spare)


@functools.cache
def _fits(dims: tuple[int, int], config: str | Config, spare: int) -> bool:
    H, H_v = dims
    spec = AttentionSpec(B=1, T=1, S=1, N=1, K=1, H=H, H_v=H_v, dtype="bfloat16")
    return hopper_config.fits(spec, config if isinstance(config, Config) else CONFIGS[config], spare)


def pairs(row: Row) -> set[tuple[Any, ...]]:
    return set(itertools.combinations(row.items(), 2))


def pairwise(factors: dict[str, list[Any]], fits: Callable[[Row], bool]) -> list[Row]:
    """Few rows in which every two levels of two factors meet somewhere: of many random rows, the most useful next."""
    rng = np.random.default_rng(0)

    def anyone(**fixed: Any) -> Row:
        return {name: fixed.get(name, levels[rng.integers(len(levels))]) for name, levels in factors.items()}

    every = itertools.chain(*(itertools.product(*x) for x in itertools.combinations(
        [[(name, level) for level in levels] for name, levels in factors.items()], 2
    )))  # fmt: skip
    missing = {pair for pair in every if not {"dims", "config"} == {pair[0][0], pair[1][0]} or fits(dict(pair))}
    rows = []
    while missing:
        pair = min(missing, key=str)
        found = filter(fits, (anyone(**dict(pair)) for _ in range(300)))
        best = max(found, key=lambda row: len(pairs(row) & missing))
        rows.append(best)
        missing -= pairs(best)
    return rows


def cut(length: int, ids: tuple[int, ...]) -> Runs:
    """Runs of unequal lengths, together `length`."""
    ends = [length * (2 * i + 3) // (2 * len(ids) + 1) for i in range(len(ids))]
    return tuple((segment, stop - start) for segment, start, stop in zip(ids, [0, *ends], ends, strict=False))


def case_of(row: Row) -> tuple[Case, Config]:
    (T, S), (N, K), (H, H_v) = row["sizes"], row["heads"], row["dims"]
    changes = dict(MASKS[row["mask"]])
    if "lengths" in row["ragged"]:
        changes |= {"B": 2, "query_lengths": (T - T // 4, T), "kv_lengths": (S, S // 3)}
    if "documents" in row["ragged"]:
        changes |= {"query_runs": cut(T, (0, 1, 2, -1)), "kv_runs": cut(S, (0, 1, 2, -1))}
    if "disorder" in row["ragged"]:
        changes |= {"query_runs": cut(T, (1, 0, -1, 3, 1)), "kv_runs": cut(S, (3, 5, 1, -1, 0))}
    case = Case(
        **{"B": 1, "T": T, "S": S, "N": N, "K": K, "H": H, "H_v": H_v, "dtype": row["dtype"]} | changes,
        causal_alignment=row["alignment"],
    )
    return case, CONFIGS[row["config"]]


def name_of(row: Row) -> str:
    return "-".join("x".join(map(str, x)) if isinstance(x, tuple) else x or "even" for x in row.values())


ROWS = pairwise(FACTORS, fits)


# One persistent CTA does all tiles, and a race between two of them is none of the counter of tiles.
ONE_CORE = dataclasses.replace(H200, num_cores=1)


def call(
    case: Case, config: Config | None, arguments: dict[str, Any] | None = None, device: Device = ONE_CORE
) -> tuple[Any, tuple[Any, ...]]:
    """(function of arrays, arrays) of the kernel's call."""
    arguments = arguments or case.arguments()
    spec = case.spec()
    sides: Any = segment_sides(arguments.get("segment_ids"))
    optional = {
        "query_lengths": arguments.get("query_seq_lengths"),
        "kv_lengths": arguments.get("key_value_seq_lengths"),
        "query_segments": sides[0],
        "kv_segments": sides[1],
    }
    scale = spec.default_scale if case.scale is None else case.scale
    attend = functools.partial(hopper.attend, spec, scale=scale, config=config, device=device)
    arrays = (*(arguments[name] for name in ("query", "key", "value")), *optional.values())
    return lambda q, k, v, *rest: attend(q, k, v, **dict(zip(optional, rest, strict=True))), arrays


def check(case: Case, config: Config | None = None, cores: int = 1, **options: Any) -> None:
    arguments = {name: x for name, x in case.arguments().items() if x is not None}
    function, arrays = call(case, config, arguments, dataclasses.replace(H200, num_cores=cores))
    out, lse = run_interpreted(function, *arrays, **options)
    oracle, plain = attention(**arguments), attention(**arguments, precision=jnp.dtype(case.dtype))
    assert out.dtype == jnp.dtype(case.dtype) and lse.dtype == jnp.float32
    assert_close(out, oracle.out, plain.out, "out")
    # Lagging maxima: logits relative to something up to 8 bits above the largest.
    lazy = (config or hopper_config.default(case.spec())).lazy and case.dtype == "bfloat16"
    assert_close(lse, oracle.lse, plain.lse, "lse", through=8.0 if lazy else 0.0)


# A third of the pairs within the suite's time, the others with the long tests.
@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.slow] * (i % 3 > 0)) for i, row in enumerate(ROWS)], ids=name_of
)
def test_pairs_of_everything(row):
    check(*case_of(row))


def rest() -> list[Row]:
    """Every mask with every kind of ragged batch and alignment, which together say what is seen; the rest at random."""
    rng = np.random.default_rng(1)
    names = ("mask", "ragged", "alignment")
    rows = []
    for levels in itertools.product(*(FACTORS[name] for name in names)):
        while True:
            row = {name: x[rng.integers(len(x))] for name, x in FACTORS.items()} | dict(zip(names, levels, strict=True))
            if fits(row):
                break
        rows.append(row)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("row", rest(), ids=name_of)
def test_triples(row):
    check(*case_of(row))


def case(**changes: Any) -> Case:
    return dataclasses.replace(Case(B=1, T=128, S=128, N=1, K=1, H=64, H_v=64, dtype="bfloat16"), **changes)


def some_slow(names: Iterable[str], slow: str) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in slow.split())) for name in names]


SPECIAL: dict[str, tuple[Case, Config | None]] = {
    "default_64": (case(T=200, S=300, is_causal=True), None),
    "default_128": (case(S=256, H=128, H_v=128), None),
    "default_mixed": (case(H=256, H_v=64, T=65), None),
    "multi_query": (case(T=63, N=5, is_causal=True), Config(kv_block=64)),
    "heads": (case(B=2, T=63, N=6, K=3), Config(kv_block=64)),
    "ring": (case(T=65, S=520, N=2), Config(kv_block=64, stages=3)),
    "tiles": (case(T=640, S=70, is_causal=True, causal_alignment="bottom_right"), Config(kv_block=64)),
    "blocks_of_192": (case(T=200, S=400, is_causal=True), Config(kv_block=192)),
    "scale": (case(scale=0.3, is_causal=True), Config(kv_block=64)),
    "scale_negative": (case(scale=-0.4, S=136, is_causal=True), Config(kv_block=64)),
    "scale_zero": (case(scale=0.0, is_causal=True), Config(kv_block=64)),
    "scale_sharp": (case(scale=20.0, S=200), Config(kv_block=64)),
    "one_of_each": (case(T=1, S=1, H=1, H_v=1), None),
    # Masks that hide nothing: whole blocks alone are left.
    "causal_hides_nothing": (case(T=1, is_causal=True, causal_alignment="bottom_right"), None),
    "window_hides_nothing": (case(window=(200, 200)), Config(kv_block=64)),
    "window_one_key": (case(T=150, S=150, window=(0, 0)), Config(kv_block=64)),
    "window_past_the_keys": (case(T=300, S=20, window=(4, 4)), Config(kv_block=64)),
    "lengths_zero": (case(B=3, query_lengths=(128, 0, 0), kv_lengths=(0, 0, 128)), Config(kv_block=64)),
    "lengths_one": (case(B=2, query_lengths=(1, 128), kv_lengths=(128, 1), is_causal=True), Config(kv_block=64)),
    "kv_lengths": (case(B=2, S=200, kv_lengths=(65, 200)), Config(kv_block=64)),
    "query_lengths": (case(B=2, S=200, query_lengths=(65, 0), is_causal=True), Config(kv_block=64)),
}


@pytest.mark.parametrize(
    "name",
    some_slow(
        SPECIAL,
        "heads kv_lengths multi_query ring lengths_one window_one_key blocks_of_192 scale scale_sharp one_of_each",
    ),
)
def test_special(name):
    check(*SPECIAL[name])


lagging = functools.partial(Config, lazy=True)
LAZY = lagging(kv_block=64)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_maxima_that_lag_behind(dtype):
    """From block to block, the last one first, the logits of the batch entries rise by a little, by more than a weight
    may, by more than a float32 holds; they fall; the first to be seen are -inf."""
    inf = np.inf
    check_heights(
        np.array([[7, 5, 3, 1, -99], [0, 5, 30, 300, -1000], [9, 0, -9, -90, 0], [-50, -50, -60, -50, -inf]]), dtype
    )


def check_heights(heights: np.ndarray, dtype: str) -> None:
    """The logits of each batch entry's blocks of keys are about so large."""
    tall = case(B=len(heights), T=64, S=64 * heights.shape[1], dtype=dtype, scale=1.0)
    arguments = {name: x for name, x in tall.arguments().items() if x is not None}
    key = np.array(arguments["key"], np.float32)
    query = np.array(arguments["query"], np.float32)
    key *= 0.1
    query[..., 0], key[..., 0] = 1.0, np.repeat(heights, 64, axis=1)[..., None]
    arguments |= {"query": jnp.asarray(query, dtype), "key": jnp.asarray(key, dtype)}
    function, arrays = call(tall, LAZY, arguments)
    out, lse = run_interpreted(function, *arrays)
    oracle, plain = attention(**arguments), attention(**arguments, precision=jnp.dtype(dtype))
    assert_close(out, oracle.out, plain.out, "out")
    assert_close(lse, oracle.lse, plain.lse, "lse", through=8.0)


def test_what_a_row_gets_does_not_depend_on_the_others():
    """One row's logits rise, and a warp looks for new maxima: the other rows keep every bit."""
    tall = case(T=64, S=256)
    arguments = {name: x for name, x in tall.arguments().items() if x is not None}
    higher = np.array(arguments["query"], np.float32)
    higher[:, 5] *= 100
    results = []
    for query in (arguments["query"], jnp.asarray(higher, "bfloat16")):
        function, arrays = call(tall, LAZY, arguments | {"query": query})
        results.append([np.delete(np.asarray(x, np.float32), 5, axis=1) for x in run_interpreted(function, *arrays)])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("heads", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_order_of_tiles(monkeypatch, heads):
    """Tiles go by groups of heads, as many as the L2 cache holds; no head that fits a test is so large."""
    monkeypatch.setattr(hopper, "heads_side_by_side", lambda spec, config: heads)
    check(case(B=2, N=3, T=130, S=70, is_causal=True), Config(kv_block=64))


@pytest.mark.parametrize("cores", [5, pytest.param(132, marks=pytest.mark.slow)])
def test_several_persistent_ctas(cores):
    """The detector sees no order between CTAs, so that their counter of tiles is a race to it."""
    check(case(B=2, N=3, T=130, S=70), Config(kv_block=64), cores=cores, detect_races=False)


@pytest.mark.parametrize("cores, persistent", [(5, True), (6, False), (132, False)])
def test_a_grid_is_persistent_only_with_more_tiles_than_cores(cores, persistent):
    """One tile in a persistent grid would never end on a GPU: see `_Kernel.persistent`."""
    spec = case(B=2, N=3, T=100, S=70).spec()
    kernel = hopper._Kernel(spec=spec, config=Config(), heads=1, cores=cores, scale=1.0, masked=False)
    assert (kernel.tiles, kernel.persistent, kernel.ctas) == (6, persistent, min(cores, 6))


# What is not seen may hold anything. Batch entries are alike but for the poison: one call shows what it changes.


def seen_pairs(arguments: dict[str, Any]) -> np.ndarray:
    """(T, S), the same for all batch entries."""
    names = ("is_causal", "query_seq_lengths", "key_value_seq_lengths", "local_window_size", "causal_alignment")
    facts = {name: arguments.get(name) for name in (*names, "segment_ids")}
    return visible(0, arguments["query"].shape[1], arguments["key"].shape[1], **facts)


def alike(case: Case) -> dict[str, Any]:
    """Arguments whose batch entries are all the first one; numpy, to write to."""

    def repeat(x: jax.Array) -> np.ndarray:
        return np.array(jnp.broadcast_to(x[:1], x.shape))

    arguments = {name: x for name, x in case.arguments().items() if x is not None}
    if "segment_ids" in arguments:
        arguments["segment_ids"] = tuple(map(repeat, arguments["segment_ids"]))
    return {name: repeat(x) if isinstance(x, jax.Array) else x for name, x in arguments.items()}


def outcome(case: Case, config: Config | None, arguments: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    function, arrays = call(case, config, arguments)
    out, lse = run_interpreted(function, *arrays)
    return np.asarray(out.astype(jnp.float32)), np.asarray(lse)


POISONS = (np.nan, np.inf)
UNSEEN: dict[str, tuple[Case, Config | None]] = {
    "causal_short": (case(T=70, S=200, is_causal=True), lagging(kv_block=64)),
    "causal_short_128": (case(T=70, S=200, H=128, H_v=128, is_causal=True), lagging(kv_block=128)),
    "causal_bottom_right_long": (
        case(T=200, S=70, is_causal=True, causal_alignment="bottom_right"), lagging(kv_block=64, turns=True),
    ),
    "window_short": (case(T=20, S=200, window=(30, 10)), lagging(warpgroups=3, kv_block=64)),
    "window_right": (case(T=64, S=130, window=(20, 150), causal_alignment="bottom_right"), lagging(kv_block=128)),
    "window_middle": (
        case(T=10, S=400, window=(60, 5), causal_alignment="bottom_right", H=192, H_v=128), lagging(kv_block=64),
    ),
    "window_long": (case(T=200, S=70, window=(30, 10)), lagging(kv_block=64, own_output=False)),
    "lengths": (
        case(T=130, S=200, query_lengths=(100,), kv_lengths=(70,)),
        lagging(warpgroups=3, kv_block=128, turns=True),
    ),
    "lengths_none": (case(T=65, S=65, query_lengths=(65,), kv_lengths=(0,)), lagging(kv_block=64)),
    "lengths_bottom_right": (
        case(T=130, S=200, query_lengths=(100,), kv_lengths=(170,), is_causal=True, causal_alignment="bottom_right"),
        lagging(kv_block=64, persistent=False),
    ),
    "documents": (case(T=140, S=140, query_runs=((0, 50), (1, 70), (-1, 20)), is_causal=True), lagging(kv_block=64)),
    "disorder": (
        case(
            T=100, S=150, query_runs=((1, 30), (-1, 20), (0, 50)),
            kv_runs=((0, 20), (7, 70), (1, 20), (-1, 30), (0, 10)),
            H_v=128,
        ),
        lagging(kv_block=64),
    ),
    "wide": (case(T=64, S=130, H=256, H_v=256, is_causal=True), lagging(kv_block=64, own_output=False)),
    "blocks_of_192": (case(T=64, S=300, kv_lengths=(250,)), lagging(kv_block=192)),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    some_slow(
        UNSEEN,
        "causal_short_128 window_short window_right lengths_bottom_right documents window_middle blocks_of_192 "
        "window_long causal_bottom_right_long",
    ),
)
def test_what_nobody_sees_changes_nothing(name):
    case, config = UNSEEN[name]
    times = 1 + len(POISONS)
    lengths = {
        field: getattr(case, field) and getattr(case, field) * times for field in ("query_lengths", "kv_lengths")
    }
    case = dataclasses.replace(case, B=times, **lengths)
    arguments = alike(case)
    seen = seen_pairs(arguments)
    queries, keys = ~seen.any(axis=1), ~seen.any(axis=0)
    assert queries.any() or keys.any()
    for entry, poison in enumerate(POISONS, start=1):
        arguments["query"][entry, queries] = poison
        arguments["key"][entry, keys] = poison
        arguments["value"][entry, keys] = poison
    out, lse = outcome(case, config, arguments)
    assert (out[:, queries] == 0).all() and (lse[:, queries] == -np.inf).all()
    assert np.isfinite(out).all() and np.isfinite(lse[:, ~queries]).all()
    for entry in range(1, times):
        np.testing.assert_array_equal(out[entry], out[0])
        np.testing.assert_array_equal(lse[entry], lse[0])


SEEN: dict[str, tuple[Case, Config | None, int, int]] = {
    # a position of keys and one of queries
    "whole": (case(T=65, S=150), lagging(kv_block=64), 70, 64),
    "causal": (case(T=150, S=150, is_causal=True), lagging(kv_block=64), 100, 70),
    "causal_turns": (case(T=150, S=150, is_causal=True), lagging(warpgroups=3, kv_block=64, turns=True), 70, 149),
    "causal_128": (case(T=100, S=150, H=128, H_v=128, is_causal=True, causal_alignment="bottom_right"), None, 149, 1),
    "window": (case(T=150, S=150, window=(20, 10)), lagging(kv_block=64, own_output=False), 66, 0),
    "lengths": (case(T=65, S=200, query_lengths=(50,), kv_lengths=(130,)), lagging(kv_block=64, stages=3), 129, 49),
    "documents": (case(T=128, S=128, query_runs=((0, 40), (1, 60), (2, 28))), lagging(kv_block=64), 41, 99),
    "disorder": (
        case(T=65, S=150, query_runs=((1, 30), (0, 35)), kv_runs=((0, 65), (1, 85))), lagging(kv_block=128), 64, 29,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", some_slow(SEEN, "whole causal_128 window lengths causal documents"))
def test_what_is_not_finite_reaches_those_who_see_it(name):
    case, config, j, i = SEEN[name]
    times = 5
    lengths = {
        field: getattr(case, field) and getattr(case, field) * times for field in ("query_lengths", "kv_lengths")
    }
    case = dataclasses.replace(case, B=times, N=2, K=2, **lengths)
    arguments = alike(case)
    seen = seen_pairs(arguments)
    assert seen[:, j].any() and seen[i].any()
    d = case.H_v - 3
    arguments["value"][1, j, 0, d] = np.nan
    arguments["value"][2, j, 0, d] = np.inf
    arguments["key"][3, j, 0, 5] = np.nan
    arguments["query"][4, i, 0, 5] = np.nan
    out, lse = outcome(case, config, arguments)
    assert np.isfinite(out[0]).all()
    readers = {1: seen[:, j], 2: seen[:, j], 3: seen[:, j], 4: np.arange(case.T) == i}
    for entry, rows in readers.items():
        others = np.ones((case.T, 2), bool)
        others[rows, 0] = False
        np.testing.assert_array_equal(out[entry][others], out[0][others])
        np.testing.assert_array_equal(lse[entry][others], lse[0][others])
    assert np.isnan(out[1, readers[1], 0, d]).all() and not np.isfinite(out[2, readers[2], 0, d]).any()
    for entry in (3, 4):
        assert np.isnan(out[entry, readers[entry], 0]).all() and np.isnan(lse[entry, readers[entry], 0]).all()


# Lowering finds what the interpreter cannot: layouts, and shared memory.

LOWERED_MASKS: dict[str, Case] = {
    "whole": case(),
    "tail": case(S=100),
    "causal": case(T=300, S=300, is_causal=True),
    "causal_bottom_right": case(T=200, S=300, is_causal=True, causal_alignment="bottom_right"),
    "window": case(T=300, S=300, window=(40, 10)),
    "segments": case(T=300, S=300, query_runs=((0, 100), (1, 200))),
    "lengths": case(B=2, T=300, S=300, query_lengths=(300, 7), kv_lengths=(20, 300)),
    "kv_lengths": case(B=2, T=300, S=300, kv_lengths=(20, 300)),
    "query_lengths": case(B=2, T=300, S=300, query_lengths=(20, 300)),
    "everything": case(
        B=2, T=200, S=300, is_causal=True, causal_alignment="bottom_right", window=(70, 70), query_lengths=(200, 7),
        kv_lengths=(20, 300), query_runs=((0, 100), (1, 100)), kv_runs=((0, 100), (1, 200)),
    ),
}  # fmt: skip
PADDED = (64, 128, 192, 256)
LOWERED_DIMS = [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256), (40, 72)]


def lower(mask: str, dims: tuple[int, int], config: Config | None, dtype: str = "bfloat16") -> None:
    H, H_v = dims
    function, arrays = call(dataclasses.replace(LOWERED_MASKS[mask], N=2, H=H, H_v=H_v, dtype=dtype), config)
    assert lower_for_cuda(function, *arrays).as_text().count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize(
    "H, H_v",
    [pytest.param(*x, marks=[pytest.mark.slow] * (sum(x) // 64 % 3 > 0)) for x in itertools.product(PADDED, PADDED)],
)
def test_every_pair_of_head_dims_lowers(H, H_v):
    lower(list(LOWERED_MASKS)[(H + 3 * H_v) // 64 % len(LOWERED_MASKS)], (H - 24, H_v - 56), None)


@pytest.mark.parametrize("mask, config", [*zip(LOWERED_MASKS, itertools.cycle(CONFIGS), strict=False)])
def test_every_mask_and_every_configuration_lowers(mask, config):
    lower(mask, (64, 64), CONFIGS[config], "float16")


def with_spare(row: Row) -> bool:
    """Fits with ids, poison and their barriers on top."""
    return row["config"] is None or fits(row, spare=6144)


LOWERED = {"mask": list(LOWERED_MASKS), "dims": LOWERED_DIMS, "config": [None, *CONFIGS]}


@pytest.mark.slow
@pytest.mark.parametrize("row", pairwise(LOWERED, with_spare), ids=lambda row: "-".join(map(str, row.values())))
def test_pairs_of_everything_lower(row):
    lower(row["mask"], row["dims"], CONFIGS[row["config"]] if row["config"] else None)


def test_default_configurations_fit():
    for H, H_v in itertools.product(range(8, 257, 8), repeat=2):
        spec = AttentionSpec(B=1, T=1, S=1, N=1, K=1, H=H, H_v=H_v, dtype="bfloat16")
        assert hopper_config.candidates(spec)[0] == hopper_config.default(spec)
        for config in hopper_config.candidates(spec):
            # With 6 KiB for barriers and vectors; `test_every_pair_of_head_dims_lowers` has them too.
            assert hopper_config.fits(spec, config), (H, H_v, config)


@pytest.mark.parametrize(
    "wrong",
    [{"warpgroups": 1}, {"warpgroups": 4}, {"kv_block": 0}, {"kv_block": 96}, {"kv_block": 320}, {"stages": 1}]
    + [{"l2_mib": 0}],
    ids=str,
)
def test_configurations_that_the_hardware_refuses(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        Config(**wrong)

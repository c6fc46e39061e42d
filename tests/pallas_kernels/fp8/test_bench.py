"""What is timed, tuned and looked up of 8-bit products, and the accuracy command, with no GPU."""

import dataclasses

import jax
import numpy as np
import pytest

from pallas_kernels import accuracy_fp8, bench_fp8, tune, tuned
from pallas_kernels.device import H200, Device, current_device
from pallas_kernels.fp8 import hopper_config
from pallas_kernels.fp8.cases import Case
from pallas_kernels.fp8.hopper_config import Config
from pallas_kernels.fp8.spec import w_block, x_block
from pallas_kernels.timing import Chain
from tests.pallas_kernels.fp8 import oracle


@pytest.fixture(autouse=True)
def on_h200(monkeypatch):
    for module in (bench_fp8, tune):
        monkeypatch.setattr(module, "current_device", lambda: H200)


def chained(given):
    def run(function, calls, rounds):
        given.append((function, calls))
        return Chain(us=2.0, cupti_us=1.0, custom_calls=len(calls))

    return run


def test_what_is_timed_is_cold_distinct_and_what_a_call_runs(monkeypatch):
    given = []
    monkeypatch.setattr(bench_fp8, "chained", chained(given))
    every = bench_fp8.cells()
    for cell in every:
        (hopper, *_) = jobs = bench_fp8.jobs(cell)
        assert hopper == (cell, "hopper", hopper_config.config_of(cell.spec("block"), H200))
        for job in jobs if cell.M == 64 else ():
            assert bench_fp8.run(job)["us"] == 2.0
            _, calls = given.pop()
            assert len({tuple(map(id, call)) for call in calls}) == len(calls), job
            if not job[1].startswith("quantize"):
                weight = jax.tree.leaves(jax.eval_shape(calls[0][1]))
                bytes_of_one = sum(a.size * a.dtype.itemsize for a in weight)
                assert len({id(call[1]) for call in calls}) * bytes_of_one >= 200e6, job
    assert {(M, shape) for M in (16, 64, 256, 4096) for shape in bench_fp8.SHAPES} <= {
        (cell.M, cell.shape) for cell in every
    }


@pytest.mark.parametrize(
    "name, config", [("hopper", Config(swapped=True, columns=64, blocks=1, split=2)), ("w8a8", None)]
)
def test_the_timed_function_takes_scales_as_the_kernel_that_rounds_writes_them(name, config, monkeypatch):
    given = []
    monkeypatch.setattr(bench_fp8, "chained", chained(given))
    bench_fp8.run((bench_fp8.Cell(M=64, shape="2112x7168"), name, config))
    function, calls = given.pop()
    assert jax.eval_shape(function, *(jax.eval_shape(make) for make in calls[0])).shape == (64, 2112)
    if name == "hopper":
        assert jax.eval_shape(calls[0][0])[1].shape == (7168 // 128, 64)


def test_the_best_is_written_and_found_again(monkeypatch, tmp_path):
    """By the command's own functions; on another device, of another weight or other rows, the default."""
    product = tune.products()[0]
    slow, best, *_ = product.candidates
    assert best.split > 1 and (product.length, product.cell.shape) == (64, "7168x16384")
    times = {config: 2.0 - (config == best) for config in product.candidates}
    monkeypatch.setattr(tune, "each", lambda run, jobs, **_: [(job, times[job[1]]) for job in jobs])
    rows, errors = tune.tune([product], workers=1, seconds=1.0)
    assert not errors and rows[0]["config"] == dataclasses.asdict(best) and rows[0]["default_ms"] == 2.0
    path = tmp_path / "tuned.json"
    monkeypatch.setattr(hopper_config, "TUNED", path)
    tuned.write(path, [rows[0] | {"device": H200.kind}], tune.keys(tune.Product))
    spec = product.cell.spec("block")
    assert hopper_config.config_of(dataclasses.replace(spec, M=48), H200) == best
    others: list[tuple[dict, Device]] = [
        ({}, dataclasses.replace(H200, kind="NVIDIA H100")), ({"K": 1024}, H200), ({"scaling": "row"}, H200),
        *(({"M": rows}, H200) for rows in (1, 16, 100, 300, 4096)),  # of other tiles
    ]  # fmt: skip
    for changes, device in others:
        other = dataclasses.replace(spec, **changes)
        assert hopper_config.config_of(other, device) == hopper_config.default(other, device)
    tuned._rows.cache_clear()
    tuned.write(path, [rows[0] | {"device": H200.kind, "config": {"stages": 9}}], tune.keys(tune.Product))
    assert hopper_config.config_of(spec, H200) == slow


def test_every_tuned_configuration_is_what_a_call_of_that_size_runs():
    rows = [row for row in tuned._rows(hopper_config.TUNED) if row["device"] == H200.kind]
    assert rows == tuned.merge(rows, [], tune.keys(tune.Product))  # in order, none twice
    known = {product.name: product for product in tune.products()}
    assert len(known) == len(bench_fp8.ROWS) * len(bench_fp8.SHAPES)
    for row in rows:
        product = tune.Product(**{field.name: row[field.name] for field in dataclasses.fields(tune.Product)})
        assert product.name in known and row["ms"] <= row["default_ms"]
        assert dataclasses.asdict(hopper_config.config_of(product.cell.spec("block"), H200)) == row["config"]


def test_errors_against_float64():
    """Nothing is lost of equal products; of random ones no more than the rounding of y, which is to 8 bits."""
    rows = list(accuracy_fp8.rows(1024, current_device()))
    assert [row["kind"] for row in rows] == ["equal"] * 2 + ["random"] * 2
    for row in rows:
        assert row["error"] == 0 if row["kind"] == "equal" else 0 < row["error"] < 2.0**-9
    for scaling in ("block", "row", "tensor"):
        case = Case(M=3, K=300, N=130, scaling=scaling)
        x, x_scales, w, w_scales = case.operands()
        blocks = x_block(scaling, x.shape), w_block(scaling, w.shape)
        want = oracle.values(x, x_scales, blocks[0]) @ oracle.values(w, w_scales, blocks[1]).T
        np.testing.assert_allclose(accuracy_fp8.exact(case.spec(), case.operands()), want, rtol=1e-12)

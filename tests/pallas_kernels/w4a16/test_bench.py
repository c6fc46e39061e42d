"""What the benchmark times, with no GPU: its jobs, and the memory that they ask for."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import pytest

from pallas_kernels import bench_w4a16, tuned
from pallas_kernels.device import H200
from pallas_kernels.timing import Chain
from pallas_kernels.w4a16 import api
from pallas_kernels.w4a16.cases import CASES
from pallas_kernels.w4a16.spec import W4A16Spec

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def on_h200(monkeypatch):
    monkeypatch.setattr(bench_w4a16, "current_device", lambda: H200)


def test_every_cell_has_a_kernel_and_the_plain_ones_their_rivals():
    for cell in bench_w4a16.cells():
        names = {name for _, name, _ in bench_w4a16.jobs(cell)}
        assert ("hopper_large" in names) == (cell.M >= 8) and ("hopper" in names) == (cell.M <= 32)
        assert {"bf16", "xla"} <= names or cell.group != 128 or cell.zeros


@pytest.mark.parametrize("name", ["bf16", "xla", "hopper_large"])
def test_weights_are_cold_and_fit(name, monkeypatch):
    """Distinct weights of more than the L2 cache; of 16 bits, or to be made so, at most 5 GB."""
    given = []

    def chained(function, calls, rounds):
        given.append(calls)
        return Chain(us=1.0, cupti_us=1.0, custom_calls=len(calls))

    monkeypatch.setattr(bench_w4a16, "chained", chained)
    for cell in bench_w4a16.cells():
        bench_w4a16.run((cell, name, None))
        calls = given.pop()
        weights = {id(call[1]): [jax.eval_shape(make) for make in call[1:]] for call in calls}
        assert len(calls) >= len(weights)
        assert sum(a.size * a.dtype.itemsize for arrays in weights.values() for a in arrays) >= 200e6
        if name != "hopper_large":
            assert len(weights) == len(calls) >= 4
            assert len(calls) * 2 * cell.spec.K * cell.spec.N <= 5e9


def test_every_tuned_configuration_is_what_a_call_of_that_size_runs():
    rows = json.loads(api.TUNED.read_text())
    assert rows == tuned.merge(rows, [], bench_w4a16.KEYS) and len(rows) >= 24  # in order, none twice
    for row in rows:
        facts: dict[str, Any] = {"dtype": "bfloat16", "scale_dtype": "bfloat16", "group": 128, "zeros": False}
        spec = W4A16Spec(M=row["length"], K=row["K"], N=row["N"], **facts)
        assert dataclasses.asdict(api.config_of(row["kernel"], spec, H200)) == row["config"]
        assert row["us"] <= row["default_us"]


@pytest.mark.parametrize("name", api.KERNELS)
def test_other_weights_and_devices_get_the_default(name):
    unknown = dataclasses.replace(CASES["plain"].spec(), M=16)
    assert api.config_of(name, unknown, H200) == api.KERNELS[name].default(unknown, H200)
    known = dataclasses.replace(unknown, K=4096, N=4096, group=128)
    other = dataclasses.replace(H200, kind="NVIDIA H100", num_cores=114)
    assert api.config_of(name, known, other) == api.KERNELS[name].default(known, other)


def test_a_tuned_configuration_that_does_not_fit_is_passed_over(tmp_path, monkeypatch):
    spec = dataclasses.replace(CASES["plain"].spec(), M=32, K=4096, N=4096, group=128)
    config = dataclasses.asdict(api.KERNELS["hopper"].Config(stages=32))
    row = {"device": H200.kind, "kernel": "hopper", "K": 4096, "N": 4096, "length": 32, "config": config}
    tuned.write(path := tmp_path / "tuned.json", [row], bench_w4a16.KEYS)
    monkeypatch.setattr(api, "TUNED", path)
    assert api.config_of("hopper", spec, H200) == api.KERNELS["hopper"].default(spec, H200)


def test_rows_of_cells_and_of_tuned_json(monkeypatch):
    cell = bench_w4a16.Cell(shape="8B o", M=16)
    times = {"bf16": 12.0, "xla": 30.0, "hopper": 6.0, "hopper_large": 10.0}

    def each(run, jobs, *, workers, seconds):
        for n, job in enumerate(jobs):
            _, name, config = job
            given = None if config is None else dataclasses.asdict(config)
            yield job, {"us": times[name] - n / 1000, "config": given}

    monkeypatch.setattr(bench_w4a16, "each", each)
    asymmetric = dataclasses.replace(cell, zeros=True)
    plain, other = bench_w4a16.rows([asymmetric, cell], workers=1, seconds=1.0)
    assert plain["cell"] == "8B o M16" and other["cell"] == "8B o M16 asymmetric"
    assert set(times) <= plain.keys() and "bf16" not in other
    for name in api.KERNELS:
        assert plain[name]["us"] < plain[name]["default_us"] == pytest.approx(times[name], abs=0.2)
        assert other[name]["config"] in (
            plain[name]["config"],
            dataclasses.asdict(api.KERNELS[name].default(asymmetric.spec, H200)),
        )
    made = bench_w4a16.tuned_rows(plain, {"device": "d"})
    assert [row["kernel"] for row in made] == list(api.KERNELS) and not bench_w4a16.tuned_rows(other, {})
    assert all(row["K"] == row["N"] == 4096 and row["length"] == 16 for row in made)
    assert made[0]["config"] == plain["hopper"]["config"] and set(made[0]["rivals_us"]) == {"bf16", "xla"}


def test_readme_shows_the_rows():
    rows = [json.loads(line) for line in (ROOT / "notebooks/results/w4a16_h200.jsonl").read_text().splitlines()]
    assert bench_w4a16.table(rows) in (ROOT / "README.md").read_text()
    assert len(bench_w4a16.table(rows).splitlines()) == 2 + len(bench_w4a16.SHAPES)

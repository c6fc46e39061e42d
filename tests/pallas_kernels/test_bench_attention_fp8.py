"""The benchmark of attention in e4m3: its jobs and rows; what it times needs a GPU."""

from typing import Any

import pytest

from pallas_kernels import bench_attention_fp8
from pallas_kernels.attention import hopper_fp8_config
from pallas_kernels.bench import Cell

CELLS = [Cell(head_dim=head_dim, length=8192, causal=False) for head_dim in (128, 64)]


@pytest.fixture
def asked(monkeypatch) -> list[Any]:
    """The jobs, in the order in which they are asked for; the second of them fails."""
    jobs: list[Any] = []

    def each(run, wanted, *, workers, seconds):
        assert run is bench_attention_fp8.run and (workers, seconds) == (2, 9.0)
        for n, job in enumerate(wanted):
            jobs.append(job)
            yield job, "no" if n == 1 else {f"{job[1]}_ms": 1.0, "config": str(job[2])}

    monkeypatch.setattr(bench_attention_fp8, "each", each)
    return jobs


def test_candidates_come_with_the_defaults_first(asked):
    rows = list(bench_attention_fp8.candidate_rows(CELLS, workers=2, seconds=9.0))
    specs = [bench_attention_fp8.inputs(cell)[1] for cell in CELLS]
    every = [
        (cell, config) for cell, spec in zip(CELLS, specs, strict=True) for config in hopper_fp8_config.candidates(spec)
    ]
    assert [config for _, _, config in asked[:2]] == [hopper_fp8_config.default(spec) for spec in specs]
    assert sorted(map(str, every)) == sorted(str((cell, config)) for cell, _, config in asked)
    assert rows[1] == {"cell": CELLS[1].name, "config": str(asked[1][2]), "error": "no"}
    assert [row["config"] for row in rows] == [str(config) for _, _, config in asked]
    assert all(row["kernel_ms"] == 1.0 for row in rows if "error" not in row)


def test_a_row_has_every_kind_of_its_cell(asked):
    rows = list(bench_attention_fp8.rows(CELLS, workers=2, seconds=9.0))
    assert rows[0] == {"cell": CELLS[0].name, "error": "included: no"}
    assert [set(row) for row in rows[1:]] == [{"cell", "kernel_ms", "included_ms", "bf16_ms", "config"}]


def test_without_a_gpu_it_says_so(capsys):
    assert bench_attention_fp8.main(["--candidates"]) == 2
    assert "needs a GPU" in capsys.readouterr().err

"""The benchmark's cells and table; what it times needs a GPU."""

import json
from pathlib import Path

import pytest

from pallas_kernels import bench

ROOT = Path(__file__).parents[2]


def test_readme_shows_the_committed_rows():
    rows = [json.loads(line) for line in (ROOT / "notebooks/results/attention_h200.jsonl").read_text().splitlines()]
    assert bench.table(rows) in (ROOT / "README.md").read_text()


def test_cells_have_names_of_their_own_and_whole_rows():
    cells = list(bench.cells())
    assert len({cell.name for cell in cells}) == len(cells)
    assert all(bench.TOKENS % cell.length == 0 for cell in cells) and sum(bench.DOCUMENTS) <= bench.TOKENS


def test_without_a_gpu_it_says_so(capsys):
    assert bench.main([]) == 2
    assert "needs a GPU" in capsys.readouterr().err


@pytest.mark.parametrize("rows", [[], [{"cell": "d64-s2048-none-forward", "tflops": 1.4, "ratio": 1.234}]])
def test_table_holds_a_line_for_what_was_measured(rows):
    assert [line.split(" | ")[1] for line in bench.table(rows).splitlines()[2:]] == ["1 (1.23x)"] * len(rows)

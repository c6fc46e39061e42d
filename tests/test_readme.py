"""What README shows, runs."""

import json
import re
from pathlib import Path
from typing import Any

from pallas_kernels import bench

README = Path(__file__).parents[1] / "README.md"


def test_the_python_example_runs(tmp_path, monkeypatch, capsys):
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert code is not None and len(code[1].splitlines()) <= 20
    monkeypatch.chdir(tmp_path)
    example = code[1].replace("max_new_tokens=200", "max_new_tokens=20")
    exec(example.replace("steps=300", 'steps=3, batch_size=8, eval_batches=1, **{"model.n_layers": 1}'), {})
    shown = capsys.readouterr().out
    assert "> xla_chunked" in shown and "([3], [" in shown
    assert (tmp_path / "runs" / "shakespeare" / "checkpoints" / "3").is_dir()


def test_the_commands_are_targets_of_the_makefile():
    makefile = (README.parent / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README.read_text(), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (README.parent / f"notebooks/results/{name}.jsonl").open()]


def test_the_table_of_attention_is_that_of_the_rows():
    assert bench.table(rows_of("attention_h200")) in README.read_text()


def test_the_table_of_attention_in_e4m3_is_that_of_the_rows():
    last = {row["cell"]: row for row in rows_of("attention_fp8_h200") if "included_tflops" in row and "bf16_ms" in row}
    lines = re.findall(r"^\| (\d+), (\d+) \|(.* \(\d+\) .*)\|$", README.read_text(), re.MULTILINE)
    for head_dim, length, cells in lines:
        found = [cell.strip() for cell in cells.split("|")]
        for mask, pair in zip(("none", "causal"), (found[:2], found[2:]), strict=True):
            row = last[f"d{head_dim}-s{length}-{mask}-forward"]
            assert pair == [f"{row['bf16_tflops']:.0f}", f"{row['included_tflops']:.0f} ({row['kernel_tflops']:.0f})"]
    assert len(lines) == 6


def test_perplexities_of_quantised_models_are_measured_rows():
    """Of one call on an H200, in float32; the paper's settings were measured on a CPU."""
    rows = rows_of("quantize_smollm2")
    table = README.read_text().split("| perplexity of SmolLM2-135M |")[1].split("\n\n")[0].splitlines()[2:]
    columns = [
        (4, True, False),
        (4, False, False),
        (3, True, False),
        (3, False, False),
        (4, True, True),
        (4, False, True),
    ]
    methods = {"float32": "none", "nearest": "rtn", "GPTQ": "gptq", "AWQ": "awq", "AWQ, then GPTQ": "awq+gptq"}
    assert len(table) >= 6
    for line in table:
        label, *cells = (cell.strip() for cell in line.strip("| ").split("|"))
        paper, method = "paper" in label, methods.get(label) or methods[label.split()[0]]
        assert len(cells) == len(columns) or paper
        for (bits, symmetric, trained), cell in zip(columns, cells, strict=False):
            settings = dict(bits=bits, symmetric=symmetric, group=64) if method != "none" else {}
            settings |= dict(damping=0.01 if paper else 0.05, order="static") if "gptq" in method else {}
            settings |= dict(scale_dtype="bfloat16") if method == "rtn" else {}
            found = [
                f"{row['perplexity']:.2f}"
                for row in rows
                if row["method"] == method
                and ("trained on" in row["model"]) == trained
                and (row["device"].startswith("cpu") if paper else row["device"] == "NVIDIA H200")
                and row.get("compute_dtype", "float32") == "float32"
                and not row.get("propagate_error")
                and settings.items() <= ({"bits": 4} | row).items()
            ]
            assert not cell or [cell] == found, (label, bits, symmetric, trained)

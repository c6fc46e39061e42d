"""What README shows, runs."""

import json
import re
from pathlib import Path

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


def test_perplexities_of_quantised_models_are_measured_rows():
    rows = [json.loads(line) for line in (README.parent / "notebooks/results/quantize_smollm2.jsonl").open()]
    table = README.read_text().split("| method | symmetric | asymmetric |")[1].split("\n\n")[0].splitlines()[2:]
    shown = {line.split(" | ")[0].strip("| "): [cell.strip() for cell in line.split("|")[2:4]] for line in table}
    methods = {"nearest": "rtn", "GPTQ": "gptq", "AWQ": "awq", "AWQ, then GPTQ": "awq+gptq"}
    assert len(shown) >= 4
    for label, cells in shown.items():
        paper = "paper" in label
        method = methods.get(label) or methods[label.split()[0]]
        for symmetric, cell in zip((True, False), cells, strict=True):
            found = {
                f"{row['perplexity']:.2f}"
                for row in rows
                if (row["method"], row.get("symmetric"), row.get("group"), row.get("bits", 4))
                == (method, symmetric, 64, 4)
                and (method != "gptq" or (row["damping"] == 0.01) == paper)
            }
            assert not cell or cell in found, (label, cell)

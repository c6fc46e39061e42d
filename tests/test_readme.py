"""What README shows, runs."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_python_example_runs(tmp_path, monkeypatch, capsys):
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert code is not None and len(code[1].splitlines()) <= 20
    monkeypatch.chdir(tmp_path)
    exec(code[1].replace("steps=300", 'steps=3, batch_size=8, eval_batches=1, **{"model.n_layers": 1}'), {})
    shown = capsys.readouterr().out
    assert "> xla_chunked" in shown and "([3], [" in shown
    assert (tmp_path / "runs" / "shakespeare" / "checkpoints" / "3").is_dir()


def test_the_commands_are_targets_of_the_makefile():
    makefile = (README.parent / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README.read_text(), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)

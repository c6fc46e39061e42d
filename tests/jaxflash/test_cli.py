"""The command line, as a person uses it: in processes of its own where that is what counts."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxflash.cli import main

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "COLUMNS": "200"}
SMALL = ["--set", "model.n_layers=1", "--set", "model.d_model=32", "--seq-len", "32", "--batch-size", "8"]
SMALL += ["--eval-batches", "1"]


def jaxflash(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxflash.cli", *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=280, env=ENVIRONMENT)


@pytest.mark.slow
def test_train_on_a_mesh_continue_and_generate(tmp_path, monkeypatch, capfd):
    """Train and generate in processes of their own; what lies between in this one."""
    first = jaxflash(
        "train", "--preset", "tiny", *SMALL, "--mesh", "fsdp=4,tensor=2", "--cpu-devices", "8", "--steps", "3",
        "--schedule-steps", "5", "--out", "run", cwd=tmp_path,
    )  # fmt: skip
    assert first.returncode == 0, first.stderr
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["mesh"] == {"fsdp": 4, "tensor": 2} and config["model"]["n_layers"] == 1

    monkeypatch.chdir(tmp_path)
    main(["train", "--out", "run", "--steps", "5", "--mesh", "data=1"])
    assert "done at step 5" in capfd.readouterr().err
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "loss" in r] == [1, 2, 3, 4, 5]

    text = jaxflash(
        "generate", "--model", "run", "--prompt", "Now is", "--prompt", "O", "--max-new-tokens", "5", cwd=tmp_path
    )
    assert text.returncode == 0, text.stderr
    assert "Now is" in text.stdout and re.search(r"^O", text.stdout, re.MULTILINE)

    with pytest.raises(SystemExit) as refused:
        main(["train", "--out", "run", "--steps", "9", "--learning-rate", "1"])
    told = capfd.readouterr().err
    assert refused.value.code == 2 and "learning_rate: 0.003 there, 1.0 now" in told and "Traceback" not in told


@pytest.mark.parametrize(
    "args, message",
    [
        (["train", "--bathc-size", "3"], "Did you mean '--batch-size'?"),
        (["trian"], "invalid choice: 'trian'"),
        (["train", "--preset", "tinny"], "Did you mean 'tiny'?"),
        (["train", "--set", "model.nlayers=3"], "Did you mean 'n_layers'?"),
        (["train", "--set", "seq_len"], "must be KEY=VALUE"),
        (["demo", "--set", "steps=3"], "Use --steps 3"),
        (["train", "--seq-len", "many"], "'many' is not of type int"),
        (["train", "--data", "missing.txt"], "missing.txt"),
        (["train", "--data", "empty.txt"], "empty.txt"),
        (["train", "--mesh", "fsdp=16"], "JAX_NUM_CPU_DEVICES"),
        (["generate", "--model", "nothing", "--prompt", "x"], "'nothing' does not exist"),
        (["quantize", "--model", "nothing", "--out", "o", "--method", "gptk"], "Did you mean 'gptq'?"),
        (["quantize", "--model", "nothing", "--out", "o"], "method='gptq' without batches"),
        (["evaluate", "--model", "nothing", "--data", "missing.txt"], "missing.txt"),
        (["explain", "--preset", "1c"], "Did you mean '1b'?"),
    ],
)
def test_wrong_calls_end_in_one_paragraph(args, message, tmp_path, monkeypatch, capfd):
    (tmp_path / "empty.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(args)
    out, told = capfd.readouterr()
    assert ended.value.code == 2 and message in told, told
    assert not out and len(told.strip().splitlines()) <= 2


def test_a_wrong_call_of_the_process_has_its_status_and_no_traceback(tmp_path):
    result = jaxflash("train", "--data", "missing.txt", cwd=tmp_path)
    assert result.returncode == 2 and "missing.txt" in result.stderr
    assert not result.stdout and "Traceback" not in result.stderr and len(result.stderr.strip().splitlines()) <= 2


def test_an_interrupted_run_is_saved_and_says_so_in_its_exit_status(tmp_path):
    args = ["train", *SMALL, "--steps", "100000", "--out", "run", "--mesh", "data=1"]
    child = subprocess.Popen(
        [sys.executable, "-m", "jaxflash.cli", *args],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size) and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    stderr = child.communicate(timeout=60)[1]
    assert child.returncode == 128 + signal.SIGINT, stderr
    step = int(re.findall(r"stopped by SIGINT at step (\d+)", stderr)[0])
    assert (tmp_path / "run" / "checkpoints" / str(step)).is_dir() and "Traceback" not in stderr


def test_explain_names_the_choice_and_the_reasons(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    main(["explain", "--preset", "1b", "--packing", "documents"])
    shown = capsys.readouterr().out
    assert re.search(r"> xla_chunked +chosen", shown)
    assert re.search(r"cudnn +needs a CUDA device", shown)


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert not ended.value.code
    shown = capsys.readouterr().out
    for command in ("demo", "train", "generate", "evaluate", "quantize", "explain"):
        assert command in shown

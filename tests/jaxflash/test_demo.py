"""The demo keeps its promises; the whole of it is slow."""

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from jaxflash.demo import RESUME_STEPS, DemoError, demo, demo_config


def small_demo(tmp_path):
    changes = {"model.n_layers": 1, "model.d_model": 64, "seq_len": 32, "batch_size": 4, "eval_batches": 1}
    return demo_config(tmp_path / "demo", steps=6, mesh={"data": 1}, **changes)


def test_the_flow_and_that_an_unlearnt_model_is_called_so(tmp_path):
    config = small_demo(tmp_path)
    console = Console(file=io.StringIO(), width=120)
    with pytest.raises(DemoError, match="not below the bigram entropy 2.456"):
        demo(config, console)
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    for text in ("before training", "after step 6", "resumed from", "step 7", "unigram entropy", "3.319"):
        assert text in shown
    assert (tmp_path / "demo" / "loss.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=f"holds a demo at step {6 + RESUME_STEPS} already"):
        demo(config, console)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_demo_learns_more_than_pairs_of_bytes(tmp_path):
    """As a user starts it: exit status 0 says that it did. With XLA's own flags, under which its steps run faster than
    under those that make tests compile fast. At step 80 its validation loss is 2.30."""
    command = [sys.executable, "-m", "jaxflash.cli", "demo", "--steps", "60", "--out", str(tmp_path / "demo")]
    command += ["--set", "eval_batches=4"]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "demo" / "loss.png").exists()

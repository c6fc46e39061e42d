"""Two processes of four CPU devices train as one of eight does, stop together and leave one folder."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from jaxflash.config import to_json
from jaxflash.train import train
from tests.processes import run_together, script

SCRIPT = """
import os, signal, sys
import jax, jaxflash
from jaxflash.config import from_json, override
jaxflash.use_cpu_devices(4)
address, index, recipe, out, steps, stop_at = sys.argv[1:]
jax.distributed.initialize(address, num_processes=2, process_id=int(index), initialization_timeout=60)
config = override(from_json(open(recipe).read()), {"out": out, "steps": int(steps)})

def stop(record):  # only the second process hears the signal
    if index == "1" and record["step"] == int(stop_at):
        os.kill(os.getpid(), signal.SIGTERM)

run = jaxflash.train(config, quiet=True, on_record=stop)
print("END", int(run.state.step), run.stopped, flush=True)
"""


def run_two(recipe: Path, out: Path, *, steps: int, stop_at: int = 0) -> list[str]:
    printed = run_together(script(SCRIPT, recipe, out, steps, stop_at), timeout=120, writes=out)
    return [next(line for line in out.splitlines() if line.startswith("END")) for out in printed]


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_two_processes_train_stop_and_resume_as_one(small, tmp_path):
    config = dataclasses.replace(
        small, mesh={"data": 2, "fsdp": 2, "tensor": 2}, schedule_steps=8, steps=8, eval_every=4
    )
    recipe, out = tmp_path / "recipe.json", tmp_path / "run"
    recipe.write_text(to_json(config))

    ends = run_two(recipe, out, steps=8, stop_at=3)
    step = int(ends[0].split()[1])
    assert 3 < step < 8 and ends == [f"END {step} a signal to another process", f"END {step} SIGTERM"]
    assert run_two(recipe, out, steps=8) == ["END 8 None"] * 2

    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    whole = train(config, quiet=True)
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 9))
    np.testing.assert_allclose([r["loss"] for r in records if "loss" in r], whole.curve()[1], rtol=0, atol=1e-5)
    # And one process alone, on another mesh, takes the folder over.
    alone = train(dataclasses.replace(config, out=str(out), mesh={"fsdp": 8}), quiet=True)
    assert int(alone.state.step) == 8

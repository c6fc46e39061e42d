"""Several processes: started, joined, stopped and heard; two of two devices are one of four."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import unittest.mock
from pathlib import Path

import jax
import numpy as np
import pytest
from jax._src import distributed, xla_bridge
from jax._src.clusters import mpi4py_cluster

from jaxflash import launch
from jaxflash.cli import main
from jaxflash.config import TrainConfig, train_preset
from jaxflash.train import train
from tests.processes import run_together

ROOT = Path(__file__).parents[2]
FLAGS = ["--set", "model.n_layers=1", "--set", "model.d_model=32", "--seq-len", "32", "--batch-size", "8"]
FLAGS += ["--accumulate", "2", "--mesh", "data=2,fsdp=2", "--schedule-steps", "6", "--eval-batches", "2"]
COMMAND = [sys.executable, "-m", "jaxflash.cli", "launch"]


def python(code: str, piped: bool = False) -> subprocess.Popen[str]:
    out = subprocess.PIPE if piped else None
    return subprocess.Popen([sys.executable, "-c", code], stdout=out, stderr=out, text=True)


def test_the_first_failure_ends_the_others_and_is_the_status(monkeypatch):
    monkeypatch.setattr(launch, "_GRACE", 0.2)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)"
    members = [python("import time; time.sleep(100)"), python("raise SystemExit(3)"), python(deaf)]
    began = time.monotonic()
    with launch._Group(members) as group:
        assert group.wait() == 3
    assert time.monotonic() - began < 50
    # The first by SIGTERM; the last by SIGKILL, or by SIGTERM before it had closed its ears.
    assert members[0].returncode == -signal.SIGTERM and members[2].returncode in (-signal.SIGKILL, -signal.SIGTERM)


def test_a_killed_process_counts_as_failed_and_success_is_zero():
    with launch._Group([python("import os; os.kill(os.getpid(), 9)")]) as group:
        assert group.wait() == 128 + signal.SIGKILL
    with launch._Group([python(""), python("")]) as group:
        assert group.wait() == 0


def test_a_signal_is_passed_on_once_and_every_process_may_end_in_peace(tmp_path):
    """The slower one is not ended because the faster one has stopped with 130."""
    code = f"""if True:
        import pathlib, signal, sys, time
        asked = []
        signal.signal(signal.SIGINT, lambda *_: asked.append(1))
        pathlib.Path({str(tmp_path)!r}, sys.argv[0] + "INDEX").touch()
        while not asked:
            time.sleep(0.01)
        time.sleep(INDEX)
        sys.exit(130 if asked == [1] else 1)
    """
    before = signal.getsignal(signal.SIGINT)
    members = [python(code.replace("INDEX", str(i))) for i in range(2)]

    def interrupt():
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    with launch._Group(members) as group:
        threading.Thread(target=interrupt).start()
        assert group.wait() == 130
    assert [m.returncode for m in members] == [130, 130] and signal.getsignal(signal.SIGINT) is before


def test_lines_of_other_processes_carry_their_number(capsys):
    talk = "import sys; print('out'); print('half', end=''); print('err', file=sys.stderr)"
    with launch._Group([python(""), python(talk, piped=True)]) as group:
        assert group.wait() == 0
    out, err = capsys.readouterr()
    assert out == "[1] out\n[1] half\n" and err == "[1] err\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "2", "train", "--bathc-size", "3"], "Did you mean '--batch-size'?"),
        (["-n", "2", "train", "--preset", "tinny"], "Did you mean 'tiny'?"),
        (["-n", "2", "inspect", "runs/a"], "'inspect' runs in one process"),
        (["-n", "0", "train"], "processes=0 with devices=1 each"),
        (["-n", "2", "--process", "0", "train"], "-n 2 starts all processes here"),
        (["--coordinator", "localhost:1", "train"], "coordinator='localhost:1', processes=None"),
        (["--devices", "0", "train"], r"devices=\[0\] - a process by hand needs the first three"),
        (["--devices", "a,b", "train"], "'a,b' must be numbers of GPUs, for instance 0,1. See"),
        (["--devices-per-process", "2", "train"], "--devices-per-process is for -n"),
        (["train"], "found no others: .* or with -n 2"),
    ],
)
def test_a_wrong_call_is_told_before_a_process_starts(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("started a process"))
    with pytest.raises(SystemExit) as error:
        main(["launch", *arguments])
    said = capsys.readouterr().err
    assert error.value.code == 2 and re.search(message, said), said


# What `srun` and `mpirun` set for the third of four processes, the first on its host.
SLURM = {"SLURM_JOB_ID": "4097", "SLURM_STEP_NODELIST": "node[007,009-010],other2", "SLURM_NTASKS": "4"}
SLURM |= {"SLURM_PROCID": "2", "SLURM_LOCALID": "0"}
RANK = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
OPEN_MPI_4 = RANK | {"OMPI_VERSION": "4.1.6", "OMPI_MCA_orte_hnp_uri": "8192.0;tcp://10.96.0.1,10.148.0.1:34911"}
OPEN_MPI_5 = RANK | {"OMPI_VERSION": "5.0.3"}


@pytest.fixture
def detached(monkeypatch):
    """What JAX would start and connect, with no job around; its state and its choice of GPUs are put back."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "JAX_COORDINATOR"))]:
        monkeypatch.delenv(name)
    runtime = unittest.mock.MagicMock()
    monkeypatch.setattr(distributed, "_jax", runtime)
    monkeypatch.setattr(distributed, "global_state", distributed.State())
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)
    yield runtime
    for name in ("jax_cuda_visible_devices", "jax_rocm_visible_devices"):
        jax.config.update(name, "all")


@pytest.mark.parametrize(
    ("environment", "coordinator"), [(SLURM, "node007:61441"), (OPEN_MPI_4, "10.96.0.1:61442")], ids=["srun", "mpirun"]
)
def test_a_task_knows_its_place(environment, coordinator, monkeypatch, detached):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    ran = []
    launch.join(lambda: ran.append(distributed.global_state.num_processes))
    assert ran == [4]
    assert detached.get_distributed_runtime_client.call_args.args[:2] == (coordinator, 2)
    assert detached.get_distributed_runtime_client.return_value.connect.call_count == 1
    assert detached.get_distributed_runtime_service.call_count == 0  # the first process's
    assert jax.config.read("jax_cuda_visible_devices") == "0"  # one GPU of the host to each of its tasks


def test_open_mpi_5_without_mpi4py_is_told(monkeypatch, detached):
    for name, value in OPEN_MPI_5.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(mpi4py_cluster, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"Open MPI 5 or newer requires mpi4py.*--coordinator, --processes"):
        launch.join(lambda: pytest.fail("ran"))


def config(out: Path, steps: int) -> TrainConfig:
    sizes = {"model.n_layers": 1, "model.d_model": 32, "seq_len": 32, "batch_size": 8, "accumulate": 2}
    run = train_preset("tiny", **sizes, schedule_steps=6, eval_batches=2, steps=steps, out=str(out))
    return dataclasses.replace(run, mesh={"data": 2, "fsdp": 2})


def losses(out: Path) -> list[float]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [r["loss"] for r in rows if "loss" in r] + [rows[-1]["validation_loss"]]


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_two_processes_and_one_take_over_from_each_other(tmp_path):
    """Started by `launch -n 2`, and as two tasks of a SLURM job, which JAX reads from their environment."""
    whole, first, second = (tmp_path / name for name in ("whole", "first", "second"))
    train(config(whole, 4), quiet=True)
    train(config(second, 2), quiet=True)
    two = [*COMMAND, "-n", "2", "--devices-per-process", "2", "train", *FLAGS, "--steps", "2", "--out", str(first)]
    run_together(lambda _: [two], timeout=150, writes=first)
    train(config(first, 4), quiet=True)
    job = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    task = [*COMMAND, "train", *FLAGS, "--cpu-devices", "2", "--steps", "4", "--out", str(second)]
    # The tasks learn the coordinator's port as JAX reads it, from the environment.
    run_together(
        lambda port: [["env", f"JAX_COORDINATOR_PORT={port}", f"SLURM_PROCID={i}", *task] for i in range(2)],
        timeout=150,
        writes=second,
        env=job,
    )
    np.testing.assert_allclose(losses(first), losses(whole), rtol=1e-5)
    np.testing.assert_allclose(losses(second), losses(whole), rtol=1e-5)

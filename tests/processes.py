"""The processes of one JAX program: started together, and none left waiting for another."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRIES = 3
PATIENCE = 20.0  # seconds for the others, once one has failed


def script(code: str, *args: object) -> Callable[[int], list[list[str]]]:
    """Two processes of `code`, whose arguments are the coordinator's address, the process's index, and `args`."""
    return lambda port: [
        [sys.executable, "-c", textwrap.dedent(code), f"localhost:{port}", str(index), *map(str, args)]
        for index in range(2)
    ]


def run_together(
    commands: Callable[[int], Sequence[Sequence[str]]],
    *,
    timeout: float,
    writes: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> list[str]:
    """What each printed; all must end with status 0 within `timeout` seconds, or every error stream is shown.

    Gloo, which joins processes on a CPU, at times never ends connecting the ranks of one process among themselves and
    to others (2026-11-30, jaxlib 0.11.2, two cores, four devices a process: about 1 run in 60 where four such programs
    run at a time; `gloo::transport::tcp::Pair::waitUntilConnected` in gdb). Where they are late and a clique is seen
    not to be connected, they start again, at most twice; whoever else is late fails.

    Args:
        commands: a free port -> a command for each process.
        writes: a folder that they write to: a second try finds it as it was.
        env: what their environment has beside this process's.
    """
    tries = 0
    while True:
        tries += 1
        with tempfile.TemporaryDirectory() as temporary:
            logs = Path(temporary)
            if writes is not None and writes.exists():
                shutil.copytree(writes, logs / "before")
            ended = _run(commands(_free_port()), logs, timeout, env)
            out, err = ([path.read_text(errors="replace") for path in sorted(logs.glob(k))] for k in ("*.out", "*.err"))
            if ended == [0] * len(ended):
                return out
            late = not any(ended)
            if not late or not half_connected(out) or tries == TRIES:
                shown = "".join(f"\n--- process {i}: {ended[i]}\n{err[i][-3000:]}" for i in range(len(ended)))
                raise AssertionError(f"{'late' if late else 'failed'} ({timeout=}), status of each: {ended}{shown}")
            warnings.warn(f"Gloo did not connect all ranks; started again.\n{''.join(out)}", stacklevel=2)
            if writes is not None:
                shutil.rmtree(writes, ignore_errors=True)
                if (logs / "before").exists():
                    shutil.copytree(logs / "before", writes)


def _run(
    commands: Sequence[Sequence[str]], logs: Path, timeout: float, env: Mapping[str, str] | None
) -> list[int | None]:
    """Each one's exit status; None: it was still running, and has been killed with all its children."""
    children = []
    for i, command in enumerate(commands):
        with (logs / f"{i}.out").open("w") as out, (logs / f"{i}.err").open("w") as err:
            # A session of its own, so that what it starts can be killed with it.
            children.append(
                subprocess.Popen(
                    command, cwd=ROOT, stdout=out, stderr=err, env=os.environ | (env or {}), start_new_session=True
                )
            )
    deadline = time.monotonic() + timeout
    try:
        while time.monotonic() < deadline and any(child.poll() is None for child in children):
            if any(child.returncode for child in children):  # the others may wait for it for ever
                deadline = min(deadline, time.monotonic() + PATIENCE)
            time.sleep(0.05)
        return [child.poll() for child in children]
    finally:
        for child in children:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def half_connected(printed: Sequence[str]) -> bool:
    """Whether, of a clique of N + 1 ranks, some have said that they are connected to N others and some have not."""
    said = Counter(map(int, re.findall(r"is connected to (\d+) peer ranks", "".join(printed))))
    return any(count % (peers + 1) for peers, count in said.items())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]

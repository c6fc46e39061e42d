"""One run in several processes, started here, by SLURM or Open MPI, or one by one; the only place that joins them.

jaxflash launch -n 2 train ...                                           two processes on this machine
srun jaxflash launch train ...                                           the tasks of a job; mpirun likewise
jaxflash launch --coordinator HOST:PORT --processes 2 --process 0 train  this process is the first of two
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import FrameType, TracebackType
from typing import Any

import jax

from sharding.mesh import use_cpu_devices

_GRACE = 10.0  # seconds from SIGTERM to SIGKILL, for processes that wait for one that is gone
_LOOPBACK = "127.0.0.1"


def start(arguments: Sequence[str], *, processes: int, devices: int) -> int:
    """Runs `jaxflash ARGUMENTS` in `processes` local processes that are one JAX job, and gives their exit status.

    Process 0 has this process's stdout and stderr, so that its bar is live; the lines of process i come after an "[i]".
    SIGINT, SIGTERM and SIGHUP are passed on: the first lets a run save and end, a second one interrupts. When a
    process fails the others are ended, and its status is the result; 128 + n for one that signal n killed.

    Args:
      arguments: a command line without the program's name.
      processes: how many.
      devices: of each; process i has those from number `i * devices` on. Without a GPU, parts of the CPU.

    Raises:
      ValueError: fewer than one process or device.
    """
    if processes < 1 or devices < 1:
        raise ValueError(f"launch: {processes=} with {devices=} each - both must be at least 1.")
    address = f"{_LOOPBACK}:{_free_port()}"
    group = _Group([_child(address, arguments, i, processes, devices) for i in range(processes)])
    with group:
        return group.wait()


def join(
    run: Callable[[], None],
    *,
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    devices: Sequence[int] | None = None,
) -> None:
    """Makes this process one of a JAX job, before any device is touched, and calls `run`.

    Args:
      run: raises SystemExit with the status of this process, or returns.
      coordinator, processes, process: address of process 0, how many there are, and which this is. All of them, or none
        in a task of SLURM or Open MPI (version 5 with mpi4py), where JAX knows them and gives every task of a host one
        of its GPUs.
      devices: numbers of the GPUs that this process uses (None: all); without a GPU the CPU is split in as many.

    Raises:
      ValueError: some but not all are given, or the processes did not find each other.
    """
    by_hand = (coordinator, processes, process)
    if None in by_hand and (any(x is not None for x in by_hand) or devices is not None):
        raise ValueError(
            f"launch: {coordinator=}, {processes=}, {process=}, {devices=} - a process by hand needs the first three. "
            "Give them all; or none, in a task of SLURM or Open MPI; or -n 2, to start processes here."
        )
    if devices is not None and len(devices) > 1:
        use_cpu_devices(len(devices))
    try:
        if coordinator is None:
            jax.distributed.initialize()
        else:
            # Everybody on the network could write to a service that listens on every interface.
            local = coordinator.rpartition(":")[0] in (_LOOPBACK, "localhost")
            jax.distributed.initialize(
                coordinator, processes, process, devices, "deactivate",
                coordinator_bind_address=coordinator if local else None,
            )  # fmt: skip
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"launch: this process found no others: {error} Start it with srun or mpirun; or with -n 2, for two "
            "processes here; or with --coordinator, --processes and --process."
        ) from error
    with _LeavesAtOnce():
        run()


class _LeavesAtOnce:
    """A process that fails ends here: on its way out, JAX would wait minutes for the others, and they for it."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or kind is None:
            return
        code = error.code if isinstance(error, SystemExit) else 1
        if code is None or (isinstance(code, int) and (code == 0 or code > 128)):
            return  # done, or stopped by a signal, together
        if not isinstance(error, SystemExit):
            sys.excepthook(kind, error, trace)
        elif not isinstance(code, int):
            print(code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


class _Group:
    """The processes of `start`. Entered, it passes signals on; left, none of them lives."""

    def __init__(self, members: Sequence[subprocess.Popen[str]]):
        self._members = members
        self._signals = 0
        self._deadline: float | None = None
        self._previous = {}
        self._readers = [
            threading.Thread(target=_forward, args=(pipe, to, f"[{i}] "), daemon=True)
            for i, member in enumerate(members)
            for pipe, to in ((member.stdout, sys.stdout), (member.stderr, sys.stderr))
            if pipe is not None
        ]

    def __enter__(self) -> "_Group":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._previous[number] = signal.signal(number, self._pass_on)
        for reader in self._readers:
            reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._send(signal.SIGKILL)
        for reader in self._readers:
            reader.join()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def wait(self) -> int:
        """The status of the first that failed; of one that was stopped and ended well; or 0."""
        failed, status, ended = 0, 0, set()
        while len(ended) < len(self._members):
            for i, member in enumerate(self._members):
                code = member.poll()
                if code is None or i in ended:
                    continue
                ended.add(i)
                stopped = code > 128  # a run that a signal ended, saved: the others are about to end too
                status = status or code
                if code and not stopped and not failed:
                    failed = code if code > 0 else 128 - code
                    self._send(signal.SIGTERM)
                    self._deadline = time.monotonic() + _GRACE
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._send(signal.SIGKILL)
            time.sleep(0.05)
        return failed or status

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        self._send(signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number))
        if self._signals > 1:
            self._deadline = time.monotonic() + _GRACE

    def _send(self, number: signal.Signals) -> None:
        for member in self._members:
            if member.poll() is None:
                member.send_signal(number)


def _child(address: str, arguments: Sequence[str], index: int, count: int, devices: int) -> subprocess.Popen[str]:
    numbers = ",".join(str(index * devices + i) for i in range(devices))
    place = ["--coordinator", address, "--processes", str(count), "--process", str(index), "--devices", numbers]
    return subprocess.Popen(
        [sys.executable, "-m", "jaxflash.cli", "launch", *place, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=None if index == 0 else subprocess.PIPE,
        stderr=None if index == 0 else subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # a terminal's Ctrl-C reaches `start` alone, which passes it on once
    )


def _forward(pipe: Iterable[str], to: Any, prefix: str) -> None:
    for line in pipe:
        to.write(prefix + line.rstrip("\n") + "\n")
        to.flush()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind((_LOOPBACK, 0))
        return free.getsockname()[1]

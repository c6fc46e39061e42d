"""Calls in processes of their own, which may crash or hang without taking the caller with them."""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any


@dataclasses.dataclass(frozen=True)
class Lost:
    """A call that gave no result, and why."""

    reason: str


def outcomes(
    function: Callable[[Any], Any],
    jobs: Sequence[Any],
    *,
    begin: Callable[..., None],
    arguments: tuple[Any, ...] = (),
    workers: int,
    timeout: float,
) -> Iterator[tuple[int, Any]]:
    """(number of the job, function(job)) as they come, or a `Lost` in the place of a result.

    Args:
      function, begin: importable by name, for a fresh interpreter does so; begin(*arguments) runs once in each process.
      workers: how many processes at a time. They are used again, but for those that died of an exception or a crash.
      timeout: seconds after which a call is given up, and its process killed.
    """
    waiting, idle = deque(enumerate(jobs)), []
    busy: dict[Connection, tuple[_Worker, int, float]] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                worker = idle.pop() if idle else _Worker(function, begin, arguments)
                number, job = waiting.popleft()
                worker.ask(job)
                busy[worker.connection] = worker, number, time.monotonic() + timeout
            first = min(busy, key=lambda connection: busy[connection][2])
            answered = wait(list(busy), max(busy[first][2] - time.monotonic(), 0.0))
            for connection in answered or [first]:
                worker, number, _ = busy.pop(connection)  # pyright: ignore[reportArgumentType]
                outcome = worker.answer() if answered else Lost(f"no result in {timeout:g} s")
                if isinstance(outcome, Lost):
                    worker.kill()
                else:
                    idle.append(worker)
                yield number, outcome
    finally:
        for worker in (*idle, *(worker for worker, _, _ in busy.values())):
            worker.kill()


class _Worker:
    def __init__(self, function: Callable[[Any], Any], begin: Callable[..., None], arguments: tuple[Any, ...]):
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads may deadlock
        self.words = tempfile.NamedTemporaryFile()
        self.connection, theirs = context.Pipe()
        target = theirs, self.words.name, function, begin, arguments
        self.process = context.Process(target=_serve, args=target, daemon=True)
        self.process.start()
        theirs.close()  # so that the end of the process is the end of the pipe

    def ask(self, job: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has died, which the answer will say
            self.connection.send(job)

    def answer(self) -> Any:
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            words = self.words.read().decode(errors="replace").strip()
            return Lost(f"its process ended with exit code {self.process.exitcode}: {words[-2000:]}")

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.words.close()


def _serve(
    connection: Connection, words: str, function: Callable[[Any], Any], begin: Callable[..., None], arguments: tuple
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the caller, who ends this process
    file = os.open(words, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 2)  # by number: what ends a process in C++ knows no sys.stderr
    begin(*arguments)
    with contextlib.suppress(EOFError):  # the caller is gone
        while True:
            connection.send(function(connection.recv()))

"""Calls in processes of their own, which may crash, hang or be killed without taking the caller with them."""

import contextlib
import dataclasses
import multiprocessing
import signal
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
      function, begin: module-level, for a fresh interpreter imports them; begin(*arguments) runs once in each process.
      workers: how many processes at a time. They are used again, but for those that died.
      timeout: seconds after which a call is given up, and its process killed.
    """
    waiting, idle, busy = deque(enumerate(jobs)), [], {}
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                worker = idle.pop() if idle else _Worker(function, begin, arguments)
                number, job = waiting.popleft()
                with contextlib.suppress(OSError):  # it has died: so its outcome will say
                    worker.connection.send(job)
                busy[worker.connection] = worker, number, time.monotonic() + timeout
            patience = min(deadline for _, _, deadline in busy.values()) - time.monotonic()
            answered = wait(list(busy), max(patience, 0.0))
            late = [connection for connection, (_, _, deadline) in busy.items() if deadline <= time.monotonic()]
            for connection in answered or late:
                worker, number, _ = busy.pop(connection)
                outcome = worker.outcome() if answered else Lost(f"no result in {timeout:g} s")
                if worker.process.is_alive() and answered:
                    idle.append(worker)
                else:
                    worker.kill()
                yield number, outcome
    finally:
        for worker in (*idle, *(worker for worker, _, _ in busy.values())):
            worker.kill()


class _Worker:
    def __init__(self, function: Callable[[Any], Any], begin: Callable[..., None], arguments: tuple[Any, ...]):
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads may deadlock
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, function, begin, arguments), daemon=True)
        self.process.start()
        theirs.close()  # so that the end of the process is the end of the pipe

    def outcome(self) -> Any:
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            return Lost(f"its process ended with exit code {self.process.exitcode}")

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _serve(
    connection: Connection, function: Callable[[Any], Any], begin: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller's, who will kill this process
    begin(*arguments)
    while True:
        try:
            job = connection.recv()
        except EOFError:  # the caller is gone
            return
        try:
            result = function(job)
        except Exception as error:
            result = Lost(f"{type(error).__name__}: {error}")
        connection.send(result)

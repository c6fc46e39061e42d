"""A run of the interpreter as its threads see it: who waits, what failed first, and whether anything still moves."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any


class Deadlock(RuntimeError):
    """Threads wait, and nothing has happened for a while."""


class Watch:
    """Records the first failure and every race state of a run, and fails the run when it stands still."""

    def __init__(self, idle: float):
        self.idle = idle
        self.failure: Exception | None = None
        self.races: list[Any] = []
        self.last = time.monotonic()
        self._waiting: dict[int, str] = {}
        self._memory: Any = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def alive(self, shared_memory: Any) -> None:
        self._memory, self.last = shared_memory, time.monotonic()

    @contextlib.contextmanager
    def waiting(self, thread: Any, what: str) -> Iterator[None]:
        me = threading.get_ident()
        self._waiting[me] = f"{thread}: {what}"
        try:
            yield
        finally:
            self._waiting.pop(me, None)
            self.last = time.monotonic()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        _running.append(self)
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()
            _running.remove(self)

    def _run(self) -> None:
        while not self._stop.wait(min(self.idle / 4, 1.0)):
            waiting = sorted(self._waiting.copy().values())
            if waiting and time.monotonic() - self.last > self.idle:
                error = Deadlock(f"nothing happened for {self.idle} s while these wait:\n" + "\n".join(waiting))
                self._memory.set_failed(error, None, top_level=False)  # wakes them


_running: list[Watch] = []


def watch() -> Watch:
    """That of the run whose threads ask."""
    return _running[-1]

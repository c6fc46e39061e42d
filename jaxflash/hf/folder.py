"""New folders that appear whole or not at all, made by the first of several processes."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def check_room(path: Path, size: int) -> None:
    """Whether a new folder `path` of `size` bytes can be made: the first process looks, and all of them know.

    What a killed process has left of the same folder is removed first.

    Raises:
      FileExistsError: `path` exists and is not an empty folder, or one that cannot be replaced.
      OSError: less than `size` bytes are free there, or nothing can be made there; or the first process found a fault.
    """
    path = path.expanduser().resolve()
    with first_process(f"make {str(path)!r}"):
        if jax.process_index() == 0:
            _remove_dead(path)
            _check_room(path, size)


def _check_room(path: Path, size: int) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir()) or path.is_mount() or path == Path.cwd()):
        raise FileExistsError(
            f"save: {str(path)!r} exists - nothing is written over, and neither a mount point nor the current folder "
            "is replaced. Choose another path."
        )
    disk = next(parent for parent in path.parents if parent.exists())
    if not disk.is_dir() or not os.access(disk, os.W_OK | os.X_OK):
        fault, kind = ("may not be written to", PermissionError) if disk.is_dir() else ("is a file", NotADirectoryError)
        raise kind(f"save: {str(path)!r} cannot be made: {str(disk)!r} {fault}. Choose another path.")
    free = shutil.disk_usage(disk).free
    if free < size:
        raise OSError(f"save: {str(disk)!r} has {free=} bytes, {size} are needed. Make room, or choose another.")


@contextlib.contextmanager
def new_folder(path: Path, size: int) -> Iterator[Path | None]:
    """A hidden folder beside `path` that becomes `path` on leaving without an error; None in all but the first process.

    A kill leaves it behind; `check_room` removes it before the next one is made.

    What is done in it must fail in all processes or in none: each wraps what it alone does in `first_process`.

    Raises what `check_room` does.
    """
    path = path.expanduser().resolve()
    check_room(path, size)
    partial = held = None
    try:
        with first_process(f"make a folder beside {str(path)!r}"):
            if jax.process_index() == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
                partial, held = _make_partial(path)
        yield partial
        with first_process(f"finish {str(path)!r}"):
            if partial is not None:
                for file in partial.rglob("*"):
                    _sync(file)
                partial.chmod(0o777 & ~_umask())
                os.rename(partial, path)
                _sync(path.parent)
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
        if held is not None:
            os.close(held)


def _make_partial(path: Path) -> tuple[Path, int]:
    """A new folder beside `path`, and the open descriptor whose lock says that this process is alive."""
    with _alone_in(path.parent):
        partial = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial"))
        held = os.open(partial, os.O_RDONLY)
        _lock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return partial, held


def _remove_dead(path: Path) -> None:
    """Removes the folders that processes which live no more have left beside `path`: nobody holds their locks.

    Where a file system has no locks, nothing can be known of other writers, and nothing is removed.
    """
    if not path.parent.is_dir():
        return
    with _alone_in(path.parent) as locks:
        for other in path.parent.iterdir() if locks else ():
            if re.fullmatch(rf"\.{re.escape(path.name)}\.[^.]+\.partial", other.name):
                _remove_if_dead(other)


@contextlib.contextmanager
def _alone_in(parent: Path) -> Iterator[bool]:
    """No two processes make or remove partial folders here at a time, so none is found between making and locking."""
    held = os.open(parent, os.O_RDONLY)
    try:
        yield _lock(held, fcntl.LOCK_EX)
    finally:
        os.close(held)


def _remove_if_dead(folder: Path) -> None:
    if folder.is_symlink() or not folder.is_dir() or folder.stat().st_uid != os.getuid():
        return
    held = os.open(folder, os.O_RDONLY)
    try:
        if _lock(held, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(held)


def _lock(descriptor: int, how: int) -> bool:
    """Whether the lock was got: another has it, or the file system has none, otherwise."""
    try:
        fcntl.flock(descriptor, how)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def first_process(task: str) -> Iterator[None]:
    """Around what the first process does and the others wait for: if it raises there, it raises in all of them."""
    done = False
    try:
        yield
        done = True
    finally:  # also on the way out with an error: the others are waiting
        if jax.process_count() > 1:
            done = bool(multihost_utils.broadcast_one_to_all(np.int32(done)))
    if not done:
        raise OSError(f"save: the first process could not {task} - its own error says why. Nothing was written.")


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes a JSON object as a person would read it."""
    path.write_text(json.dumps(values, indent=2) + "\n")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

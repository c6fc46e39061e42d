"""What killed writers leave is removed by the next one, and nothing of a living one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxflash.hf import folder as module
from jaxflash.hf.folder import check_room, new_folder

ROOT = Path(__file__).parents[3]
WRITER = """
import sys
from pathlib import Path
from jaxflash.hf.folder import new_folder
with new_folder(Path(sys.argv[1]), 0) as folder:
    (folder / "half").write_text("x")
    print(folder, flush=True)
    sys.stdin.readline()
"""


def writer(path: Path):
    """(a process that writes `path` until it gets a line or a signal, its partial folder)."""
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    return child, Path(child.stdout.readline().strip())


def names(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def test_a_dead_writer_s_folder_goes_and_a_living_one_s_stays(tmp_path):
    """The lock is what tells: it lives as long as its process, however that ends."""
    child, partial = writer(tmp_path / "x")
    try:
        assert partial.parent == tmp_path and partial.suffix == ".partial"
        with new_folder(tmp_path / "x", 0) as mine:
            assert mine is not None and names(tmp_path) == {partial.name, mine.name}
            check_room(tmp_path / "x", 0)  # one that asks does not take its own process's folder for a dead one's
            assert names(tmp_path) == {partial.name, mine.name}
        assert names(tmp_path) == {partial.name, "x"} and (partial / "half").exists()
        (tmp_path / "x").rmdir()
        child.send_signal(signal.SIGKILL)
        child.wait(60)
        assert partial.is_dir()
        with new_folder(tmp_path / "y", 0):  # another destination
            assert partial.is_dir()
        with new_folder(tmp_path / "x", 0):
            assert not partial.exists()
        assert names(tmp_path) == {"x", "y"}
    finally:
        child.kill()


def test_only_folders_of_that_name_are_removed(tmp_path):
    for name in (
        ".x.abc.partial",
        ".x.y.abc.partial",
        ".y.abc.partial",
        ".x.abc.part",
        "x.abc.partial",
        ".xz.abc.partial",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / ".x.file.partial").write_text("of write_atomically")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".x.link.partial").symlink_to(tmp_path / "elsewhere")
    before = names(tmp_path)
    check_room(tmp_path / "x", 0)
    assert before - names(tmp_path) == {".x.abc.partial"} and (tmp_path / "elsewhere").is_dir()


def test_a_name_is_no_pattern(tmp_path):
    (tmp_path / ".a.abc.partial").mkdir()
    check_room(tmp_path / "[a-z]", 0)
    check_room(tmp_path / "?", 0)
    assert names(tmp_path) == {".a.abc.partial"}


def test_where_there_are_no_locks_nothing_is_removed(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError("Function not implemented")

    (tmp_path / ".x.abc.partial").mkdir()
    monkeypatch.setattr(module.fcntl, "flock", fails)
    with new_folder(tmp_path / "x", 0) as folder:
        assert folder is not None
        (folder / "it").write_text("x")
    assert names(tmp_path) == {".x.abc.partial", "x"}


def test_locks_and_descriptors_are_given_back(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for name in ("a", "b"):
        with new_folder(tmp_path / name, 0):
            pass
    with pytest.raises(RuntimeError), new_folder(tmp_path / "c", 0):
        raise RuntimeError
    assert len(os.listdir("/proc/self/fd")) == before and names(tmp_path) == {"a", "b"}

"""run_together: a failure or a late end is told with what each process said; only Gloo's own hang starts again."""

import time

import pytest

from tests.processes import half_connected, run_together, script

# The first time, one process of a clique of four has not heard from the others; the second time all end.
GLOO = """
    import pathlib, sys, time
    marker, folder, index = pathlib.Path(sys.argv[3]), pathlib.Path(sys.argv[4]), sys.argv[2]
    print("[Gloo] Rank 0 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3", flush=True)
    if index == "1":
        print(sorted(path.name for path in folder.iterdir()))
        if not marker.exists():
            marker.touch()
            folder.joinpath("half").touch()
            time.sleep(100)
"""


def test_what_gloo_left_unconnected_starts_again_in_the_folder_as_it_was(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    folder.joinpath("before").touch()
    with pytest.warns(UserWarning, match="Gloo did not connect"):
        printed = run_together(script(GLOO, tmp_path / "marker", folder), timeout=2, writes=folder)
    assert printed[1].endswith("['before']\n") and [path.name for path in folder.iterdir()] == ["before"]


def test_a_failure_is_told_and_ends_the_others(monkeypatch):
    monkeypatch.setattr("tests.processes.PATIENCE", 0.2)
    code = "import sys, time\nif sys.argv[2] == '0':\n  raise SystemExit('the reason')\ntime.sleep(100)"
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"failed.*\[1, None\](.|\n)*the reason"):
        run_together(script(code), timeout=50)
    assert time.monotonic() - began < 20


def test_who_is_late_for_another_reason_fails():
    with pytest.raises(AssertionError, match=r"late.*\[0, None\]"):
        run_together(script("import sys, time; time.sleep(100 * int(sys.argv[2]))"), timeout=1)


def test_half_connected():
    said = "[Gloo] Rank {} is connected to {} peer ranks. Expected number of connected peer ranks is : {}\n".format
    pair, four = [said(i, 1, 1) for i in range(2)], [said(i, 3, 3) for i in range(4)]
    assert not half_connected([]) and not half_connected(["".join(pair + four), "".join(pair)])
    assert half_connected(["".join(pair + four[:3])]) and half_connected([pair[0]])

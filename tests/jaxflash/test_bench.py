"""A measured row: what it holds, which steps it times and traces, and what the parser makes of a profile."""

import json
import re
from pathlib import Path

import jax
import pytest

from jaxflash import bench
from jaxflash.config import override, train_preset
from jaxflash.train import train

SMALL = {"model.n_layers": 3, "model.d_model": 32, "model.d_ff": 64, "seq_len": 64, "batch_size": 4, "loss_chunk": 32}


def plane(name: str, lines: dict[str, list[tuple[str, int, int]]], stats: str = "") -> str:
    """An XPlane as text: per line the (name, start, duration) of its events, in microseconds."""
    names = {event[0]: i for i, event in enumerate((e for events in lines.values() for e in events), start=1)}
    text = f'name: "{name}"\n'
    for line, events in lines.items():
        text += f'lines {{ name: "{line}"\n'
        for event, start, duration in events:
            times = f"offset_ps: {start * 10**6} duration_ps: {duration * 10**6}"
            text += f"  events {{ metadata_id: {names[event]} {times} {stats} }}\n"
        text += "}\n"
    for event, i in names.items():
        text += f'event_metadata {{ key: {i} value {{ id: {i} name: "{event}" }} }}\n'
    return f'planes {{ {text} stat_metadata {{ key: 1 value {{ id: 1 name: "hlo_op" }} }} }}\n'


def profile(folder: Path, *planes: str) -> Path:
    path = folder / "plugins" / "profile" / "now" / "host.xplane.pb"
    path.parent.mkdir(parents=True)
    path.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace("".join(planes)))
    return folder


HLO = 'stats { metadata_id: 1 str_value: "an operation" }'
STREAMS = {
    "Stream #13(Compute,MemcpyD2D)": [("gemm", 0, 3000), ("gemm", 3000, 3000), ("copy", 7000, 1000)],
    "Stream #14(Compute)": [("norm", 500, 2000)],
    "XLA Ops": [("dot.1", 0, 6000)],
    "XLA Modules": [("jit_train_step", 0, 9000)],
}
HOST = plane("/host:CPU", {"python": [("host op", 0, 99_000)]}, HLO)


def test_top_kernels_counts_the_streams_of_a_device_alone(tmp_path):
    found = bench.top_kernels(profile(tmp_path, HOST, plane("/device:GPU:0", STREAMS)), steps=2)
    assert found == {
        "kernel_ms": 4.5,
        "kernels": [
            {"name": "gemm", "ms": 3.0, "share": 0.6667, "calls": 1.0},
            {"name": "norm", "ms": 1.0, "share": 0.2222, "calls": 0.5},
            {"name": "copy", "ms": 0.5, "share": 0.1111, "calls": 0.5},
        ],
    }


def test_top_kernels_of_several_devices_are_means_over_those_that_ran(tmp_path):
    idle = plane("/device:CUSTOM:0", {"Threads": [("x", 0, 1)]})
    gpus = [plane(f"/device:GPU:{i}", STREAMS) for i in range(2)]
    one = bench.top_kernels(profile(tmp_path / "one", gpus[0]), steps=2)
    assert bench.top_kernels(profile(tmp_path / "two", *gpus, idle), steps=2) == one


def test_top_kernels_counts_nested_time_once_and_ten_names(tmp_path):
    inside = [("body", 1000, 2000), ("inner", 1500, 500), ("body", 3000, 1000)]
    # In the order of the file, not of time: a profile promises none.
    loop = {"tf_XLAEigen/1": [*inside, ("while", 0, 5000)]}
    kernels = bench.top_kernels(profile(tmp_path / "loop", plane("/host:CPU", loop, HLO)), steps=1)
    assert {k["name"]: k["ms"] for k in kernels["kernels"]} == {"body": 2.5, "while": 2.0, "inner": 0.5}
    assert kernels["kernel_ms"] == 5.0
    many = {"Stream #1": [(f"kernel_{i}" + "x" * 500, 100 * i, 1 + i) for i in range(30)]}
    kernels = bench.top_kernels(profile(tmp_path / "many", plane("/device:GPU:0", many)), steps=1)["kernels"]
    assert [k["name"].rstrip("x") for k in kernels] == [f"kernel_{i}" for i in range(29, 19, -1)]
    assert all(len(k["name"]) == 120 for k in kernels)


def test_top_kernels_of_an_empty_profile_and_of_none(tmp_path):
    quiet = plane("/host:CPU", {"python": [("not an operation of XLA", 0, 1000)]})
    assert bench.top_kernels(profile(tmp_path / "a", quiet), steps=3) == {"kernel_ms": 0.0, "kernels": []}
    with pytest.raises(FileNotFoundError, match=r"bench: no \*\.xplane\.pb under"):
        bench.top_kernels(tmp_path / "b", steps=3)


@pytest.mark.parametrize("packing, profiled", [("stream", True), ("documents", False)])
def test_a_row_is_the_trainers_own_run(packing, profiled, capsys):
    changes = {**SMALL, "model.remat": "full"}
    settings = [f"--set={key}={value}" for key, value in changes.items()]
    call = ["--preset=tiny", f"--packing={packing}", "--steps=6", "--warm-up=2", "--mesh=data=1", "--commit=abc"]
    bench.main([*call, *settings, *["--profile"] * profiled])
    row = json.loads(capsys.readouterr().out)

    # --profile changes nothing of the steps before: the same losses as a run of six steps.
    run = {"packing": packing, "steps": 6, "warmup_steps": 8000, "mesh": {"data": 1}, "eval_batches": 1}
    config = override(train_preset("tiny", **changes), run)
    losses = train(config, quiet=True).curve()[1]
    assert row["losses"] == [round(loss, 4) for loss in losses]
    assert (row["loss_first"], row["loss_last"]) == (row["losses"][0], row["losses"][-1])

    assert row["packing"] == packing and row["implementation"] is None and row["attention"] == "xla_chunked"
    assert (row["remat"], row["loss_chunk"], row["commit"], row["devices"]) == ("full", 32, "abc", 1)
    assert row["mfu"] is None and row["peak_gib"] is None and row["device"] == "cpu"  # a CPU reports neither
    assert row["command"].startswith("python -m jaxflash.bench --preset=tiny") and "jax" in row["versions"]
    low, high = row["step_s_range"]
    assert low <= row["step_s"] <= high and 0 < row["tokens_per_s"] <= 256 / low + 1
    assert row["filled"] == 1.0 if packing == "stream" else 0.5 < row["filled"] <= 1.0
    assert ("kernels" in row) == profiled
    if not profiled:
        return
    # Three steps, whole: an operation runs once a step, or once a layer, and a fraction never.
    assert len(row["kernels"]) == 10 and row["profiled_steps"] == 3
    assert {k["calls"] % 1 for k in row["kernels"]} == {0.0}
    assert row["kernel_ms"] >= sum(k["ms"] for k in row["kernels"]) - 0.01 > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--warm-up=30"], "bench: warm_up=30 with steps=30"),
        (["--warm-up=0"], "bench: warm_up=0"),
        (["--implementation=cudn"], "unknown name='cudn'.*cudnn"),
        (["--implementation=cudnn"], "cannot run on cpu"),
        (["--packing=streams"], "unknown packing='streams'"),
        (["--preset=2b"], "unknown name='2b'"),
        (["--set=loss_chunks=3"], "unknown key 'loss_chunks'"),
        (["--set=loss_chunk"], "must be KEY=VALUE"),
        (["--mesh=tensr=1"], "tensr"),
    ],
)
def test_a_wrong_call_ends_with_status_2(arguments, message, capsys, tmp_path):
    small = [f"--set={key}={value}" for key, value in SMALL.items()]
    with pytest.raises(SystemExit) as stop:
        bench.main(["--preset=tiny", "--mesh=data=1", *small, f"--out={tmp_path / 'rows.jsonl'}", *arguments])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and not (tmp_path / "rows.jsonl").exists()
    assert re.search(message, error), error


def test_losses_are_compared_with_those_of_the_same_training_on_one_device(monkeypatch, tmp_path, capsys):
    call = ["--preset=tiny", "--steps=8", "--mesh=fsdp=2", "--commit=abc"]
    config = train_preset("tiny", steps=8, warmup_steps=8000)
    same = bench._training(config) | {"devices": 1}
    losses = [5.0, 4.0, 3.0]
    rows = [
        same | {"losses": [9.0] * 3},
        same | {"losses": [5.0, 4.02, 2.995]},  # the newest
        same | {"losses": [9.0] * 3, "learning_rate": 1.0},
        same | {"losses": [9.0] * 3, "devices": 2},
        {"what": "training", "devices": 1, "losses": [9.0] * 3},  # written before rows held it all
    ]
    before = tmp_path / "rows.jsonl"
    before.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(bench, "measure", lambda *_, **__: same | {"losses": losses, "devices": 2})
    bench.main([*call, f"--against={before}"])
    row = json.loads(capsys.readouterr().out)
    assert (row["loss_difference"], row["loss_difference_step"]) == (0.02, 2)

    monkeypatch.setattr(bench, "measure", lambda *_, **__: pytest.fail("was measured"))
    for wrong, message in ((["--set=seed=1"], "no row of one device with .*'seed': 1"), ([], "No such file")):
        where = before if wrong else tmp_path / "none.jsonl"
        with pytest.raises(SystemExit) as stop:
            bench.main([*call, *wrong, f"--against={where}"])
        assert stop.value.code == 2 and re.search(message, capsys.readouterr().err)


def test_rows_are_appended_and_a_profile_without_kernels_still_gives_its_row(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "measure", lambda *_, **__: {"kernels": []})
    out = tmp_path / "new" / "rows.jsonl"
    for commit in range(2):
        with pytest.raises(SystemExit) as stop:
            bench.main(["--preset=tiny", "--profile", f"--commit={commit}", f"--out={out}"])
        assert stop.value.code == 2
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    shown = capsys.readouterr()
    assert rows == [json.loads(line) for line in shown.out.splitlines()] and "no kernel" in shown.err
    assert [row["commit"] for row in rows] == ["0", "1"] and rows[0]["kernels"] == []

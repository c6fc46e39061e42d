"""Every mesh, schedule and choice gives what one device gives; and the tool that says so sees what it should."""

import itertools
import json
import math
import re

import numpy as np
import pytest

from jaxflash import cli, verify
from jaxflash.combinations import SMALL, combinations, hostile_rows, meshes, on_one_device, turns
from jaxflash.config import override, to_json
from jaxflash.verify import WITHIN, Finding, compare, deviation, proven, trace
from jaxflash.workers import Lost, outcomes
from sharding.mesh import AXES

ALL = combinations(SMALL, meshes(8))
AS_IT_IS, OTHER = turns(SMALL)[0], turns(SMALL)[-1] | {"model.qkv_bias": True}
# Few, and yet: each schedule, pairs of all axes but two, both models, packings, ways round the ring, chunks and more
# microbatches than the stages divide; two key/value heads over four devices; gradients over fsdp once a step (zero=1).
SUBSET = [
    AS_IT_IS | {"mesh": {"stage": 2, "context": 2, "tensor": 2}, "schedule": "interleaved", "accumulate": 3},
    OTHER | {"mesh": {"fsdp": 2, "stage": 2, "context": 2}, "schedule": "1f1b", "accumulate": 4},
    OTHER | {"mesh": {"data": 2, "stage": 2, "tensor": 2}, "schedule": "gpipe", "accumulate": 2},
    AS_IT_IS
    | {"mesh": {"fsdp": 2, "context": 2, "tensor": 2}, "loss_chunk": 10, "model.remat": "full"}
    | {"zero": 1, "accumulate": 2},
    OTHER | {"mesh": {"data": 2, "tensor": 4}, "accumulate": 3},
]


def test_every_split_of_the_devices_is_tried_under_every_schedule():
    assert len(meshes(8)) == len({tuple(sorted(mesh.items())) for mesh in meshes(8)}) == math.comb(3 + 4, 4)
    assert all(math.prod(mesh.values()) == 8 and list(mesh) == [a for a in AXES if a in mesh] for mesh in meshes(8))
    assert len(ALL) == len(set(map(to_json, ALL))) == 85
    for mesh in meshes(8):
        mine = [config for config in ALL if config.mesh == mesh]
        if "stage" in mesh:
            assert {config.schedule for config in mine} == {"gpipe", "1f1b", "interleaved"}
        else:
            assert [config.accumulate > 1 for config in mine] == [False, True]


def test_every_pair_of_choices_meets():
    def facts(config):
        model = config.model
        choices = [
            config.packing,
            model.remat,
            model.context_parallel,
            config.loss_chunk,
            model.tie_embeddings,
            config.zero,
        ]
        return [*enumerate(choices), *(("schedule", config.schedule),) * ("stage" in config.mesh), *config.mesh]

    kinds = [facts(config) for config in ALL]
    met = {frozenset(pair) for found in kinds for pair in itertools.combinations(found, 2)}
    values = sorted(set(itertools.chain(*kinds)), key=str)
    exclusive = {
        frozenset(p) for p in itertools.combinations(values, 2) if not isinstance(p[0], str) and p[0][0] == p[1][0]
    }
    assert {frozenset(pair) for pair in itertools.combinations(values, 2)} - exclusive == met
    assert len({to_json(on_one_device(config)) for config in ALL}) == 4  # runs on one device


@pytest.mark.parametrize("packing", ["documents", "stream"])
def test_rows_are_hostile(packing):
    rows = hostile_rows(override(SMALL, {"packing": packing}), 0)
    kept = rows["loss_mask"].sum(axis=1)
    assert kept.min() == 0 and kept.max() > 24 and len(set(kept)) > 8
    ids = rows.get("segment_ids", np.zeros_like(rows["tokens"]))
    for row, positions in zip(ids, rows["positions"], strict=True):
        starts = np.flatnonzero(np.diff(row, prepend=row[0] - 1))
        assert list(positions) == [place - starts[starts <= place].max() for place in range(len(row))]
    assert (ids.max() >= 3) == (packing == "documents")
    assert not np.array_equal(hostile_rows(SMALL, 1)["tokens"], rows["tokens"])


@pytest.mark.parametrize(
    ("have", "want", "relative"),
    [([2.0, 4.1], [2.0, 4.0], 0.025), ([0.0, -4.0], [0.0, 4.0], 2.0), (3, 3, 0.0)]
    + [([1.0, bad], [1.0, 2.0], math.inf) for bad in (math.nan, math.inf)]
    + [([1.0], [math.nan], math.inf), ([0.0], [0.0], math.inf)],
)  # fmt: skip
def test_deviation_is_relative_to_the_largest(have, want, relative):
    assert deviation(have, want) == pytest.approx(relative)


def plain_trace(scale=1.0):
    leaf = np.array([1.0, scale])
    return {"loss": [2.0], "gradients": {"a": [leaf, leaf], "b": [leaf, leaf]}, "parameters": {"a": leaf, "b": leaf}}


def test_a_planted_error_is_found_and_named():
    assert compare(SMALL, plain_trace(), plain_trace()).verdict == "equal"
    spoilt = plain_trace()
    spoilt["gradients"]["b"][1] = np.array([1.0, 1.0 + 2 * WITHIN])
    finding = compare(SMALL, spoilt, plain_trace())
    assert finding.verdict == "differs" and finding.worst == (pytest.approx(2 * WITHIN), "gradient b")
    assert finding.gradients["a"] == finding.parameters["b"] == finding.loss == 0
    spoilt["loss"] = [math.nan]
    assert compare(SMALL, spoilt, plain_trace()).worst == (math.inf, "loss")
    lost, refused = compare(SMALL, Lost("gone"), plain_trace()), compare(SMALL, {"refused": "no"}, plain_trace())
    assert (lost.verdict, refused.verdict) == ("failed", "refused")
    equal = compare(SMALL, plain_trace(), plain_trace())
    assert proven([equal, refused])
    assert not any(map(proven, ([], [refused], [equal, lost], [equal, finding])))


def test_the_command_prints_a_table_and_its_status_is_the_verdict(monkeypatch, capsys):
    config = override(SMALL, {"mesh": {"stage": 2, "tensor": 2}, "accumulate": 3})
    good = Finding(config=config, loss=1e-7, gradients={"table": 3e-6}, parameters={"table": 0.0})
    bad = Finding(config=config, failed="its process ended with exit code -6")
    wanted = {}

    def run(argv, findings):
        monkeypatch.setattr(verify, "verify", lambda config, **how: wanted.update(config=config, **how) or findings)
        with pytest.raises(SystemExit) as status:
            cli.main(["verify", *argv])
        return status.value.code, capsys.readouterr().out

    code, text = run(["--mesh", "stage=2,tensor=2", "--set", "model.n_layers=6", "--workers", "3"], [good])
    assert code == 0 and wanted["config"].model.n_layers == 6
    assert (wanted["mesh"], wanted["workers"], wanted["config"].steps) == ({"stage": 2, "tensor": 2}, 3, 3)
    row, summary = text.splitlines()
    assert row.startswith("equal    stage=2,tensor=2 ") and row.endswith("3.0e-06 gradient table")
    assert summary.startswith("1 equal of 1 combinations") and "largest deviation 3.0e-06 (gradient table" in summary
    code, text = run(["--devices", "4", "--preset", "tiny"], [good, bad])
    assert code == 1 and wanted["devices"] == 4 and wanted["config"].model.d_model == 128
    assert "failed   stage=2,tensor=2" in text and "exit code -6" in text and "1 equal, 1 failed of 2" in text
    code, text = run(["--json"], [good, bad])
    first, second = json.loads(text)["combinations"]
    assert code == 1 and first["gradients"] == {"table": 3e-6} and first["config"]["mesh"] == {"stage": 2, "tensor": 2}
    assert second["loss"] is None and second["verdict"] == "failed"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": {"tensor": 8}, "model.n_heads": 4}, r"q/weight: dim 2 \('heads'\).*tensor one of \[1, 2, 4\]"),
        ({"mesh": {"tensor": 8}, "model.d_ff": 60}, r"mlp/up/weight: dim 2 \('mlp'\) has size=60.* or the size 64"),
        ({"mesh": {"fsdp": 4, "tensor": 2}, "model.vocab_size": 60}, r"table: dim 0 .*tensor\*fsdp=8.* or the size 64"),
        ({"mesh": {"fsdp": 8}, "model.d_model": 36}, r"norm/scale: dim 0 .* size=36.*fsdp one of \[1, 2, 3, 4"),
        ({"mesh": {"data": 8}, "batch_size": 20}, r"batch_size=20 .* nearest batch_size that works is 16"),
        ({"mesh": {"stage": 8}, "model.n_layers": 6}, r"8 stages for n_layers=6 .* Use at most stage=6"),
        ({"mesh": {"context": 8}, "seq_len": 24}, r"seq_len=24 is not divisible by 16.* works is 32"),
        ({"mesh": {"stage": 2, "context": 4}, "seq_len": 28}, r"seq_len=28 is not divisible by 8.* works is 32"),
        ({"mesh": {"data": 16}}, r"needs 16 devices of count=8 .* Nearest mesh that works here: data=8"),
        ({"mesh": {"sage": 2}}, r"Did you mean 'stage'"),
    ],
)  # fmt: skip
def test_what_does_not_divide_is_refused_by_name_before_anything_is_allocated(changes, message, monkeypatch):
    monkeypatch.setattr(verify, "compile_program", lambda *_: pytest.fail("compiled before the check"))
    found = compare(SMALL, trace(override(SMALL, changes)), {})
    assert re.search(message, found.refused or "", re.DOTALL), found


@pytest.mark.parametrize("wrong", [{"devices": 0}, {"mesh": {"stage": -1}}, {"workers": 0}])
def test_numbers_that_are_not_positive_are_refused(wrong):
    with pytest.raises(ValueError, match="must be at least 1"):
        verify.verify(**wrong)


@pytest.fixture(scope="module")
def alone():
    """Runs on one device, by configuration."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("changes", SUBSET, ids=lambda changes: ",".join(changes["mesh"]))
def test_a_mesh_computes_what_one_device_does(changes, alone, capfd):
    config = override(SMALL, changes)
    plain = on_one_device(config)
    if to_json(plain) not in alone:
        alone[to_json(plain)] = trace(plain)
    finding = compare(config, trace(config), alone[to_json(plain)])
    assert finding.verdict == "equal", str(finding)
    # XLA prints this when a layout forces it to copy an activation to every device.
    assert "rematerialization" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_wrong_mesh_is_seen(alone, monkeypatch):
    """The control: rows cut over devices in another order than the program of a test above takes them for."""
    config = override(SMALL, SUBSET[3])
    plain = on_one_device(config)
    want = alone.get(to_json(plain)) or trace(plain)
    monkeypatch.setattr("jaxflash.step.zigzag", lambda x, *_, **__: x)
    assert compare(config, trace(config), want).verdict == "differs"


@pytest.mark.slow
def test_calls_that_crash_raise_or_hang_are_reported_and_the_others_go_on():
    jobs = ["2 + 2", "1 / 0", "__import__('os')._exit(3)", "3 * 3", "__import__('time').sleep(1000)"]
    found = dict(outcomes(eval, jobs, begin=print, workers=1, timeout=15.0))
    assert (found[0], found[3]) == (4, 9)
    reasons = {number: found[number].reason for number in (1, 2, 4)}
    assert reasons[1].startswith("its process ended with exit code 1:") and "ZeroDivisionError" in reasons[1]
    assert reasons[2].startswith("its process ended with exit code 3") and reasons[4] == "no result in 15 s"

"""What is looked up in tuned.json, what tuning writes there, and how jobs are timed one at a time."""

import dataclasses
import json
import multiprocessing
import os
import time

import pytest

from pallas_kernels import timing, tune, tuned
from pallas_kernels.attention import api, hopper_config
from pallas_kernels.attention.hopper_config import BackwardConfig, Config
from pallas_kernels.attention.spec import AttentionSpec
from pallas_kernels.device import H200, Device

FACTS = {"H": 64, "H_v": 64, "is_causal": True}


def row(length: int, share: int, **changes) -> dict:
    return {
        "device": "NVIDIA H200",
        "kernel": "backward",
        **FACTS,
        "length": length,
        "config": {"l2_mib": share},
    } | changes


def test_the_nearest_length_of_the_same_facts_is_taken(tmp_path):
    rows = [row(1024, 1), row(8192, 2), row(4096, 3, is_causal=False), row(4096, 4, kernel="forward")]
    (path := tmp_path / "tuned.json").write_text(json.dumps([*rows, row(4096, 5, device="another")]))
    found = [tuned.lookup(path, H200, "backward", FACTS, length) for length in (1, 1024, 2800, 3000, 10**6)]
    assert found == [{"l2_mib": n} for n in (1, 1, 1, 2, 2)]
    assert tuned.lookup(path, H200, "backward", FACTS | {"H": 128}, 1024) is None
    assert tuned.lookup(path, Device(platform="gpu", kind="NVIDIA H100"), "backward", FACTS, 1024) is None


def test_the_package_holds_a_configuration_for_every_problem_that_is_tuned():
    rows = json.loads(hopper_config.TUNED.read_text())
    assert rows == tuned.merge(rows, [], tune.KEYS)  # in order, none twice
    for problem in tune.problems():
        spec = problem.spec
        choose = hopper_config.forward_config if problem.kernel == "forward" else hopper_config.backward_config
        (found,) = [r for r in rows if all(r[k] == v for k, v in dataclasses.asdict(problem).items())]
        assert found["device"] == "NVIDIA H200" and found["ms"] <= found["default_ms"]
        config = choose(spec, H200)
        assert config == type(config)(**found["config"])


def test_every_call_gets_a_configuration_that_fits():
    for H, H_v in [(8, 8), (64, 128), (96, 96), (192, 128), (136, 256), (256, 64)]:
        for device in (H200, Device(platform="gpu", kind="NVIDIA GH200", compute_capability=(9, 0), num_cores=132)):
            spec = AttentionSpec(B=1, T=300, S=5, N=2, K=1, H=H, H_v=H_v, dtype="bfloat16", is_causal=True)
            assert hopper_config.fits(spec, hopper_config.forward_config(spec, device)), (H, H_v)


def test_a_share_of_the_cache_is_at_least_one_mib():
    with pytest.raises(ValueError, match="l2_mib"):
        BackwardConfig(l2_mib=0)


def test_explain_names_tile_sizes_and_schedule():
    spec = AttentionSpec(B=2, T=8192, S=8192, N=32, K=32, H=64, H_v=64, dtype="bfloat16", is_causal=True)
    (name, verdict), *_ = api.explain(spec, device=H200).verdicts
    assert name == "hopper" and verdict.startswith("chosen: forward: 192 queries x 128 keys, 3 warpgroups, in turns")
    assert str(hopper_config.backward_config(spec, H200)) in verdict


@pytest.mark.parametrize("gain, share", [(0.002, 32), (0.05, 64)])
def test_the_default_stays_unless_another_is_clearly_faster(gain, share):
    problem = tune.Problem(kernel="backward", H=64, H_v=64, is_causal=True, length=8192)
    found = tune._row(
        problem, {BackwardConfig(): 1.0, BackwardConfig(l2_mib=64): 1 - gain, BackwardConfig(l2_mib=4): 2.0}
    )
    assert found and found["config"] == {"l2_mib": share} and found["candidates"] == 3
    assert tune._row(problem, {BackwardConfig(l2_mib=4): 1.0}) is None  # the default could not be timed


def test_merging_keeps_other_devices_and_takes_what_is_new():
    new = [row(1024, 9), row(2048, 1)]
    merged = tuned.merge([row(1024, 1), row(1024, 2, device="another")], new, tune.KEYS)
    assert merged == [row(1024, 9), row(2048, 1), row(1024, 2, device="another")]


def test_candidates_and_shares_differ_from_each_other():
    spec = AttentionSpec(B=2, T=8192, S=8192, N=32, K=32, H=64, H_v=64, dtype="bfloat16")
    every = hopper_config.candidates(spec)
    every += hopper_config.cache_shares(every[0])
    assert len(set(every)) == len(every) == 13 and all(isinstance(c, Config) for c in every)


def job(n: int) -> tuple[int, float, float]:
    if n == 3:
        raise ValueError("three")
    with timing._gpu:
        start = time.monotonic()
        time.sleep(0.05)
        return os.getpid(), start, time.monotonic()


@pytest.mark.parametrize("workers", [1, 2])
def test_jobs_are_timed_one_at_a_time_and_errors_are_results(workers):
    results = dict(timing.each(job, range(6), workers=workers, seconds=100.0))
    assert results.pop(3) == "ValueError: three" and sorted(results) == [0, 1, 2, 4, 5]
    spans = sorted((start, stop) for _, start, stop in results.values())
    assert all(stop <= start for (_, stop), (start, _) in zip(spans[:-1], spans[1:], strict=True))
    assert (os.getpid() in {pid for pid, _, _ in results.values()}) == (workers == 1)


def test_a_worker_that_keeps_the_gpu_is_told():
    lock = multiprocessing.get_context("spawn").Lock()
    lock.acquire()
    with pytest.raises(RuntimeError, match="another worker has held the GPU"), timing._Alone(lock, 0.01):
        pass


@pytest.mark.parametrize("answers, rows", [(100, 1), (5, 0)])
def test_a_problem_whose_candidates_were_not_all_timed_has_no_row(answers, rows, monkeypatch):
    def each(run, jobs, *, workers, seconds):
        yield from [(job, 1.0) for job in jobs][:answers]

    monkeypatch.setattr(tune, "each", each)
    problem = tune.Problem(kernel="forward", H=64, H_v=64, is_causal=True, length=2048)
    found, errors = tune.tune([problem], workers=1, seconds=1.0)
    assert (len(found), len(errors)) == (rows, 1 - rows)


def test_jobs_end_when_their_time_is_over():
    assert list(timing.each(job, [0, 1], workers=1, seconds=-1.0)) == []
    assert list(timing.each(job, [0, 1], workers=2, seconds=-1.0)) == []

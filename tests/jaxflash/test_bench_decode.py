"""A row of decoding: its figures follow from the times of calls and the weights that are there."""

import json

import pytest

from jaxflash import bench_decode


def test_rows(monkeypatch, tmp_path):
    calls = []

    def generate_tokens(config, params, prompts, sampling):
        calls.append((len(prompts), len(prompts[0]), sampling.max_new_tokens))
        now[0] += 1.0 + 0.25 * sampling.max_new_tokens

    now = [0.0]
    monkeypatch.setattr(bench_decode.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(bench_decode, "generate_tokens", generate_tokens)
    monkeypatch.setattr(bench_decode, "top_kernels", lambda trace, steps: {"kernels": [], "steps": steps})
    out = tmp_path / "rows.jsonl"
    assert bench_decode.main(["--preset", "tiny", "--batch", "3", "--prompt", "5", "--out", str(out)]) == 0
    dense, packed = map(json.loads, out.read_text().splitlines())
    assert (dense["weights"], packed["weights"]) == bench_decode.WEIGHTS and packed["ratio"] == 1.0
    assert dense["ms_per_token"] == packed["ms_per_token"] == 250.0 and dense["tokens_per_s"] == 12.0
    assert dense["steps"] == bench_decode.SHORT and set(calls) == {
        (3, 5, new) for new in (bench_decode.SHORT, bench_decode.LONG)
    }
    # The blocks of `tiny` in 4 bits with a scale of 16 bits for 128 rows, in tiles of 64; the rest in 16.
    d, h, f = 128, 128, 384
    shapes = [(d, h), (d, h // 2), (d, h // 2), (h, d), (d, f), (d, f), (f, d)]
    saved = 4 * sum(k * n * 2 - k * n // 2 - k // 128 * n * 2 for k, n in shapes)
    assert dense["weight_bytes"] - packed["weight_bytes"] == saved


def test_what_is_timed_is_generation(monkeypatch):
    monkeypatch.setattr(bench_decode, "SHORT", 1)
    monkeypatch.setattr(bench_decode, "LONG", 33)
    (row,) = bench_decode.rows("tiny", batch=2, prompt=3, only="bf16")
    assert row["ms_per_token"] > 0 and row["kernels"]
    assert row["tokens_per_s"] == pytest.approx(2e3 / row["ms_per_token"], rel=1e-3)

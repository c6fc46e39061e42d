"""What the benchmark times, with no GPU: its jobs, and the memory that they ask for."""

import jax
import pytest

from pallas_kernels import bench_w4a16
from pallas_kernels.device import H200
from pallas_kernels.timing import Chain


@pytest.fixture(autouse=True)
def on_h200(monkeypatch):
    monkeypatch.setattr(bench_w4a16, "current_device", lambda: H200)


def test_every_cell_has_a_kernel_and_the_plain_ones_their_rivals():
    for cell in bench_w4a16.cells():
        names = {name for _, name, _ in bench_w4a16.jobs(cell)}
        assert ("hopper_large" in names) == (cell.M >= 8) and ("hopper" in names) == (cell.M <= 32)
        assert {"bf16", "xla"} <= names or cell.group != 128 or cell.zeros


@pytest.mark.parametrize("name", ["bf16", "xla", "hopper_large"])
def test_weights_are_cold_and_fit(name, monkeypatch):
    """Distinct weights of more than the L2 cache; of 16 bits, or to be made so, at most 5 GB."""
    given = []

    def chained(function, calls, rounds):
        given.append(calls)
        return Chain(us=1.0, cupti_us=1.0, custom_calls=len(calls))

    monkeypatch.setattr(bench_w4a16, "chained", chained)
    for cell in bench_w4a16.cells():
        bench_w4a16.run((cell, name, None))
        calls = given.pop()
        weights = {id(call[1]): [jax.eval_shape(make) for make in call[1:]] for call in calls}
        assert len(calls) >= len(weights)
        assert sum(a.size * a.dtype.itemsize for arrays in weights.values() for a in arrays) >= 200e6
        if name != "hopper_large":
            assert len(weights) == len(calls) >= 4
            assert len(calls) * 2 * cell.spec.K * cell.spec.N <= 5e9

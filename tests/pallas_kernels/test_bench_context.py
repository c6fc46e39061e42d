"""The timing of sequences over several devices, at a size that tells nothing of speed."""

import pytest

from pallas_kernels import bench_context


def test_without_a_gpu_it_says_so(capsys):
    assert bench_context.main([]) == 2
    assert "needs a GPU" in capsys.readouterr().err


@pytest.mark.parametrize("backward", [False, True])
def test_a_row_is_of_the_devices_that_it_names(backward, monkeypatch):
    monkeypatch.setattr(bench_context, "HEADS", 1)
    seen = []
    monkeypatch.setattr(bench_context, "milliseconds", lambda function, arrays, **_: seen.append(arrays) or 2.0)
    row = bench_context.measure(256, 2, "ring", backward=backward)
    (arrays,) = seen
    assert {len(x.sharding.device_set) for x in arrays} == {2} and len(arrays) == 3 + backward
    # 4 products' halves of 256 x 256 x 128 forward, 10 backward, over two devices in 2 ms.
    assert row == {"ms": 2.0, "tflops_a_device": round((4 + 10 * backward) / 2 * 256 * 256 * 128 / 2e9 / 2, 1)}

"""Facts about devices: what is read off jax, and the peaks on record."""

from types import SimpleNamespace

import jax
import pytest

from pallas_kernels.device import H200, Device, current_device, describe, peak_flops


def test_current_device_is_the_host_and_follows_the_default_device():
    device = current_device()
    assert device.platform == jax.devices()[0].platform and device.kind == jax.devices()[0].device_kind
    with jax.default_device(jax.devices("cpu")[1]):
        assert current_device() == Device(platform="cpu", kind="cpu")


def test_describe_a_cuda_device():
    fake = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0", core_count=132)
    assert describe(fake) == H200


def test_a_capability_that_is_no_number_is_none():
    fake = SimpleNamespace(
        platform="gpu", device_kind="AMD Instinct MI300X", compute_capability="gfx942", core_count=304
    )
    assert describe(fake).compute_capability is None


@pytest.mark.parametrize(
    "kind, peak",
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("cpu", None),
        ("NVIDIA H2000", None),
    ],
)
def test_peak_flops(kind, peak):
    assert peak_flops(Device(platform="gpu", kind=kind)) == peak


def test_devices_are_values():
    assert hash(H200) == hash(Device(platform="gpu", kind="NVIDIA H200", compute_capability=(9, 0), num_cores=132))
    assert str(H200) == "NVIDIA H200 (gpu)" and str(Device(platform="cpu", kind="cpu")) == "cpu"

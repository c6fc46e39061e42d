"""The public call with the Hopper kernels chosen: lowered for CUDA, values and gradients, alone and on a mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.attention import api
from pallas_kernels.attention.cases import CASES, Case
from pallas_kernels.device import H200, Device
from sharding.mesh import make_mesh
from tests.mosaic.lowering import lower_for_cuda
from tests.pallas_kernels.attention.check import ARRAYS, DIFFERENTIABLE


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    monkeypatch.setattr(api, "current_device", lambda: H200)


def kernels(case: Case, name: str | None = None, **static) -> list[str]:
    """The Mosaic kernels in the gradient of a call, lowered for CUDA."""
    arguments = {key: x for key, x in case.arguments().items() if x is not None}
    arrays = {key: arguments.pop(key) for key in (*DIFFERENTIABLE, *ARRAYS) if key in arguments}

    def loss(differentiable, rest):
        out, lse = api.dot_product_attention(
            **differentiable, **rest, **arguments, **static, implementation=name, return_lse=True
        )
        return out.astype(jnp.float32).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    operands = {key: arrays.pop(key) for key in DIFFERENTIABLE if key in arrays}
    lowered = lower_for_cuda(jax.grad(loss), operands, arrays)
    text = lowered if isinstance(lowered, str) else lowered.as_text()
    return [line for line in text.splitlines() if "mosaic_gpu_v2" in line and "custom_call" in line]


@pytest.mark.parametrize(
    "case", ["causal", "window_cross_bottom_right", "lengths_zero", "segments_cross", "group_of_3"]
)
def test_one_forward_and_one_backward_kernel(case):
    case = dataclasses.replace(CASES[case], dtype="bfloat16")
    assert api.explain(case.spec(return_lse=True), device=H200).chosen == "hopper"
    assert len(kernels(case)) == 2


def test_a_wide_head_has_a_backward_kernel_of_its_own():
    case = Case(dtype="bfloat16", H=192, H_v=128, is_causal=True)
    explanation = api.explain(case.spec(), device=H200)
    assert explanation.chosen == "hopper" and "backward: 64 queries x 64 keys" in explanation.verdicts[0][1]
    forward, backward = kernels(case)
    assert "attention_bwd_wide" in forward + backward


def test_on_a_mesh_nothing_is_gathered():
    case = dataclasses.replace(CASES["causal"], dtype="bfloat16", B=4, N=8, K=4, H=64, H_v=64)
    arguments = case.arguments()
    mesh = make_mesh({"data": 2, "tensor": 2}, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P(("data",), None, "tensor"))
        shapes = [
            jax.ShapeDtypeStruct(arguments[n].shape, arguments[n].dtype, sharding=sharding)
            for n in ("query", "key", "value")
        ]

        def loss(q, k, v):
            return api.dot_product_attention(q, k, v, is_causal=True).astype(jnp.float32).sum()

        text = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") >= 2 and "manual_computation" in text
    assert "all_gather" not in text and "all_to_all" not in text


@pytest.mark.parametrize(
    "head_dim, check_vma",
    [(64, True), (256, True), *(pytest.param(n, False, marks=pytest.mark.slow) for n in (64, 256))],
)
def test_inside_a_shard_map_of_the_users(head_dim, check_vma):
    """Which may check how values vary (jax's default), where jax takes no kernel as it is."""
    mesh = make_mesh({"data": 2}, devices=jax.devices()[:2])
    q = jax.ShapeDtypeStruct((4, 256, 2, head_dim), jnp.bfloat16)

    def local(q, k, v):
        return jax.grad(lambda *x: api.dot_product_attention(*x, is_causal=True).astype(jnp.float32).sum(), (0, 1, 2))(
            q, k, v
        )

    with jax.set_mesh(mesh):
        split = jax.shard_map(local, in_specs=P("data"), out_specs=P("data"), check_vma=check_vma)
        text = jax.jit(split).trace(q, q, q).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") >= 2


def test_on_several_devices_without_a_mesh_in_force():
    """Split by custom_partitioning, which lowers no program that keeps a ref."""
    mesh = make_mesh({"data": 2, "tensor": 2}, devices=jax.devices()[:4])
    sharding = NamedSharding(mesh, P("data", None, "tensor"))
    q = jax.ShapeDtypeStruct((4, 512, 4, 64), jnp.bfloat16, sharding=sharding)

    def loss(q, k, v):
        return api.dot_product_attention(q, k, v, is_causal=True).astype(jnp.float32).sum()

    lowered = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, q, q).lower(lowering_platforms=("cuda",))
    assert "CustomSPMDPartitioning" in lowered.as_text()


@pytest.mark.parametrize(
    "device, reason",
    [
        (Device(platform="cpu", kind="cpu"), "compute capability 9.0"),
        (Device(platform="gpu", kind="NVIDIA A100", compute_capability=(8, 0)), "compute capability 9.0"),
        (Device(platform="gpu", kind="NVIDIA B200", compute_capability=(10, 0)), "compute capability 9.0"),
    ],
)
def test_other_devices_are_served_by_others(device, reason):
    explanation = api.explain(Case(dtype="bfloat16").spec(), device=device)
    assert explanation.chosen and not explanation.chosen.startswith("hopper")
    assert reason in dict(explanation.rejected)["hopper"]


@pytest.mark.parametrize(
    "case, reason",
    [
        (Case(), "takes float16 and bfloat16, not float32"),
        (Case(dtype="bfloat16", H=264, H_v=264), "head dims up to 256"),
        (Case(dtype="bfloat16", bias="bnts"), "has no bias"),
        (Case(dtype="bfloat16", mask="b11s"), "has no boolean mask"),
    ],
)
def test_what_the_kernels_refuse(case, reason):
    assert reason in dict(api.explain(case.spec(), device=H200).rejected)["hopper"]
    scaled = api.explain(*[np.zeros((1, 8, 1, 8), jnp.bfloat16)] * 3, scale=jnp.float32(1), device=H200)
    assert "Python number" in dict(scaled.rejected)["hopper"]

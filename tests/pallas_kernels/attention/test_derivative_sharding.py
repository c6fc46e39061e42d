"""Stand-in kernels made differentiable and split over meshes: as unsplit, and without collectives."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.attention.cases import Case
from sharding.mesh import make_mesh
from tests.oracle import attention as oracle
from tests.pallas_kernels.attention.check import jit
from tests.pallas_kernels.attention.stand_in import (
    against_oracle,
    call,
    collectives,
    cotangents,
    operands,
)
from tests.tolerance import assert_close

MESHES = [{"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "tensor": 4}]
WIDE = Case(
    B=8, T=4, S=4, N=8, K=4, H=4, H_v=3, is_causal=True, query_lengths=(4, 3, 4, 1, 0, 4, 2, 4),
    kv_lengths=(4, 4, 2, 4, 4, 1, 0, 3), query_runs=((0, 2), (1, 2)),
)  # fmt: skip


LAYOUT = P(("data", "fsdp"), None, "tensor")


def placed(mesh: Any, arguments: dict[str, Any], layout: P = LAYOUT) -> tuple[Any, Any]:
    """(operands and cotangents, the optional ones) in a layout; dims that do not divide are whole."""

    def place(x):
        entries = [layout[i] if i < len(layout) else None for i in range(x.ndim)]
        for i, entry in enumerate(entries):
            axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
            entries[i] = entry if x.shape[i] % int(np.prod([mesh.shape[axis] for axis in axes])) == 0 else None
        return jax.device_put(x, NamedSharding(mesh, P(*entries)))

    qkv, optional = operands(arguments)
    return jax.tree.map(place, ((*qkv, *cotangents(arguments)), optional))


def direct(arguments: dict[str, Any]) -> Callable:
    """As `pullback`, without the sums of a loss, which are collectives."""

    def both(q, k, v, dout, dlse, **optional):
        results, pull = jax.vjp(functools.partial(call(arguments), **optional), q, k, v)
        return *results, *pull((dout, dlse))

    return both


@pytest.mark.parametrize("in_force", [True, False], ids=["set_mesh", "no mesh"])
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_sharded_is_unsharded_without_collectives(axes, in_force):
    arguments = WIDE.arguments()
    mesh = make_mesh(axes)
    arrays, optional = placed(mesh, arguments)
    with jax.set_mesh(mesh) if in_force else jax.default_matmul_precision(None):
        compiled = jax.jit(direct(arguments)).lower(*arrays, **optional).compile()
    results = compiled(*arrays, **optional)
    assert collectives(compiled) == []
    for result in results:
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, LAYOUT), result.ndim)
    against_oracle(results, arguments, *arrays[3:])


@pytest.mark.parametrize("in_force", [True, False], ids=["set_mesh", "no mesh"])
@pytest.mark.parametrize(
    "case, layout",
    [
        (Case(B=8, T=4, S=4, N=4, K=1, H=4, H_v=4), LAYOUT),
        (Case(B=8, T=4, S=4, N=6, K=3, H=4, H_v=4), LAYOUT),
        (Case(B=2, T=4, S=4, N=4, K=2, H=4, H_v=4), P("data", None, "tensor")),
        (Case(B=3, T=4, S=4, N=4, K=2, H=4, H_v=4), P(None, None, "tensor")),
        (Case(B=2, T=4, S=4, N=4, K=2, H=4, H_v=4), P("data", "fsdp", "tensor")),
        (Case(B=2, T=4, S=4, N=4, K=2, H=4, H_v=4), P(None, None, None, "tensor")),
    ],
    ids=["one key head", "3 key heads", "batch of 2", "batch of 3", "sequence split", "head dim split"],
)
def test_what_does_not_divide_is_whole_on_every_device(case, layout, in_force):
    arguments = case.arguments()
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    arrays, _ = placed(mesh, arguments, layout)
    with jax.set_mesh(mesh) if in_force else jax.default_matmul_precision(None):
        results = jax.jit(direct(arguments))(*arrays)
    against_oracle(results, arguments, *arrays[3:])


def test_meshes_of_other_axes_are_followed():
    arguments = WIDE.arguments()
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    arrays, optional = placed(mesh, arguments, P("x", None, "y"))
    with jax.set_mesh(mesh):
        compiled = jax.jit(direct(arguments)).lower(*arrays, **optional).compile()
    assert collectives(compiled) == []
    against_oracle(compiled(*arrays, **optional), arguments, *arrays[3:])


@pytest.mark.parametrize("manual, layout", [(("data", "fsdp", "tensor"), LAYOUT), (("data",), P("data"))], ids=str)
@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no vma"])
def test_axes_that_are_manual_already_are_left_alone(manual, layout, check_vma):
    arguments = WIDE.arguments()
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    arrays, optional = placed(mesh, arguments, layout)

    def local(arrays, optional):
        shard = {**arguments, **dict(zip(("query", "key", "value"), arrays, strict=False)), **optional}
        return direct(shard)(*arrays, **optional)

    with jax.set_mesh(mesh):
        function = jax.shard_map(
            local,
            in_specs=jax.tree.map(lambda x: x.sharding.spec, (arrays, optional)),
            out_specs=layout,
            axis_names=set(manual),
            check_vma=check_vma,
        )
        nested = str(jax.make_jaxpr(function)(arrays, optional)).count("shard_map[") - 1
        results = jax.jit(function)(arrays, optional)
    assert nested == (0 if len(manual) == 3 else 2)
    against_oracle(results, arguments, *arrays[3:])


def test_gradients_of_what_every_shard_reads_are_summed():
    """Keys and values whole on every device of a shard_map, queries split: dk and dv are sums over devices."""
    arguments = Case(B=1, T=8, S=4, N=2, K=2, H=4, H_v=4).arguments()
    (qkv, _), (dout, dlse) = operands(arguments), cotangents(arguments)
    local = {**arguments, "query": arguments["query"][:, :1]}
    rows = P(None, "fsdp")

    def loss(q, k, v, dout, dlse):
        out, lse = call(local)(q, k, v)
        return jax.lax.psum((out * dout).sum() + (lse * dlse).sum(), "fsdp")

    total = jax.shard_map(loss, mesh=make_mesh(), in_specs=(rows, P(), P(), rows, rows), out_specs=P())
    gradients = jit(jax.grad(total, argnums=(0, 1, 2)))(*qkv, dout, dlse)
    want, plain = (oracle(**arguments, dout=dout, dlse=dlse, precision=dtype) for dtype in (None, jnp.float32))
    for gradient, name in zip(gradients, ("dq", "dk", "dv"), strict=True):
        assert_close(gradient, getattr(want, name), getattr(plain, name), name)


def test_vmap_and_higher_derivatives_keep_the_split():
    arguments = Case(B=4, T=4, S=4, N=4, K=2, H=4, H_v=4).arguments()
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    arrays, _ = placed(mesh, arguments)
    layout = NamedSharding(mesh, LAYOUT)
    with jax.set_mesh(mesh):
        # Batch and heads of the unmapped arrays are split; the mapped axis is whole.
        q = jax.device_put(jnp.stack([arrays[0], arrays[0] / 2], axis=3), layout)
        mapped = jax.jit(jax.vmap(direct(arguments), (3, None, None, None, None)))
        compiled = mapped.lower(q, *arrays[1:]).compile()
        assert collectives(compiled) == []
        results = compiled(q, *arrays[1:])
        second = jax.jit(lambda x, t: jax.jvp(lambda *x: direct(arguments)(*x, *arrays[3:]), x, t)[1])
        tangents = second(arrays[:3], arrays[:3])
    for i in range(2):
        scaled = {**arguments, "query": arguments["query"] / (1 + i)}
        against_oracle([x[i] for x in results], scaled, *arrays[3:])
    unsharded = [jnp.asarray(np.asarray(x)) for x in arrays]
    truth = jit(lambda x, t: jax.jvp(lambda *x: direct(arguments)(*x, *unsharded[3:]), x, t)[1])
    for ours, want in zip(tangents, truth(tuple(unsharded[:3]), tuple(unsharded[:3])), strict=True):
        np.testing.assert_allclose(ours, want, rtol=1e-5, atol=1e-5)


def test_explicit_axes_are_refused():
    arguments = Case(B=2, T=4, S=4, N=2, K=2, H=4, H_v=4).arguments()
    mesh = jax.make_mesh((2, 1, 1), ("data", "fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 3)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="Explicit axes.*make_mesh"):
        jax.eval_shape(call(arguments), *operands(arguments)[0])


def test_a_gpu_program_is_lowered_on_a_cpu():
    arguments = Case(B=2, T=4, S=4, N=2, K=2, H=4, H_v=4).arguments()
    arrays = (*operands(arguments)[0], *cotangents(arguments))
    exported = jax.export.export(jax.jit(direct(arguments)), platforms=("cuda",))(*arrays)
    assert exported.platforms == ("cuda",)

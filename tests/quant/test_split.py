"""Packed weights over a mesh of 8 CPU devices: they equal the whole, or are refused in words."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from quant import split
from quant.matmul import matmul
from quant.tensor import Int4Tensor
from sharding import rules
from sharding.mesh import make_mesh
from tests.quant import oracle
from tests.tolerance import assert_close

COLUMN_PARALLEL, ROW_PARALLEL = ("embed", "mlp"), ("mlp", "embed")


@functools.cache
def parts(K, N, group, zeros):
    rng = np.random.default_rng(0)
    groups = 1 if group is None else -(-K // group)
    codes = rng.integers(0, 16, (K, N), dtype=np.uint8)
    scales = rng.uniform(0.01, 0.02, (groups, N)).astype(jnp.bfloat16)
    return codes, scales, rng.integers(0, 16, (groups, N), dtype=np.uint8) if zeros else None


def tensor(K, N, group, zeros=False, **arguments):
    return Int4Tensor.from_codes(*parts(K, N, group, zeros), group=group, **arguments)


def placed(weight, names, mesh):
    split.check({"w": weight}, {"w": names}, mesh)
    return jax.device_put(weight, rules.shardings(split.axes_of_arrays(weight, names), mesh))


@pytest.mark.parametrize(
    "names, mesh_axes, group, zeros, dtype",
    [
        (COLUMN_PARALLEL, {"tensor": 8}, 64, True, "float32"),
        (ROW_PARALLEL, {"tensor": 8}, 64, True, "bfloat16"),
        (ROW_PARALLEL, {"fsdp": 2, "tensor": 4}, 64, False, "float32"),
        *(
            pytest.param(*arguments, marks=pytest.mark.slow)
            for arguments in (
                (ROW_PARALLEL, {"tensor": 8}, 64, True, "float32"),
                (COLUMN_PARALLEL, {"fsdp": 2, "tensor": 4}, None, True, "bfloat16"),
                (ROW_PARALLEL, {"data": 2, "tensor": 4}, None, False, "bfloat16"),
            )
        ),
    ],
)
def test_split_equals_whole(names, mesh_axes, group, zeros, dtype):
    K, N = 512, 1024
    mesh = make_mesh(mesh_axes)
    whole = tensor(K, N, group, zeros)
    x = np.random.default_rng(1).standard_normal((4, 3, K)).astype(jnp.dtype(dtype))
    dy = np.random.default_rng(2).standard_normal((4, 3, N)).astype(jnp.dtype(dtype))

    @jax.jit
    def both(x, weight):
        y, pull = jax.vjp(lambda x: matmul(x, weight), x)
        return y, pull(jnp.asarray(dy))[0]

    with jax.set_mesh(mesh):
        spread = placed(whole, names, mesh)
        assert spread.words.sharding.spec[:2] == tuple(rules.spec((names[1], names[0])))
        on_device = spread.words.addressable_shards[0].data.size
        assert on_device * mesh.shape["tensor"] * mesh.shape["fsdp"] == whole.words.size
        y, dx = both(x, spread)
    w = oracle.weight(*parts(K, N, group, zeros), K if group is None else group)
    flat_x, flat_dy = x.reshape(-1, K), dy.reshape(-1, N)
    assert_close(y.reshape(-1, N), oracle.product(flat_x, w), oracle.product(flat_x, w, x.dtype))
    assert_close(dx.reshape(-1, K), oracle.product(flat_dy, w.T), oracle.product(flat_dy, w.T, x.dtype))


def over(count):
    return make_mesh({"tensor": count}, devices=jax.devices()[:count])


@pytest.mark.parametrize("count", [3, 7])
def test_231_groups_over_3_and_7_devices(count):
    K = 29568
    whole, x = tensor(K, 64, 128), np.random.default_rng(1).standard_normal((2, K)).astype(np.float32)
    with jax.set_mesh(over(count)):
        spread = placed(whole, ROW_PARALLEL, over(count))
        assert spread.scales.addressable_shards[0].data.shape == (1, 231 // count, 64)
        y = jax.jit(matmul)(x, spread)
    w = oracle.weight(*parts(K, 64, 128, False), 128)
    assert_close(y, oracle.product(x, w), oracle.product(x, w, x.dtype))


@pytest.mark.parametrize("count", [2, 4, 8])
def test_231_groups_over_2_4_and_8_devices_are_refused(count):
    weight = jax.eval_shape(lambda: tensor(29568, 64, 128))
    message = (
        rf"down/weight: K=29568 rows in groups of 128 over {count} devices \(tensor={count}\): a boundary would cut a "
        r"group\. Make it one of \[1" + (", 3, 7" if count == 8 else ", 3" if count == 4 else "") + r"\]"
    )
    with pytest.raises(ValueError, match=message):
        split.check({"down": {"weight": weight}}, {"down": {"weight": ROW_PARALLEL}}, over(count))


@pytest.mark.parametrize(
    "K, N, group, names, count, message",
    [
        (1024, 320, 64, COLUMN_PARALLEL, 2, r"N=320 columns in tiles of 64 over 2 devices \(tensor=2\)"),
        (320, 64, None, ROW_PARALLEL, 2, "K=320 rows in tiles of 64 over 2 devices .*: a boundary would cut a tile"),
        (192, 64, 32, ROW_PARALLEL, 2, "K=192 rows in tiles of 64 over 2 devices"),
        (101, 64, 32, ROW_PARALLEL, 2, "size=101, not divisible by tensor=2"),
    ],
)
def test_other_cuts_are_refused(K, N, group, names, count, message):
    weight = jax.eval_shape(lambda: tensor(K, N, group))
    with pytest.raises(ValueError, match=message):
        split.check({"weight": weight}, {"weight": names}, over(count))


@pytest.mark.parametrize("K", [40, 192, 960])
@pytest.mark.parametrize("names, count", [(COLUMN_PARALLEL, 2), (COLUMN_PARALLEL, 1), (ROW_PARALLEL, 1)])
def test_a_short_last_group_is_no_fault_of_rows_that_stay_whole(K, names, count):
    whole, x = tensor(K, 128, 128), np.random.default_rng(1).standard_normal((2, K)).astype(np.float32)
    with jax.set_mesh(over(count)):
        y = jax.jit(matmul)(x, placed(whole, names, over(count)))
    w = oracle.weight(*parts(K, 128, 128, False), 128)
    assert_close(y, oracle.product(x, w), oracle.product(x, w, x.dtype))


def test_a_short_last_group_works_on_one_device():
    with pytest.raises(ValueError, match=r"K=192 rows in groups of 128 over 2 devices .* Make it one of \[1\]"):
        split.check({"w": tensor(192, 128, 128)}, {"w": ROW_PARALLEL}, over(2))


def test_all_faults_in_one_error_and_dense_arrays_too():
    axes = {"a": ROW_PARALLEL, "b": COLUMN_PARALLEL, "norm": ("norm",)}
    packed = {
        "a": jax.eval_shape(lambda: tensor(192, 64, 32)),
        "b": jax.eval_shape(lambda: tensor(64, 192, 32)),
        "norm": jnp.ones(4),
    }
    mesh = AbstractMesh((1, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    with pytest.raises(ValueError, match=r"(?s)^quant.split.check: 4 problem.*a: K=192.*a: N=64.*b: K=64.*b: N=192"):
        split.check(packed, axes, mesh)
    with pytest.raises(ValueError, match=r"(?s)^check: 1 problem.*norm: dim 0"):
        split.check({**packed, "norm": jnp.ones(5)}, axes, mesh)


def test_activation_order_is_not_split_by_rows():
    g_idx = np.random.default_rng(0).permutation(np.arange(512) // 64)
    weight = tensor(512, 512, 64, g_idx=g_idx)
    with pytest.raises(ValueError, match=r"K=512 rows are in activation order \(g_idx\).*not split by rows. Fold"):
        split.check({"w": weight}, {"w": ROW_PARALLEL}, over(2))
    mesh = over(2)
    spread = placed(weight, COLUMN_PARALLEL, mesh)
    x = np.random.default_rng(1).standard_normal((3, 512)).astype(np.float32)
    w = np.asarray(weight.dequantize(), float)
    assert_close(jax.jit(matmul)(x, spread), oracle.product(x, w), oracle.product(x, w, x.dtype))
    split.check({"w": dataclasses.replace(weight, permutation=None)}, {"w": ROW_PARALLEL}, mesh)


def test_names_of_stacked_weights():
    weight = jax.tree.map(lambda a: jnp.stack([a] * 3), tensor(128, 64, 64, zeros=True))
    names = split.axes_of_arrays({"w": weight, "b": jnp.ones(3)}, {"w": ("layer", *COLUMN_PARALLEL), "b": ("mlp",)})
    assert names["b"] == ("mlp",) and names["w"].words == ("layer", "mlp", "embed", None, None)
    assert names["w"].scales == names["w"].zeros == ("layer", "mlp", "embed", None)
    one_group = split.axes_of_arrays({"w": tensor(128, 64, None)}, {"w": ROW_PARALLEL})["w"]
    assert one_group.scales == ("embed", None, None) and one_group.words == ("embed", "mlp", None, None)
    assert rules.shardings(names, over(1))["w"].words.spec == P("stage", "tensor", "fsdp", None, None)

"""spec, check, shardings of optimizer state, and constrain: what they return and what they refuse."""

from collections.abc import Hashable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.mesh import AXES, make_mesh
from sharding.rules import RULES, bytes_per_device, check, constrain, copies, fitted, shardings, spec, state_shardings


def abstract_mesh(**sizes):
    return AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES)


def mesh_of(sizes):
    return make_mesh(dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)))


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_spec():
    assert spec(("layer", "embed", "mlp")) == P("stage", "fsdp", "tensor")
    assert spec(("table_rows", None)) == P(("tensor", "fsdp"), None)
    assert spec(()) == P()
    assert spec(("x",), {"x": ("data",)}) == P("data")
    with pytest.raises(ValueError, match="'embed' and 'table_rows' .* both map to mesh axis 'fsdp'"):
        spec(("embed", "table_rows"))
    with pytest.raises(ValueError, match="unknown logical axis name='embd'. Did you mean 'embed'"):
        spec(("embd",))


def test_rules_name_mesh_axes_in_use():
    assert {axis for axes in RULES.values() for axis in axes} == set(AXES)


def test_check_reports_everything_at_once():
    mesh = abstract_mesh(fsdp=2, tensor=4)
    shapes = {
        "attn": {"k": array(30, 64), "q": array(31, 64), "extra": array(4)},
        "table": array(50257, 8),
        "up": array(8, 8),
        "rank": array(8),
        "fine": array(8, 8),
    }
    axes = {
        "attn": {"k": ("embed", "kv_heads"), "q": ("embed", "heads"), "missing": ("embed",)},
        "table": ("table_rows", "table_width"),
        "up": ("embed", "norm"),
        "rank": ("embed", "mlp"),
        "fine": ("embed", "mlp"),
    }
    with pytest.raises(ValueError) as error:
        check(shapes, axes, mesh, {"heads": 16, "kv_heads": 2})
    heading, *lines = str(error.value).splitlines()
    sizes = "{'data': 1, 'fsdp': 2, 'stage': 1, 'context': 1, 'tensor': 4}"
    assert heading.startswith(f"check: 7 problem(s) on mesh {sizes}")
    assert [line.strip() for line in lines] == [
        "attn/extra: has no logical axes",
        "attn/k: dim 1 ('kv_heads') has size=64 in 2 units, not divisible by tensor=4; "
        "make tensor one of [1, 2] or the units 4",
        "attn/missing: has logical axes but no array",
        "attn/q: dim 0 ('embed') has size=31, not divisible by fsdp=2; make fsdp one of [1] or the size 32",
        "rank: shape=(8,) has 1 dims but names=('embed', 'mlp') has 2",
        "table: dim 0 ('table_rows') has size=50257, not divisible by tensor*fsdp=8; "
        "make tensor*fsdp one of [1] or the size 50264",
        "up: spec: 'embed' and 'norm' of names=('embed', 'norm') both map to mesh axis 'fsdp' - a mesh axis splits "
        "one dimension of an array. Rename one of them to a logical axis with another rule.",
    ]
    check({"fine": shapes["fine"]}, {"fine": axes["fine"]}, mesh)
    with pytest.raises(ValueError, match="no multiple of its 5 units"):
        check({"q": array(8, 64)}, {"q": ("embed", "heads")}, mesh, {"heads": 5})


@pytest.mark.parametrize(
    ("units", "dealt", "layer", "embed", "kv_heads"),
    [
        ({"layer": 8, "kv_heads": 4}, False, ("stage",), ("fsdp",), ("tensor",)),
        ({}, False, ("stage",), ("fsdp",), ("tensor",)),
        ({"layer": 6, "kv_heads": 2}, False, (), ("fsdp", "stage"), ()),
        ({"layer": 8, "kv_heads": 8}, True, (), ("fsdp", "stage"), ("tensor",)),
    ],
)
def test_rules_give_way_where_they_do_not_fit(units, dealt, layer, embed, kv_heads):
    table = fitted(abstract_mesh(fsdp=2, stage=4, tensor=4), units, dealt=dealt)
    assert (table["layer"], table["embed"], table["norm"], table["kv_heads"]) == (layer, embed, embed, kv_heads)
    assert {name for name in RULES if table[name] != RULES[name]} <= {"layer", "embed", "norm", "kv_heads"}
    one_stage = fitted(abstract_mesh(fsdp=2, tensor=4), units, dealt=dealt)
    assert one_stage["layer"] == RULES["layer"] and one_stage["embed"] == RULES["embed"]


def test_copies_fill_the_devices():
    assert copies("act_heads", 3) == 1
    with jax.set_mesh(make_mesh({"tensor": 4})):
        assert [copies("act_heads", heads) for heads in (1, 2, 3, 4, 6, 8)] == [4, 2, 4, 1, 2, 1]
        assert copies("act_embed", 3) == 1


def test_a_mesh_without_the_axes_is_named():
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match="axis='fsdp' is not in mesh"):
        shardings({"w": ("embed",)}, mesh)


MASK = {"w": True, "b": False}
LABELS = {"w": "adam", "b": "sgd"}
PARTS: dict[Hashable, optax.GradientTransformation] = {"adam": optax.adam(1e-3), "sgd": optax.sgd(1e-3, momentum=0.9)}


@pytest.mark.parametrize(
    ("tx", "split"),
    [
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(0, 1, 5), mask=MASK)), "wwbb"),
        (optax.adamw(1e-3, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params)), "wwbb"),
        (optax.masked(optax.adam(1e-3), MASK), "ww"),
        (optax.multi_transform(PARTS, LABELS), "wwb"),
        (optax.MultiSteps(optax.adamw(1e-3), 2).gradient_transformation(), "wwwbbb"),
        (optax.inject_hyperparams(optax.lion)(learning_rate=1e-3), "wb"),
        (optax.adafactor(1e-3, min_dim_size_to_factor=2), "b"),
    ],
    ids=["chain", "mask_function", "masked", "multi_transform", "multi_steps", "inject", "adafactor"],
)
def test_optimizer_state_follows_parameters(tx, split):
    mesh = mesh_of((2, 2, 2))
    param_sh = shardings({"w": ("embed", "mlp"), "b": ("norm",)}, mesh)
    abstract = {"w": array(8, 4), "b": array(8)}

    def init():
        return tx.init(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract))

    abstract_state = jax.eval_shape(init)
    out = state_shardings(tx, abstract_state, param_sh, mesh)
    state = jax.jit(init, out_shardings=out)()
    assert jax.tree.structure(state) == jax.tree.structure(abstract_state)
    followed = [leaf.sharding.spec for leaf in jax.tree.leaves(state) if not leaf.sharding.is_fully_replicated]
    wanted = [param_sh[name].spec for name in split]
    assert sorted(map(str, followed)) == sorted(map(str, wanted))


def test_constrain_is_the_identity_without_a_mesh():
    x = jnp.ones((7, 3))
    assert constrain(x, "batch", "act_mlp") is x
    with jax.set_mesh(mesh_of((1, 1, 1))):
        assert constrain(x, "batch", "act_mlp") is x
    with pytest.raises(ValueError, match="one name for each dim"):
        constrain(x, "batch")


def test_constrain_lays_out_values_and_gradients():
    mesh = mesh_of((2, 2, 2))
    wanted = NamedSharding(mesh, P(("data", "fsdp"), "tensor"))
    with jax.set_mesh(mesh):
        x = jnp.ones((8, 4))
        assert constrain(x, "batch", "act_mlp").sharding.is_equivalent_to(wanted, 2)
        fn = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(constrain(x, "batch", "act_mlp")))))
        assert fn(x).sharding.is_equivalent_to(wanted, 2)
        np.testing.assert_allclose(fn(x), np.cos(np.ones((8, 4))), rtol=1e-6)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_constrain_refuses_what_jax_would_replicate(wrap):
    with jax.set_mesh(mesh_of((1, 4, 2))), pytest.raises(ValueError) as error:
        wrap(lambda x: constrain(x, "batch", "act_mlp"))(jnp.ones((6, 4)))
    for part in ("dim 0 ('batch') has size=6", "data*fsdp=4", "or the size 8"):
        assert part in str(error.value)


def test_constrain_under_vmap_and_shard_map():
    mesh = mesh_of((2, 2, 2))
    x = jnp.arange(32.0).reshape(8, 4)
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(jax.jit(jax.vmap(lambda row: constrain(row, "act_mlp")))(x), x)
        for manual in ({"data"}, {"data", "fsdp"}, set(AXES)):
            split = P(tuple(axis for axis in ("data", "fsdp") if axis in manual))
            body = jax.shard_map(
                lambda x: constrain(x, "batch", "act_mlp") * 2, in_specs=split, out_specs=split, axis_names=manual
            )
            np.testing.assert_array_equal(jax.jit(body)(x), 2 * x)
            np.testing.assert_array_equal(jax.jit(jax.grad(lambda x, f=body: jnp.sum(f(x))))(x), np.full((8, 4), 2.0))


def test_constrain_refuses_explicit_axes():
    sizes = tuple({"context": 1, "stage": 1}.get(axis, 2) for axis in AXES)
    mesh = jax.make_mesh(sizes, AXES, axis_types=(AxisType.Explicit,) * len(AXES))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="Explicit axes .* Build it with make_mesh"):
        constrain(jnp.ones((8, 4)), "batch", "act_mlp")


def test_bytes_per_device_of_abstract_arrays():
    mesh = mesh_of((2, 2, 2))
    tree = {
        "split": jax.ShapeDtypeStruct((8, 4), jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp", "tensor"))),
        "whole": array(3),
        "host": np.zeros(5, np.int8),
    }
    assert bytes_per_device(tree) == ({"split": 16, "whole": 12, "host": 5}, 33)

"""A toy model whose every byte lies where the rules say, and which computes what it computes on one device."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.mesh import make_mesh
from sharding.rules import RULES, bytes_per_device, check, constrain, shardings, spec, state_shardings

MESHES = [(8, 1, 1), (2, 4, 1), (2, 2, 2), (1, 1, 8), (1, 8, 1), (1, 4, 2)]
CASES = [(sizes, True) for sizes in MESHES] + [((2, 2, 2), False), ((1, 4, 2), False)]
WARNING = "Involuntary full rematerialization"
V, D, F, N, K, H, L, B, T = 64, 32, 48, 16, 8, 4, 2, 16, 8


def mesh_of(sizes):
    return make_mesh(dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)))


# A scanned transformer of two layers with grouped heads: the smallest model that uses every parameter rule.


def toy_axes(tied):
    axes = {
        "table": ("table_rows", "table_width"),
        "blocks": {
            "norm": ("layer", "norm"),
            "q": ("layer", "embed", "heads"),
            "kv": ("layer", "embed", "kv_heads"),
            "out": ("layer", "heads", "embed"),
            "up": ("layer", "embed", "mlp"),
            "down": ("layer", "mlp", "embed"),
        },
    }
    return axes if tied else axes | {"head": ("embed", "vocab")}


def toy_params(tied, dtype=jnp.float32):
    sizes = {"table": (V, D), "norm": (L, D), "q": (L, D, N * H), "kv": (L, D, K * H), "out": (L, N * H, D)}
    sizes |= {"up": (L, D, F), "down": (L, F, D), "head": (D, V)}

    def init(path, _):
        name = path[-1].key
        random = np.random.default_rng(list(sizes).index(name))
        return jnp.asarray(random.normal(size=sizes[name]) / math.sqrt(D), dtype)

    return jax.tree_util.tree_map_with_path(init, toy_axes(tied), is_leaf=lambda x: isinstance(x, tuple))


def toy_block(x, w):
    h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w["norm"][None, None, :]
    q = constrain((h @ w["q"]).reshape(B, T, N, H), "batch", "sequence", "act_heads", None)
    k = constrain((h @ w["kv"]).reshape(B, T, K, H), "batch", "sequence", "act_heads", None)
    scores = jnp.einsum("btngh,bsnh->bngts", q.reshape(B, T, K, N // K, H), k) / math.sqrt(H)
    a = jnp.einsum("bngts,bsnh->btngh", jax.nn.softmax(scores), k).reshape(B, T, N * H)
    x = constrain(x + a @ w["out"], "batch", "sequence", "act_embed")
    h = constrain(jax.nn.silu(x @ w["up"]), "batch", "sequence", "act_mlp")
    return constrain(x + h @ w["down"], "batch", "sequence", "act_embed"), None


def toy_loss(params, ids, gather_table=True):
    # Gathered over fsdp once, for the lookup and the tied head alike.
    table = constrain(params["table"], "vocab", "table_width") if gather_table else params["table"]
    x = constrain(table[ids], "batch", "sequence", "act_embed")
    x, _ = jax.lax.scan(jax.checkpoint(toy_block), x, params["blocks"])
    logits = constrain(x @ params.get("head", table.T), "batch", "sequence", "act_vocab")
    target = jnp.take_along_axis(logits, ids[..., None], -1)[..., 0]
    return jnp.sum(jax.nn.logsumexp(logits, -1) - target)


def toy_ids():
    return jnp.asarray(np.random.default_rng(0).integers(0, V, (B, T)), jnp.int32)


@functools.cache
def unsharded(tied):
    return jax.jit(jax.value_and_grad(toy_loss))(toy_params(tied, jnp.float64), toy_ids())


@pytest.mark.parametrize(("sizes", "tied"), CASES)
def test_every_byte_lies_where_the_rules_say_and_gradients_are_those_of_one_device(sizes, tied, capfd):
    mesh, axes = mesh_of(sizes), toy_axes(tied)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 10)))

    def step(params, state, ids):
        loss, grads = jax.value_and_grad(toy_loss)(params, ids)
        updates, state = tx.update(grads, state, params)
        return loss, grads, optax.apply_updates(params, updates), state

    with jax.enable_x64(True):  # in float64 a wrong layout cannot hide in rounding
        want_loss, want_grads = unsharded(tied)
        with jax.set_mesh(mesh):
            params = toy_params(tied, jnp.float64)
            check(params, axes, mesh, {"heads": N, "kv_heads": K})
            shapes, param_sh = jax.eval_shape(tx.init, params), shardings(axes, mesh)
            state_sh = state_shardings(tx, shapes, param_sh, mesh)
            params = jax.device_put(params, param_sh)
            state = jax.device_put(jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes), state_sh)
            ids = jax.device_put(toy_ids(), NamedSharding(mesh, spec(("batch", "sequence"))))
            train = jax.jit(step, out_shardings=(None, param_sh, param_sh, state_sh), donate_argnums=(0, 1))
            loss, grads, params, state = train(params, state, ids)
    assert WARNING not in capfd.readouterr().err
    assert jax.tree.map(lambda g: g.sharding, grads) == param_sh
    np.testing.assert_allclose(loss, want_loss, rtol=1e-13)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        assert np.max(np.abs(np.asarray(got) - np.asarray(want))) <= 1e-12 * np.max(np.abs(np.asarray(want)))

    def expected(leaf, names):
        ways = math.prod(mesh.shape[axis] for name in names for axis in RULES[name])
        return leaf.size * leaf.dtype.itemsize // ways

    wanted = jax.tree.map(expected, params, axes)
    wanted = {jax.tree_util.keystr(p, simple=True, separator="/"): b for p, b in jax.tree.leaves_with_path(wanted)}
    held, total = bytes_per_device(params)
    assert held == wanted
    assert total == sum(wanted.values())
    adam, schedule = state[1][0], state[1][2]
    assert bytes_per_device(adam.mu)[0] == wanted
    assert bytes_per_device(adam.nu)[0] == wanted
    assert adam.count.sharding.is_fully_replicated and schedule.count.sharding.is_fully_replicated
    shard = params["blocks"]["up"].addressable_shards[0].data
    assert shard.nbytes == wanted["blocks/up"]  # what is stored, not only what the sharding claims


def test_the_warning_is_visible(capfd):
    """The control: the layout that RULES avoids must warn here, or the test above sees nothing."""
    mesh = mesh_of((1, 4, 2))
    with jax.set_mesh(mesh):
        param_sh = shardings(toy_axes(True), mesh) | {"table": NamedSharding(mesh, P("tensor", "fsdp"))}
        ids_sh = NamedSharding(mesh, spec(("batch", "sequence")))
        grad = jax.grad(lambda p, i: toy_loss(p, i, gather_table=False))
        grad = jax.jit(grad, in_shardings=(param_sh, ids_sh), out_shardings=param_sh)
        grad.lower(*jax.eval_shape(lambda: (toy_params(True), toy_ids()))).compile()
    assert WARNING in capfd.readouterr().err


def test_the_table_is_not_permuted():
    """Rows over (tensor, fsdp) reach the vocab layout by a gather alone; (fsdp, tensor) needs a permutation too."""

    def permutes(rows):
        mesh = mesh_of((1, 4, 2))
        with jax.set_mesh(mesh):
            fn = jax.jit(lambda t: constrain(t, "vocab", None), in_shardings=NamedSharding(mesh, P(rows, None)))
            return "collective-permute" in str(
                fn.lower(jax.eval_shape(lambda: toy_params(True))["table"]).compile().as_text()
            )

    assert not permutes(RULES["table_rows"])
    assert permutes(RULES["table_rows"][::-1])

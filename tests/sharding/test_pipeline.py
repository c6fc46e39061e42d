"""A pipeline of toy layers equals the loop over them: loss and gradients, FSDP and tensor axes inside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharding import pipeline
from sharding.chunks import collect, deal
from sharding.lookup import take_rows
from sharding.mesh import make_mesh
from sharding.rules import constrain, fitted, shardings, spec
from sharding.schedule import make_schedule
from tests.equations import equations

V, D, F, B, T = 16, 16, 8, 4, 6
AXES = {"up": ("layer", "embed", "mlp"), "down": ("layer", "mlp", "embed"), "bias": ("layer", "mlp")}
QUICK: dict[str, str | bool] = {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": True}


def parameters(n_layers):
    rng = np.random.default_rng(n_layers)
    sizes = {"up": (n_layers, D, F), "down": (n_layers, F, D), "bias": (n_layers, F)}
    layers = {name: rng.normal(size=size) / np.sqrt(size[-2]) for name, size in sizes.items()}
    return layers, {"table": rng.normal(size=(V, D))}


def batch(microbatches):
    """Masks keep from none to all of a row."""
    rng = np.random.default_rng(microbatches)
    kept = rng.integers(0, T + 1, (microbatches, B, 1))
    ids = rng.integers(0, V, (microbatches, B, T), dtype=np.int32)
    return {"ids": ids, "mask": np.arange(T) < kept}


def layer(params, x):
    """Its value and its derivatives at zero, which is what bubbles compute on, are not finite."""
    direction = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True))
    hidden = jnp.tanh(constrain(direction @ params["up"], "batch", "sequence", "act_mlp") + params["bias"][None, None])
    return constrain(x + hidden @ params["down"], "batch", "sequence", "act_embed")


def embed(shared, rows):
    return constrain(take_rows(constrain(shared["table"], "vocab", None), rows["ids"]), "batch", "sequence", None)


def head(shared, x, rows):
    """A tied table; targets are the ids themselves."""
    logits = constrain(x @ constrain(shared["table"], "vocab", None).T, "batch", "sequence", "act_vocab")
    chosen = jnp.where(jax.nn.one_hot(rows["ids"], V, dtype=bool), logits, 0).sum(-1)
    nats = jnp.where(rows["mask"], jax.nn.logsumexp(logits, axis=-1) - chosen, 0)
    return nats.sum(), rows["mask"].sum().astype(jnp.float32)


def by_stages(mesh, schedule, n_layers, *, forward=True):
    """(loss sum, count), gradients by layers and shared, and, if asked for, the same (sum, count) forward alone."""
    table = fitted(mesh, {"layer": n_layers}, dealt=schedule.chunks > 1)
    specs = {name: spec(names, table) for name, names in AXES.items()}

    def part_of_head(shared, x, rows, part):
        own = jnp.broadcast_to(jnp.arange(T) % schedule.stages == part, rows["mask"].shape)
        return head(shared, x, rows | {"mask": rows["mask"] & own})

    model = pipeline.Stages(
        embed=embed, place=lambda p: p, layer=lambda params, x, rows: layer(params, x),
        parts=lambda x: jnp.broadcast_to(x, (schedule.stages, *x.shape)), head=part_of_head, n_layers=n_layers,
    )  # fmt: skip

    def run(params, shared, batch):
        chunks = deal(schedule, params, specs)
        by_chunks, by_shared, sums = pipeline.gradients(schedule, model, chunks, shared, batch)
        by_layers = collect(by_chunks, specs, n_layers)
        alone = pipeline.loss_sum(schedule, model, chunks, shared, batch) if forward else None
        return sums, (by_layers, by_shared), alone

    where = shardings(AXES, mesh, table), {"table": shardings(("table_rows", None), mesh)}
    rows = {name: jax.NamedSharding(mesh, P(None, *spec(("batch", "sequence")))) for name in ("ids", "mask")}
    return jax.jit(run, in_shardings=(*where, rows), out_shardings=(None, where, None), compiler_options=QUICK)


def in_a_loop(params, shared, batch):
    def loss(params, shared, rows):
        x, _ = jax.lax.scan(lambda x, params: (layer(params, x), None), embed(shared, rows), params)
        return head(shared, x, rows)

    (sums, counts), grads = jax.vmap(
        jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), in_axes=(None, None, 0)
    )(params, shared, batch)  # fmt: skip
    return (sums.sum(), counts.sum()), jax.tree.map(lambda g: g.sum(0), grads)


CASES = [
    ("1f1b", 1, {"stage": 4, "tensor": 2}, 7, 5),
    ("interleaved", 2, {"data": 2, "fsdp": 2, "stage": 2}, 6, 3),
]
SLOW = [
    ("gpipe", 1, {"fsdp": 2, "stage": 2, "tensor": 2}, 4, 3),
    ("1f1b", 1, {"stage": 8}, 61, 3),
    ("1f1b", 1, {"data": 2, "stage": 4}, 4, 1),
    ("interleaved", 2, {"stage": 4, "tensor": 2}, 9, 6),
    ("interleaved", 3, {"fsdp": 4, "stage": 2}, 6, 5),
]


@pytest.mark.parametrize(
    ("name", "chunks", "axes", "n_layers", "microbatches"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_stages_equal_the_loop(name, chunks, axes, n_layers, microbatches):
    mesh = make_mesh(axes)
    schedule = make_schedule(name, stages=axes["stage"], microbatches=microbatches, chunks=chunks)
    operands = *parameters(n_layers), batch(microbatches)
    with jax.enable_x64(True):  # in float64 nothing wrong can hide in rounding
        want_sums, want = jax.jit(in_a_loop, compiler_options=QUICK)(*operands)
        with jax.set_mesh(mesh):
            have = by_stages(mesh, schedule, n_layers)(*operands)
        want_sums, want, (sums, grads, forward) = jax.tree.map(np.asarray, (want_sums, want, have))
    assert sums[1] == forward[1] == want_sums[1] == batch(microbatches)["mask"].sum()
    np.testing.assert_allclose([sums[0], forward[0]], [want_sums[0]] * 2, rtol=1e-12)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(want), strict=True):
        largest = np.abs(b).max()
        assert largest > 0 and np.abs(a - b).max() <= 1e-12 * largest, path


def test_no_loop_over_layers_stacks_what_it_finds():
    """Of a stack that a loop returns XLA clears and copies as much again: a tenth of a step (ARCHITECTURE's log)."""
    schedule = make_schedule("interleaved", stages=2, microbatches=4, chunks=2)
    mesh = make_mesh({"stage": 2})
    with jax.set_mesh(mesh):
        traced = by_stages(mesh, schedule, 8).trace(*parameters(8), batch(4))
    over_layers = [
        loop for loop in equations(traced.jaxpr.jaxpr, "scan") if loop.params["length"] == schedule.capacity(8)
    ]
    assert len(over_layers) == 3  # forward, backward, and of the loss alone
    for loop in over_layers:
        assert [x.aval.shape for x in loop.outvars] == [x.shape for x in loop.params["jaxpr"].out_avals]


def temporary_bytes(name, microbatches, chunks=1):
    mesh = make_mesh({"stage": 2})
    schedule = make_schedule(name, stages=2, microbatches=microbatches, chunks=chunks)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32 if x.dtype == np.float64 else x.dtype),
        (*parameters(4), batch(microbatches)),
    )
    with jax.set_mesh(mesh):
        analysis = by_stages(mesh, schedule, 4, forward=False).lower(*shapes).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), pytest.param("interleaved", 2, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_microbatches(name, chunks):
    assert temporary_bytes(name, 128, chunks) <= 1.05 * temporary_bytes(name, 32, chunks)


@pytest.mark.slow
def test_the_control_grows():
    """GPipe keeps an input a microbatch, which the figure of the test above must show."""
    assert temporary_bytes("gpipe", 128) - temporary_bytes("gpipe", 32) >= 96 * B * T * D * 4

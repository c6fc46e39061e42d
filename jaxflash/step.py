"""One optimizer step, one evaluation step, and their compilation for a mesh.

    abstract model -> rules -> shardings of parameters, optimizer state and step -> ahead-of-time compiled functions

Step and evaluation are compiled once: a call of another shape, dtype or layout is an error, not a second compilation.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxflash import adapters, stages
from jaxflash.checkpoint import TrainState
from jaxflash.config import TrainConfig
from jaxflash.loss import chunked_cross_entropy
from jaxflash.model import abstract, axis_units, init_params
from pallas_kernels import dispatch
from pallas_kernels.attention.api import IMPLEMENTATIONS
from sharding import rules
from sharding.once import Sums, summed_once
from sharding.ring import zigzag

# Of a custom call whose result is stacked and used elsewhere too, as that of attention, XLA's fusion with the stacking
# is a second call: the forward kernel ran twice a layer (H200, jaxlib 0.11.2, "1b": 1.076 s a step, 1.050 without it).
COMPILER_OPTIONS = {"xla_gpu_enable_dynamic_slice_fusion": False}


def make_optimizer(config: TrainConfig, axes: Any) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Global-norm clipping, then AdamW (1711.05101) with linear warm-up and cosine decay; and the schedule itself.

    Matrices are decayed, norm scales and biases are not. axes: the trained parameters' logical axes, for their tree and
    names.
    """
    warm, decay = config.warmup_steps, config.decay_steps
    cosine = optax.cosine_decay_schedule(config.learning_rate, max(decay - warm, 1), config.final_lr_fraction)
    ramp = optax.linear_schedule(0.0, config.learning_rate, max(warm, 1))
    joined = optax.join_schedules([ramp, cosine], [warm])

    def schedule(count):  # counted from one: a first step at rate zero would be a wasted batch
        return joined(count + 1)

    def is_matrix(path, _) -> bool:
        return path[-1].key in ("weight", "table", "lora_a", "lora_b")

    mask = jax.tree_util.tree_map_with_path(is_matrix, axes, is_leaf=lambda a: isinstance(a, tuple))
    moments = config.beta1, config.beta2, config.epsilon
    adamw = optax.adamw(schedule, *moments, weight_decay=config.weight_decay, mask=mask)
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw), schedule


def loss_sum(
    graph: Any, params: Any, rows: dict[str, jax.Array], chunk: int, shards: int = 1, frozen: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Summed next-token loss of (b, T) rows in nats, and the number of tokens it sums over.

    shards: over how many devices the rows are cut, in zigzag order. frozen: None, or what `params` are the adapters of;
    rows may then have a key, "dropout".
    """
    whole = params if frozen is None else adapters.join(frozen, params, rows.get("dropout"))
    model = nnx.merge(graph, whole)
    ids = rows.get("segment_ids")
    hidden = model.hidden(rows["tokens"], positions=rows["positions"], segment_ids=ids, zigzag=shards)
    targets, mask = rows["targets"], rows["loss_mask"]
    return chunked_cross_entropy(model.logits, hidden, targets, mask, chunk=chunk, shards=shards)


def gradients(
    graph: Any,
    params: Any,
    batch: dict[str, jax.Array],
    chunk: int,
    shards: int = 1,
    frozen: Any = None,
    once: Callable[[Sums], Sums] = lambda sums: sums,
) -> tuple[Any, jax.Array, jax.Array]:
    """Gradient of the mean loss over all tokens of an (A, b, T) batch in float32, the loss sum and the token count.

    The A microbatches are summed, tokens and all, and divided once: the same gradient for any A. frozen: as of
    `loss_sum`; nothing is computed for its gradient. once: see that the mesh adds up the sums over microbatches
    (`sharding.once`), and not every term of them.
    """
    grads, (total, count) = once(functools.partial(_gradient_sums, graph, chunk, shards, frozen))(params, batch)
    scale = 1.0 / jnp.maximum(count, 1.0)
    return jax.tree.map(lambda g: g.astype(jnp.float32) * scale, grads), total, count


def _gradient_sums(
    graph: Any, chunk: int, shards: int, frozen: Any, params: Any, batch: dict[str, jax.Array]
) -> tuple[Any, Any]:
    """(gradient, (loss sum, token count)) of the microbatches together."""
    grad = jax.value_and_grad(lambda p, rows: loss_sum(graph, p, rows, chunk, shards, frozen), has_aux=True)

    def of(rows):
        sums, grads = grad(params, rows)
        return grads, sums

    def add(carry, rows):
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), carry, of(rows)), None

    if batch["tokens"].shape[0] == 1:  # no accumulator to hold beside the gradient
        return of({k: v[0] for k, v in batch.items()})
    zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)
    nothing = jnp.zeros_like(batch["loss_mask"], jnp.float32, shape=())  # marked as the sums are, in a shard_map
    return jax.lax.scan(add, (zeros, (nothing, nothing)), batch)[0]


def train_step(
    config: TrainConfig,
    mesh: Mesh,
    tx: optax.GradientTransformation,
    schedule: optax.Schedule,
    shardings: Any,
    state: TrainState,
    batch: dict[str, jax.Array],
    frozen: Any = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimizer step; pure. shardings: of the trained parameters' gradients and of the optimizer's state.

    The parameters are updated in that layout too, each device its part, whatever they are stored in. frozen: as of
    `loss_sum`.
    """
    if config.lora is not None and config.lora.dropout:
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        batch = {**batch, "dropout": jax.random.split(key, config.accumulate)}
    grads, total, count = loss_functions(config, mesh, frozen)[0](state.params, batch)
    grads, params = jax.lax.with_sharding_constraint((grads, state.params), (shardings, shardings))
    updates, opt_state = tx.update(grads, state.opt_state, params)
    params = optax.apply_updates(params, updates)
    metrics = {
        "loss": total / jnp.maximum(count, 1.0),
        "tokens": count,
        "grad_norm": optax.tree.norm(grads),
        "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
    }
    return TrainState(params, opt_state, state.step + 1), metrics


def eval_step(
    config: TrainConfig, mesh: Mesh, params: Any, sums: jax.Array, rows: dict[str, jax.Array], frozen: Any = None
) -> jax.Array:
    """`sums + (loss sum, token count)` of (b, T) rows."""
    return sums + jnp.stack(loss_functions(config, mesh, frozen)[1](params, rows))


@dataclasses.dataclass(frozen=True)
class Program:
    """A run's compiled pieces on its mesh: shapes and layouts of the state, and the functions that move it."""

    mesh: Mesh
    state: TrainState  # ShapeDtypeStructs with shardings
    init: Callable[[], TrainState]
    step: Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]
    evaluate: Callable[[Any, jax.Array, Any], jax.Array]
    rows: int  # of a microbatch, over the whole mesh
    frozen: Any = None  # where the state is of adapters: the parameters that they belong to

    @functools.cached_property
    def own_rows(self) -> np.ndarray:
        """Which rows of a microbatch the devices of this process hold, ascending: those that it reads."""
        held = _rows_sharding(self.mesh, 1).addressable_devices_indices_map((self.rows,)).values()
        return np.unique(np.concatenate([np.arange(self.rows)[index] for index in held if index is not None]))

    def put(self, arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """The own rows (..., o, T) of each process onto the mesh, as (..., b, T).

        Rows lie over the batch axes, their places, in zigzag order, over the sequence axes.
        """
        shards = rules.ways("sequence", self.mesh)

        def one(x: np.ndarray) -> jax.Array:
            x = zigzag(x, shards, axis=-1)

            def part(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None  # of a device of this process
                *before, row, place = index
                wanted = np.arange(self.rows)[row]
                first = int(np.searchsorted(self.own_rows, wanted[0]))  # a device's rows are neighbours
                return x[(*before, slice(first, first + len(wanted)), place)]

            shape = (*x.shape[:-2], self.rows, x.shape[-1])
            return jax.make_array_from_callback(shape, _rows_sharding(self.mesh, x.ndim), part)

        return {name: one(x) for name, x in arrays.items()}


def compile_program(config: TrainConfig, mesh: Mesh, start: Any = None) -> Program:
    """Lays the state out by rule and compiles step and evaluation; nothing is allocated before every check has passed.

    start: a model's parameters on `mesh`. With `config.lora` they stay as they are, and the state is of adapters;
    without, the state begins with them, and `init` takes them over. None: the state begins with fresh parameters.

    Raises:
      ValueError: a parameter's dim, the heads, the batch or its rows do not divide over the mesh.
    """
    check_layout(config, mesh)
    begin, arguments, frozen, axes = _trained(config, start)
    tx, schedule = make_optimizer(config, axes)

    def init(*arguments: Any) -> TrainState:
        params = begin(*arguments)
        # Moments in float32 whatever the parameters are: the gradients that they average are.
        moments = tx.init(jax.tree.map(lambda p: p.astype(jnp.float32), params))
        return TrainState(params, moments, jnp.zeros((), jnp.int32))

    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(init, *arguments)
        params = rules.shardings(axes, mesh, stages.parameter_rules(config, mesh))
        split = rules.shardings(axes, mesh, stages.layout_rules(config, mesh))
        opt_state = rules.state_shardings(tx, shapes.opt_state, split, mesh)
        shardings = TrainState(params, opt_state, NamedSharding(mesh, P()))
        state = jax.tree.map(lambda s, d: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=d), shapes, shardings)

        step = functools.partial(train_step, config, mesh, tx, schedule, split)
        replicated = NamedSharding(mesh, P())
        step = jax.jit(step, out_shardings=(shardings, replicated), donate_argnums=0, compiler_options=COMPILER_OPTIONS)
        evaluate = jax.jit(functools.partial(eval_step, config, mesh), out_shardings=replicated)
        rows = _abstract_rows(config, mesh)
        sums = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=replicated)
        micro = {k: _micro(v, mesh) for k, v in rows.items()}
        rest = () if frozen is None else (frozen,)
        first = jax.jit(init, out_shardings=shardings, donate_argnums=tuple(range(len(arguments))))
        return Program(
            mesh=mesh,
            state=state,
            init=lambda: first(*arguments),
            step=_followed_by(step.lower(state, rows, *rest).compile(), rest),
            evaluate=_followed_by(evaluate.lower(state.params, sums, micro, *rest).compile(), rest),
            rows=config.batch_size // config.accumulate,
            frozen=frozen,
        )


def _trained(config: TrainConfig, start: Any) -> tuple[Callable[..., Any], tuple[Any, ...], Any, Any]:
    """(how trained parameters begin, the arguments of that, what is not trained or None, axes of the former)."""
    axes = abstract(config.model)[2]
    if config.lora is not None:
        begin = functools.partial(adapters.init_adapters, config.model, config.lora, config.seed)
        frozen = adapters.freeze(config.model, start, config.lora)
        return begin, (), frozen, adapters.adapter_axes(config.model, config.lora)
    if start is not None:
        return lambda params: params, (start,), None, axes
    return functools.partial(init_params, config.model, config.seed), (), None, axes


def _followed_by(compiled: Any, rest: tuple[Any, ...]) -> Any:
    """The compiled function of fewer arguments, where the last ones are always the same."""
    return (lambda *args: compiled(*args, *rest)) if rest else compiled


def loss_functions(
    config: TrainConfig, mesh: Mesh, frozen: Any = None
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`gradients` of (params, batch) and `loss_sum` of (params, rows): over the mesh's stages, or without any.

    frozen: as of `loss_sum`; there are no stages then.
    """
    schedule = stages.schedule_of(config, mesh)
    if schedule is not None:
        pipeline = stages.Pipeline(config, mesh, schedule)
        return pipeline.gradients, pipeline.loss_sum
    graph, _, axes = abstract(config.model)
    how: dict[str, Any] = {"chunk": config.loss_chunk, "shards": rules.ways("sequence", mesh), "frozen": frozen}
    loss = functools.partial(loss_sum, graph, **how)
    if frozen is not None:  # adapters are small: their sums may go round once a microbatch
        return functools.partial(gradients, graph, **how), loss
    specs = rules.specs(axes, stages.layout_rules(config, mesh))
    once = functools.partial(summed_once, axes=stages.once_axes(config, mesh), specs=specs)
    return functools.partial(gradients, graph, **how, once=once), loss


def check_layout(config: TrainConfig, mesh: Mesh | AbstractMesh) -> None:
    """All that can be known of a run on a mesh before data is read: batch, parameters, heads, implementation.

    Raises:
      ValueError: something does not divide (all parameters are named at once), or an unknown name.
    """
    if config.model.attention is not None:
        dispatch.find(IMPLEMENTATIONS, "train", config.model.attention)
    stages.check(config, mesh)
    if config.lora is not None:
        adapters.targets(config.model, config.lora)
    _, shapes, axes = abstract(config.model)
    rules.check(shapes, axes, mesh, axis_units(config.model), stages.layout_rules(config, mesh))
    check_rows(config, mesh)


def check_rows(config: TrainConfig, mesh: Mesh | AbstractMesh) -> None:
    """That the rows of a microbatch, and their places, divide over the mesh.

    Raises:
      ValueError: they do not; names the nearest batch_size or seq_len.
    """
    ways = rules.ways("batch", mesh)
    rows = config.batch_size // config.accumulate
    if rows % ways:
        nearest = max(round(rows / ways), 1) * ways * config.accumulate
        raise ValueError(
            f"train: batch_size={config.batch_size} with accumulate={config.accumulate} gives {rows} rows at a time, "
            f"not divisible by the {ways} ways of the mesh's batch axes {dict(mesh.shape)}. "
            f"The nearest batch_size that works is {nearest}."
        )
    shards = rules.ways("sequence", mesh)
    if shards > 1 and config.seq_len % (2 * shards):
        nearest = max(round(config.seq_len / (2 * shards)), 1) * 2 * shards
        raise ValueError(
            f"train: seq_len={config.seq_len} is not divisible by {2 * shards}, two chunks for each of the {shards} "
            f"devices that a row is cut over on mesh {dict(mesh.shape)}. The nearest seq_len that works is {nearest}."
        )


def _abstract_rows(config: TrainConfig, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    shape = (config.accumulate, config.batch_size // config.accumulate, config.seq_len)
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "loss_mask": jnp.bool_, "positions": jnp.int32}
    if config.packing == "documents":
        dtypes["segment_ids"] = jnp.int32
    return {k: jax.ShapeDtypeStruct(shape, d, sharding=_rows_sharding(mesh, 3)) for k, d in dtypes.items()}


def _rows_sharding(mesh: Mesh, ndim: int) -> NamedSharding:
    """Of rows (b,), and of (..., b, T)."""
    return NamedSharding(mesh, P(*[None] * (ndim - 2), *rules.spec(("batch", "sequence")[:ndim])))


def _micro(rows: jax.ShapeDtypeStruct, mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype, sharding=_rows_sharding(mesh, 2))

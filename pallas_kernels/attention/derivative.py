"""One differentiable function of a forward and a backward kernel: derivatives, vmap and sharding, whatever they are.

Three primitives. In brackets, what runs: the kernels at first order, the exact path at every other.

    attention           q, k, v                          -> out, lse           [forward kernel]
    attention_tangent   q, k, v, out, lse; dq, dk, dv    -> tangents of both   [jvp of exact], linear in dq, dk, dv
    attention_backward  q, k, v, out, lse, dout[, dlse]  -> dq, dk, dv         [backward kernel]

    jvp(attention) = attention, names for `jax.checkpoint`, attention_tangent
    transpose(attention_tangent) = attention_backward
    jvp(attention_tangent), jvp(attention_backward) = jvp of what they compute, by the exact path

Reverse mode transposes the tangent and never evaluates it, so it runs kernels only. `jax.custom_vjp` has no jvp. HiPrim
(`jax.experimental.hijax`) has one beside its vjp, but `jax.checkpoint` differentiates by the jvp alone: under it the
kernels would not run backward. The signatures of its rules also differ between jax 0.11 and 0.12.

The shard_map is inside the primitives: rules and names are outside it, and a kernel sees the arrays of one device. So
does a kernel over shards of a sequence (`context`), which talks to the other devices; sequences are cut where the spec
says so, whose T and S stay those of the whole.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from pallas_kernels import unmarked
from pallas_kernels.attention.spec import OP, AttentionSpec
from pallas_kernels.device import alone
from pallas_kernels.dispatch import Unsupported
from sharding.local import axes_of, dividing, free_axes

# Dims of every operand and result: B batch, T and S of sequences, N and K heads, the rest whole on every device.
_QUERY, _KEY, _VALUE, _OUT, _LSE = "BTNH", "BSKH", "BSKV", "BTNV", "BTN"
_SCALES = ["BNI", "BKJ", "BKL"]  # of e4m3 numbers, along their sequences
_OPTIONAL = {"query_lengths": "B", "kv_lengths": "B", "query_segments": "BT", "kv_segments": "BS"}


def differentiable(forward: Callable[..., Any], backward: Callable[..., Any], *, exact: Callable[..., Any]) -> Callable:
    """The `forward` of an Implementation made of two kernels. The three are module-level functions: jit caches by them.

    Args:
      forward: (spec, q, k, v, *, scale, query_lengths, kv_lengths, query_segments, kv_segments) -> (out, lse).
      backward: (spec, q, k, v, out, lse, dout, dlse or None, *, as above) -> (dq, dk, dv). dlse is None where nothing
        depends on the LSE; dout is always an array.
      exact: called as forward is; any jax function of linear memory that jax differentiates by itself. It serves jvp,
        linearize and everything beyond first order.

    The kernels see the shards of one device and a spec of their sizes, but for T and S where `spec.context` is not 1;
    the scale is a Python number. Under
    `jax.checkpoint`, a policy that saves the names "attention_out" and "attention_lse" keeps the forward kernel from
    running again. vmap folds its axis into the batch and broadcasts what it does not map.
    """

    def attend(
        spec: AttentionSpec,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S K H"],
        value: Float[Array, "B S K H_v"],
        *,
        scale: float,
        query_lengths: Int[Array, " B"] | None = None,
        kv_lengths: Int[Array, " B"] | None = None,
        query_segments: Int[Array, "B T"] | None = None,
        kv_segments: Int[Array, "B S"] | None = None,
        **unused: None,
    ) -> tuple[Float[Array, "B T N H_v"], Float[Array, "B T N"]]:
        optional = dict(zip(_OPTIONAL, (query_lengths, kv_lengths, query_segments, kv_segments), strict=True))
        given = {name: x for name, x in optional.items() if x is not None}
        call = _Call(spec=spec, scale=scale, optional=tuple(given), forward=forward, backward=backward, exact=exact)
        out, lse = _attention(*unmarked.equally_varying(query, key, value, *given.values()), call=call)
        return out, lse

    return attend


def without_derivative(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward(spec, q, k, v, q_scale, k_scale, v_scale, *, scale, ...)` of e4m3 numbers, with all of that but it."""

    def attend(spec: AttentionSpec, *arrays: Array, scale: float, **optional: Any) -> tuple[Array, Array]:
        given = {name: optional[name] for name in _OPTIONAL if optional.get(name) is not None}
        call = _Call(spec=spec, scale=scale, optional=tuple(given), forward=forward, backward=forward, exact=forward)
        out, lse = _attention_of_codes(*unmarked.equally_varying(*arrays, *given.values()), call=call)
        return out, lse

    return attend


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """The static half of a call. Sizes are read from the arrays, so that vmap and shards need no other _Call."""

    spec: AttentionSpec
    scale: float
    optional: tuple[str, ...]
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    exact: Callable[..., Any]

    @property
    def optional_dims(self) -> list[str]:
        return [_OPTIONAL[name] for name in self.optional]

    @property
    def whole(self) -> "_Call":
        """The call on sequences that are whole on every device."""
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, context=1))

    def run(self, function: Callable[..., Any], arrays: Sequence[Any], optional: Sequence[Any]) -> Any:
        query, key = arrays[:2]
        spec = dataclasses.replace(self.spec, B=query.shape[0], N=query.shape[2], K=key.shape[2])
        named = dict.fromkeys(_OPTIONAL) | dict(zip(self.optional, optional, strict=True))
        return function(spec, *arrays, scale=self.scale, **named)

    def exact_of(self, optional: Sequence[Any]) -> Callable[..., Any]:
        return lambda *qkv: tuple(self.run(self.exact, qkv, optional))


# ---- what the primitives compute


def _forward(*arrays: Array, call: _Call) -> list[Array]:
    def kernel(call, q, k, v, *optional):
        return tuple(call.run(call.forward, (q, k, v), optional))

    return _by_shards(kernel, call, [_QUERY, _KEY, _VALUE, *call.optional_dims], [_OUT, _LSE], arrays)


def _forward_of_codes(*arrays: Array, call: _Call) -> list[Array]:
    """Operands q, k, v, their scales and the optional ones."""

    def kernel(call, *arrays):
        return tuple(call.run(call.forward, arrays[:6], arrays[6:]))

    return _by_shards(kernel, call, [_QUERY, _KEY, _VALUE, *_SCALES, *call.optional_dims], [_OUT, _LSE], arrays)


def _backward(*arrays: Array, call: _Call) -> list[Array]:
    """Operands q, k, v, out, lse, dout, the optional ones, and dlse if there is one."""
    count = 6 + len(call.optional)

    def kernel(call, *arrays):
        dlse = arrays[count] if len(arrays) > count else None
        return tuple(call.run(call.backward, (*arrays[:6], dlse), arrays[6:count]))

    dims = [_QUERY, _KEY, _VALUE, _OUT, _LSE, _OUT, *call.optional_dims, _LSE]
    return _by_shards(kernel, call, dims[: len(arrays)], [_QUERY, _KEY, _VALUE], arrays)


def _exact_backward(*arrays: Array, call: _Call) -> list[Array]:
    """As `_backward`, of q, k, v, dout and dlse alone: derivatives by out and lse are in those by q, k and v."""
    count = 6 + len(call.optional)
    q, k, v, _, lse, dout = arrays[:6]
    dlse = arrays[count] if len(arrays) > count else jnp.zeros_like(lse)
    return list(jax.vjp(call.exact_of(arrays[6:count]), q, k, v)[1]((dout, dlse)))


def _exact_tangent(*arrays: Array, call: _Call, moved: tuple[bool, ...]) -> list[Array]:
    """Operands q, k, v, out, lse, the optional ones, and a tangent of each of q, k, v that is `moved`."""
    count = 5 + len(call.optional)
    primals, optional, tangents = arrays[:3], arrays[5:count], arrays[count:]
    where = [i for i, moves in enumerate(moved) if moves]
    function = _restricted(call.exact_of(optional), primals, where)
    return list(jax.jvp(function, [primals[i] for i in where], list(tangents))[1])


def _restricted(function: Callable[..., Any], arrays: Sequence[Any], where: Sequence[int]) -> Callable[..., Any]:
    """As a function of the arrays at these places, the others fixed."""

    def restricted(*some):
        full = list(arrays)
        for i, x in zip(where, some, strict=True):
            full[i] = x
        return function(*full)

    return restricted


# ---- the primitives and their rules


def _fold(bind: Callable[..., Any], arrays: Sequence[Any], dims: Sequence[Any], **static: Any) -> tuple[Any, Any]:
    """vmap: every operand and result has the batch first, and the mapped axis becomes its inner part.

    Inner, because a batch that is split over devices then stays in the same places.
    """
    size = next(x.shape[dim] for x, dim in zip(arrays, dims, strict=True) if dim is not None)

    def folded(x: Any, dim: int | None) -> Any:
        if dim is None:
            x = jnp.broadcast_to(x[:, None], (x.shape[0], size, *x.shape[1:]))
        else:
            x = jnp.moveaxis(x, dim, 1)
        return x.reshape(-1, *x.shape[2:])

    results = bind(*map(folded, arrays, dims), **static)
    return [x.reshape(-1, size, *x.shape[1:]) for x in results], [1] * len(results)


class _Kernel:
    """A primitive that runs a kernel. Its parameter `jaxpr` is the kernel with what splits it over the mesh in force.

    That is traced where the primitive is called: by the mesh of that place, with errors that point there, and so that
    jax finds the custom_partitioning in it, which it must before it lowers the program.
    """

    def __init__(self, name: str, function: Callable[..., Any]):
        self.compiled = jax.jit(lambda call, *arrays: function(*arrays, call=call), static_argnums=0)
        primitive = self.primitive = Primitive(name)
        primitive.multiple_results = True
        primitive.def_impl(lambda *arrays, call, jaxpr: self.compiled(call, *arrays))
        # A shard_map within does not say over which axes of one around it the results vary: as the operands do.
        primitive.def_abstract_eval(lambda query, *_, call, jaxpr: unmarked.marked(jaxpr, query))
        mlir.register_lowering(primitive, unmarked.lower)
        batching.primitive_batchers[primitive] = self.batch

    def batch(self, arrays: Sequence[Any], dims: Sequence[Any], *, call: _Call, jaxpr: Any) -> tuple[Any, Any]:
        return _fold(self, arrays, dims, call=call)  # the jaxpr is of the sizes without the mapped axis

    def __call__(self, *arrays: Any, call: _Call) -> list[Any]:
        jaxpr = self.compiled.trace(call, *unmarked.plain(arrays)).jaxpr
        return self.primitive.bind(*arrays, call=call, jaxpr=jaxpr)


def _attention_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: _Call, jaxpr: Any) -> tuple[Any, Any]:
    out, lse = _attention.primitive.bind(*primals, call=call, jaxpr=jaxpr)
    # Named here, where they become residuals: outside the rule a policy would save copies that nothing reads.
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    # Lengths and segment ids are integers: their tangents are always zero.
    moved = tuple(type(tangent) is not ad.Zero for tangent in tangents[:3])
    given = [tangent for tangent, moves in zip(tangents, moved, strict=False) if moves]
    return (out, lse), _tangent.bind(*primals[:3], out, lse, *primals[3:], *given, call=call, moved=moved)


def _tangent_transpose(cotangents: Sequence[Any], *arrays: Any, call: _Call, moved: tuple[bool, ...]) -> list[Any]:
    residuals = arrays[: 5 + len(call.optional)]
    q, k, v, out, lse, *optional = residuals
    dout, dlse = cotangents
    dout = jnp.zeros_like(out) if type(dout) is ad.Zero else dout
    given = [] if type(dlse) is ad.Zero else [dlse]
    gradients = _attention_backward(q, k, v, out, lse, dout, *optional, *given, call=call)
    return [None] * len(residuals) + [x for x, moves in zip(gradients, moved, strict=True) if moves]


def _exact_jvp(function: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """jvp of a primitive's exact equivalent, which reads neither out nor lse: their tangents add nothing."""
    where = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
    restricted = _restricted(function, primals, where)
    return jax.jvp(restricted, [primals[i] for i in where], [tangents[i] for i in where])


def _tangent_jvp(primals: Sequence[Any], tangents: Sequence[Any], **static: Any) -> tuple[Any, Any]:
    return _exact_jvp(functools.partial(_exact_tangent, **static), primals, tangents)


def _backward_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: _Call, jaxpr: Any) -> tuple[Any, Any]:
    return _exact_jvp(functools.partial(_exact_backward, call=call), primals, tangents)


def _no_derivative(*_: Any, **__: Any) -> Any:
    reason = "e4m3 numbers are not differentiable"
    raise Unsupported(
        f"{OP}: a derivative was asked for with descales - {reason}. Multiply them into bfloat16 arrays and give those "
        "with precision='fp8', whose gradient passes straight through the rounding.",
        [("fp8 with descales", reason)],
    )


_attention = _Kernel("attention", _forward)
_attention_backward = _Kernel("attention_backward", _backward)
_attention_of_codes = _Kernel("attention_of_codes", _forward_of_codes)
_tangent = Primitive("attention_tangent")
_tangent.multiple_results = True
_tangent_compiled = jax.jit(
    lambda call, moved, *arrays: _exact_tangent(*arrays, call=call, moved=moved), static_argnums=(0, 1)
)
_tangent.def_impl(lambda *arrays, call, moved: _tangent_compiled(call, moved, *arrays))
_tangent.def_abstract_eval(lambda *types, **_: types[3:5])  # those of out and lse
mlir.register_lowering(_tangent, mlir.lower_fun(_exact_tangent, multiple_results=True))
batching.primitive_batchers[_tangent] = functools.partial(_fold, _tangent.bind)
ad.primitive_jvps[_attention.primitive] = _attention_jvp
ad.primitive_jvps[_attention_of_codes.primitive] = _no_derivative
ad.primitive_jvps[_tangent] = _tangent_jvp
ad.primitive_jvps[_attention_backward.primitive] = _backward_jvp
ad.primitive_transposes[_tangent] = _tangent_transpose


# ---- sharding


def _by_shards(
    kernel: Callable[..., Any], call: _Call, operands: Sequence[str], results: Sequence[str], arrays: Sequence[Any]
) -> list[Any]:
    """kernel(call, *arrays) run on every device's part of the batch and the heads; of sequences where the call says so,
    which are gathered otherwise.

    Over the mesh of `jax.set_mesh` by the rules of this library. Without one, or where it has other axes, as the
    operands happen to be split. Axes that a `shard_map` around has split are left alone.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in mesh.axis_types:
        raise ValueError(
            f"{OP}: mesh {dict(mesh.shape)} has Explicit axes - kernels are split over Auto axes. "
            "Build it with make_mesh."
        )
    free = [axis for axis in mesh.axis_names if axis not in mesh.manual_axes]
    batch, sequence, heads = (free_axes(name, mesh) for name in ("batch", "sequence", "act_heads"))
    if math.prod(mesh.shape[axis] for axis in sequence) != call.spec.context:
        call = call.whole  # the mesh is another than the one of the call
    sequence = sequence if call.spec.context > 1 else ()
    function = functools.partial(kernel, call)
    if not mesh.manual_axes and not batch and not heads and not sequence:
        return list(_as_given(function, operands, results, arrays)(*arrays))
    if all(mesh.shape[axis] == 1 for axis in free):
        return list(function(*arrays))
    query, key = arrays[:2]
    batch, heads = dividing(batch, query.shape[0], mesh), dividing(heads, key.shape[2], mesh)
    return list(
        jax.shard_map(
            function,
            in_specs=tuple(_entries(dims, batch, heads, sequence) for dims in operands),
            out_specs=tuple(_entries(dims, batch, heads, sequence) for dims in results),
            axis_names=set(free),
            check_vma=False,  # a kernel does not say over which axes its results vary
        )(*arrays)
    )


def _as_given(
    function: Callable[..., Any], operands: Sequence[str], results: Sequence[str], arrays: Sequence[Any]
) -> Callable[..., Any]:
    """Lets the partitioner bring the split of batch and heads. One device runs the function as it is."""
    if alone():
        return function
    function = jax.jit(function)  # keeps constants, such as a kernel's plan, inside: custom_partitioning refuses them
    B, K = arrays[0].shape[0], arrays[1].shape[2]

    def partition(mesh: Any, shapes: Any, _: Any) -> Any:
        query, key, *_ = (shape.sharding for shape in shapes)
        if isinstance(query, NamedSharding):
            batch = dividing(axes_of(query, 0), B, mesh)
            heads = dividing(axes_of(query, 2) or axes_of(key, 2), K, mesh)
        else:  # jax could not name the axes: no operand came with a NamedSharding
            mesh, batch, heads = Mesh(np.array(list(query.device_set)), ("all",)), (), ()
        sides = [
            tuple(NamedSharding(mesh, _entries(dims, batch, heads)) for dims in side) for side in (results, operands)
        ]
        return mesh, function, *sides

    partitioned = custom_partitioning(lambda *arrays: function(*arrays))
    # Query heads and key heads are not tied here: tied, an axis larger than K would be cut in two, which has no name.
    rule = [", ".join(" ".join(dims) for dims in side) for side in (operands, results)]
    whole = tuple(dict.fromkeys(dim for dims in operands for dim in dims if dim not in "BNK"))
    partitioned.def_partition(partition, sharding_rule=" -> ".join(rule), need_replication_factors=whole)
    return partitioned


def _entries(dims: str, batch: tuple[str, ...], heads: tuple[str, ...], sequence: tuple[str, ...] = ()) -> P:
    axes = {"B": batch, "N": heads, "K": heads, "T": sequence, "S": sequence}
    return P(*(axes.get(dim) or None for dim in dims))

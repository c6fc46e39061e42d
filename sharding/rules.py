"""Logical axes -> mesh axes, in one place.

A parameter or activation names its dimensions (`("embed", "mlp")`); `RULES` says which mesh axes each name is split
over. Changing how a model is distributed is a change to this table.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree, Shaped

from sharding.names import did_you_mean

Names = tuple[str | None, ...]
Rules = Mapping[str, tuple[str, ...]]

RULES: Rules = MappingProxyType(
    {
        # Inputs and activations. Whole hidden vectors per device: each layer gathers its weights over fsdp (ZeRO-3) and
        # reduces its output over tensor (Megatron); attention sees whole sequences (sharding/ring.py).
        "batch": ("data", "fsdp"),
        "sequence": ("context",),
        "act_embed": (),
        "act_heads": ("tensor",),
        "act_mlp": ("tensor",),
        "act_vocab": ("tensor",),
        # Parameters.
        "layer": ("stage",),
        "embed": ("fsdp",),
        "heads": ("tensor",),
        "kv_heads": ("tensor",),
        "head_dim": (),
        "mlp": ("tensor",),
        "vocab": ("tensor",),
        "norm": ("fsdp",),
        # An embedding table is split by rows only: split both ways, its lookup makes XLA copy activations to every
        # device ("Involuntary full rematerialization"). tensor before fsdp: gathering the rows over fsdp then leaves
        # each device one contiguous block, the `vocab` layout of the logits; the other order permutes it besides.
        "table_rows": ("tensor", "fsdp"),
        "table_width": (),
    }
)


def spec(names: Names, rules: Rules = RULES) -> P:
    """The `PartitionSpec` of an array whose dimensions have these logical names, one entry per dimension.

    `None` is a dimension that is never split.

    Raises:
        ValueError: a name that `rules` lacks, or two dimensions on one mesh axis.

    >>> spec(("layer", "embed", "mlp"))
    P('stage', 'fsdp', 'tensor')
    """
    owner: dict[str, str] = {}
    for name in names:
        if name is not None and name not in rules:
            raise ValueError(f"spec: unknown logical axis {name=}. {did_you_mean(name, rules)}")
        for axis in rules[name] if name else ():
            if axis in owner:
                raise ValueError(
                    f"spec: {owner[axis]!r} and {name!r} of {names=} both map to mesh axis {axis!r} - a mesh axis "
                    "splits one dimension of an array. Rename one of them to a logical axis with another rule."
                )
            owner[axis] = str(name)
    entries = (rules[name] if name else () for name in names)
    return P(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in entries))


def fitted(mesh: Mesh | AbstractMesh, units: Mapping[str, int], rules: Rules = RULES, *, dealt: bool = False) -> Rules:
    """`rules` for a model that two of them do not fit, so that no shape of a parameter depends on the mesh.

    Key/value heads that do not divide over their axis are whole on each of its devices (`copies` then gives every
    device one). Layers that do not divide over theirs, or are `dealt`, are all on every stage, each cut along `embed`
    and `norm` instead: as little memory, and the stages exchange them once a step (`sharding.chunks`).

    Args:
        mesh: the mesh to fit.
        units: what the logical axes of the model count; those that it does not name are taken to fit.
        rules: logical axis -> mesh axes.
        dealt: no stage has consecutive layers (an interleaved pipeline).
    """

    def fits(name: str) -> bool:
        return name not in units or units[name] % _extent(rules[name], mesh) == 0

    changed = {} if fits("kv_heads") else {"kv_heads": ()}
    if not fits("layer") or (dealt and _extent(rules["layer"], mesh) > 1):
        changed |= {"layer": ()} | {name: rules[name] + rules["layer"] for name in ("embed", "norm")}
    return MappingProxyType({**rules, **changed})


def whole_over(axis: str, rules: Rules = RULES) -> Rules:
    """`rules` with parameters whole on every device of a mesh axis; rows of the batch stay split over it.

    >>> spec(("embed", "mlp"), whole_over("fsdp"))
    P(None, 'tensor')
    """
    kept = {name: tuple(a for a in axes if a != axis) for name, axes in rules.items() if name != "batch"}
    return MappingProxyType({**rules, **kept})


def copies(name: str, size: int, rules: Rules = RULES) -> int:
    """How often each of `size` parts is repeated for the parts to divide over the axes of `name`, on the mesh in force.

    >>> copies("act_heads", 2)  # no mesh
    1
    """
    mesh = jax.sharding.get_abstract_mesh()
    ways = math.prod(mesh.shape[axis] for axis in rules[name] if axis in mesh.shape and axis not in mesh.manual_axes)
    return math.lcm(size, ways) // size


def ways(name: str, mesh: Mesh | AbstractMesh, rules: Rules = RULES) -> int:
    """How many ways `mesh` splits a dimension of this logical name.

    Raises:
        ValueError: a name that `rules` lacks, or a mesh that lacks an axis of the rules.
    """
    return _extent(spec((name,), rules)[0], mesh)


def check(
    shapes: PyTree,
    axes: PyTree,
    mesh: Mesh | AbstractMesh,
    units: Mapping[str, int] | None = None,
    rules: Rules = RULES,
) -> None:
    """Refuses, before anything is allocated, every dimension that does not divide over its mesh axes.

    Args:
        shapes: pytree of arrays or `ShapeDtypeStruct`s.
        axes: pytree of the same structure whose leaves are tuples of logical names.
        mesh: the mesh to divide over; an `AbstractMesh` will do, so a plan needs no devices.
        units: logical axis -> the count that must divide, where it is not the dimension itself. A (D, N*H) matrix of
            heads splits between heads, so `{"heads": N}`.
        rules: logical axis -> mesh axes.

    Raises:
        ValueError: one error for all parameters, a line for each dimension with its nearest fixes. Also for a
            parameter without axes, axes without a parameter, a wrong number of names, and what `spec` refuses.
    """
    arrays = _by_path(shapes)
    named = _by_path(axes, names=True)
    problems = [f"{path}: has no logical axes" for path in arrays.keys() - named.keys()]
    problems += [f"{path}: has logical axes but no array" for path in named.keys() - arrays.keys()]
    for path in (path for path in arrays if path in named):
        shape, names = tuple(arrays[path].shape), named[path]
        if len(shape) != len(names):
            problems.append(f"{path}: {shape=} has {len(shape)} dims but {names=} has {len(names)}")
            continue
        try:
            entries = spec(names, rules)
        except ValueError as error:
            problems.append(f"{path}: {error}")
            continue
        problems += [f"{path}: {fault}" for fault in _faults(shape, names, entries, mesh, units or {})]
    if problems:
        raise ValueError(
            f"check: {len(problems)} problem(s) on mesh {dict(mesh.shape)} - every shard of an array has one size. "
            "Change the mesh or the sizes:\n  " + "\n  ".join(sorted(problems))
        )


def specs(axes: PyTree, rules: Rules = RULES) -> PyTree:
    """A pytree of tuples of logical names -> the same pytree of `PartitionSpec`s; raises what `spec` does."""
    return jax.tree.map(lambda names: spec(names, rules), axes, is_leaf=lambda x: isinstance(x, tuple))


def shardings(axes: PyTree, mesh: Mesh, rules: Rules = RULES) -> PyTree:
    """A pytree of tuples of logical names -> the same pytree of `NamedSharding`s.

    Raises:
        ValueError: what `spec` refuses, or a mesh that lacks an axis of the rules.
    """

    def one(names: Names) -> NamedSharding:
        entries = spec(names, rules)
        for entry in entries:
            _extent(entry, mesh)
        return NamedSharding(mesh, entries)

    return jax.tree.map(one, axes, is_leaf=lambda x: isinstance(x, tuple))


def state_shardings(
    tx: optax.GradientTransformation, abstract_opt_state: PyTree, param_shardings: PyTree, mesh: Mesh
) -> PyTree:
    """Shardings for an optimizer's state: what mirrors a parameter follows it, everything else is replicated.

    Pass the result as `out_shardings` of the jitted `tx.init`: left to itself, `jit(tx.init)` on an Auto mesh returns
    the whole state on every device, and ZeRO is lost without a word.

    Args:
        tx: the transformation; chains, masks, `multi_transform`, `MultiSteps` and schedules included.
        abstract_opt_state: `jax.eval_shape(tx.init, params)`.
        param_shardings: what `shardings` returned for the parameters.
        mesh: the mesh that holds the rest.

    State of another rank than its parameter (Adafactor's row and column factors), or too small to divide (its
    placeholders), is replicated.
    """
    replicated = NamedSharding(mesh, P())

    def follow(value: Any, sharding: NamedSharding) -> Any:
        # A parameter that a mask hides is an empty node here, and must stay one.
        if isinstance(value, optax.MaskedNode):
            return value
        extents = [_extent(entry, mesh) for entry in sharding.spec]
        mirrors = len(extents) == len(value.shape)
        if mirrors and all(size % extent == 0 for size, extent in zip(value.shape, extents, strict=True)):
            return sharding
        return replicated

    return optax.tree_map_params(
        tx,
        follow,
        abstract_opt_state,
        param_shardings,
        transform_non_params=lambda _: replicated,
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )


def constrain(x: Shaped[Array, "..."], *names: str | None, rules: Rules = RULES) -> Shaped[Array, "..."]:
    """Lays out `x` by the logical names of its dimensions, on the mesh of `jax.set_mesh`; its gradient likewise.

    Identity when no mesh is in force or it has one device. Inside `shard_map` the manual axes are already split, so
    only the others are constrained; under `vmap` the names are those of the unbatched array.

    Raises:
        ValueError: a wrong number of names, what `spec` refuses, a dimension that does not divide (JAX would return
            it replicated, without a word), or a mesh with Explicit axes.
    """
    if x.ndim != len(names):
        raise ValueError(f"constrain: shape={x.shape} with {names=} - one name for each dim. Use None for no split.")
    entries = spec(names, rules)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    if AxisType.Explicit in mesh.axis_types:
        raise ValueError(
            f"constrain: mesh {dict(mesh.shape)} has Explicit axes - constraints act on Auto axes. "
            "Build it with make_mesh."
        )
    free = P(*(entry_without(entry, mesh.manual_axes) for entry in entries))
    if all(axis in mesh.manual_axes for axis in mesh.axis_names):
        return x
    faults = _faults(x.shape, names, free, mesh, {})
    if faults:
        raise ValueError(
            f"constrain: shape={x.shape} with {names=} on mesh {dict(mesh.shape)} - {'; '.join(faults)}. "
            "Pad the array or change the mesh."
        )
    return jax.lax.with_sharding_constraint(x, free)


def entry_axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec, outermost first."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def entry_without(entry: Any, axes: Sequence[str]) -> tuple[str, ...] | None:
    """The entry of a PartitionSpec without these mesh axes."""
    return tuple(axis for axis in entry_axes(entry) if axis not in axes) or None


def bytes_per_device(tree: PyTree) -> tuple[dict[str, int], int]:
    """(bytes of each leaf by its path, their sum) that one device holds of a pytree of arrays or `ShapeDtypeStruct`s.

    A leaf without a sharding counts whole.
    """
    held = {}
    for path, leaf in _by_path(tree).items():
        sharding = getattr(leaf, "sharding", None)
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        held[path] = math.prod(shape) * leaf.dtype.itemsize
    return held, sum(held.values())


def _by_path(tree: PyTree, names: bool = False) -> dict[str, Any]:
    is_leaf = (lambda x: isinstance(x, tuple)) if names else None
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _extent(entry: Any, mesh: Mesh | AbstractMesh) -> int:
    """How many ways `mesh` splits a dimension with this entry."""
    for axis in entry_axes(entry):
        if axis not in mesh.shape:
            raise ValueError(
                f"rules: {axis=} is not in mesh {dict(mesh.shape)} - rules name mesh axes. Build it with make_mesh."
            )
    return math.prod(mesh.shape[axis] for axis in entry_axes(entry))


def _faults(
    shape: Sequence[int], names: Names, entries: P, mesh: Mesh | AbstractMesh, units: Mapping[str, int]
) -> list[str]:
    """A phrase for each dimension that does not divide over its mesh axes."""
    faults = []
    for dim, (size, name, entry) in enumerate(zip(shape, names, entries, strict=True)):
        extent = _extent(entry, mesh)
        count = units.get(name, size) if name else size
        if size % count:
            faults.append(f"dim {dim} ({name!r}) has {size=}, no multiple of its {count} units")
        elif count % extent:
            over = "*".join(entry_axes(entry))
            works = [ways for ways in range(1, min(count, mesh.size) + 1) if count % ways == 0]
            what = f"{size=}" if count == size else f"{size=} in {count} units"
            faults.append(
                f"dim {dim} ({name!r}) has {what}, not divisible by {over}={extent}; make {over} one of {works} "
                f"or the {'size' if count == size else 'units'} {-(-count // extent) * extent}"
            )
    return faults

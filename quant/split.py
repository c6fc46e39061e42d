"""What a mesh needs to know of packed weights: names for their arrays' dims, and where they cannot be cut.

The arrays of an Int4Tensor lead with (columns, rows) of W, so the names of W's dims say how all of them are split:

    W              (rows, columns)              ("embed", "mlp")
    words          (columns, rows, 8, 64)       ("mlp", "embed", None, None)
    scales, zeros  (columns, groups, 64)        ("mlp", "embed", None), or ("mlp", None, None) where there is one group
    permutation    (rows,)                      (None,), since every device looks its features up itself

Those of an Fp8Tensor too: codes (columns, rows); scales alike by block, (columns, None) by row, else (None, None).
The matrices of an adapter are cut where W is: A (rows, None), B (None, columns).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from pallas_kernels.fp8.spec import BLOCK
from pallas_kernels.w4a16.layout import TILE, padded
from quant.fp8 import Fp8Tensor
from quant.lora import LoraTensor
from quant.tensor import Int4Tensor
from sharding import rules

_OP = "quant.split.check"


def is_weight(node: Any) -> bool:
    """Whether a node of a parameter tree is one weight of several arrays and not a container."""
    return isinstance(node, Int4Tensor | Fp8Tensor | LoraTensor)


def axes_of_arrays(params: PyTree, axes: PyTree) -> PyTree:
    """The logical axes of every array of `params`, from those of the dense model: for `sharding.rules.shardings`.

    params: a tree in which Int4Tensors, Fp8Tensors and LoraTensors, stacked or not, have taken the places of dense
      weights.
    axes: the tree of the dense model, whose leaves are tuples of names, one a dim of the dense weight.
    """

    def one(weight: Any, names: rules.Names) -> Any:
        if not is_weight(weight):
            return names
        *stacked, rows, columns = names
        if isinstance(weight, Fp8Tensor):
            by_scale = {"tensor": (None, None), "row": (columns, None), "block": (columns, rows)}[weight.scaling]
            return dataclasses.replace(weight, codes=(*stacked, columns, rows), scales=(*stacked, *by_scale))
        if isinstance(weight, LoraTensor):
            a, b = (*stacked, rows, None), (*stacked, None, columns)
            key = None if weight.key is None else tuple(stacked)
            return dataclasses.replace(weight, base=one(weight.base, names), a=a, b=b, key=key)
        by_group = (*stacked, columns, rows if weight.scales.shape[-2] > 1 else None, None)
        return dataclasses.replace(
            weight,
            words=(*stacked, columns, rows, None, None),
            scales=by_group,
            zeros=None if weight.zeros is None else by_group,
            permutation=None if weight.permutation is None else (*stacked, None),
        )

    return jax.tree.map(one, params, axes, is_leaf=is_weight)


def check(
    params: PyTree,
    axes: PyTree,
    mesh: Mesh | AbstractMesh,
    units: Mapping[str, int] | None = None,
    table: rules.Rules = rules.RULES,
) -> None:
    """Refuses what cannot be split over the mesh as its names say: dense arrays as `rules.check` does, and packed ones.

    A packed weight is cut between tiles of 64 rows or columns and between groups, so that every shard of the three
    arrays is a packed weight by itself; one whose rows are permuted is not cut by rows. One of 8 bits is cut between
    blocks of 128, where it has them.

    Args:
      params, axes: as `axes_of_arrays` takes them; arrays may be `jax.ShapeDtypeStruct`s.
      mesh, units, table: as in `rules.check`, with units that count W's own dims.

    Raises:
      ValueError: one error for all packed weights, naming rows, group, devices and the counts that work; or that of
        `rules.check`.
    """
    rules.check(jax.tree.map(_dense, params, is_leaf=is_weight), axes, mesh, units, table)
    problems = []

    def collect(path: Any, weight: Any, names: rules.Names) -> None:
        weight = weight.base if isinstance(weight, LoraTensor) else weight
        if isinstance(weight, Int4Tensor | Fp8Tensor):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            faults: Any = _fp8_faults if isinstance(weight, Fp8Tensor) else _faults
            problems.extend(f"{name}: {fault}" for fault in faults(weight, names[-2], names[-1], mesh, table))

    jax.tree_util.tree_map_with_path(collect, params, axes, is_leaf=is_weight)
    if problems:
        raise ValueError(f"{_OP}: {len(problems)} problem(s) on mesh {dict(mesh.shape)}:\n  " + "\n  ".join(problems))


def _faults(
    weight: Int4Tensor, rows: str | None, columns: str | None, mesh: Mesh | AbstractMesh, table: rules.Rules
) -> list[str]:
    K, N = weight.shape
    faults = []
    for name, size, step in ((rows, padded(K), _row_step(weight)), (columns, padded(N), TILE)):
        over = table[name] if name else ()
        ways = math.prod(mesh.shape[axis] for axis in over)
        if ways == 1:  # then a last group may be short
            continue
        works = [count for count in range(1, mesh.size + 1) if count == 1 or size % (count * step) == 0]
        where = f"{'*'.join(over)}={ways}"
        if name == rows and weight.permutation is not None:
            faults.append(
                f"its {K=} rows are in activation order (g_idx), so a device of {where} would need the features of the "
                "others - not split by rows. Fold the order into the weight before it (quant.fold.fold_permutation)"
            )
        elif size % (ways * step) and name == rows:
            faults.append(
                f"{K=} rows in {_pieces(weight)} over {ways} devices ({where}): a boundary would cut a "
                f"{'group' if _row_step(weight) > TILE else 'tile'}. Make it one of {works}, or split the columns"
            )
        elif size % (ways * step):
            faults.append(f"{N=} columns in tiles of {TILE} over {ways} devices ({where}). Make it one of {works}")
    return faults


def _fp8_faults(
    weight: Fp8Tensor, rows: str | None, columns: str | None, mesh: Mesh | AbstractMesh, table: rules.Rules
) -> list[str]:
    faults = []
    for kind, name, size in zip(("K", "N"), (rows, columns), weight.shape, strict=True):
        over = table[name] if name and weight.scaling == "block" else ()
        ways = math.prod(mesh.shape[axis] for axis in over)
        if ways > 1 and size % (ways * BLOCK):  # on one device a last block may be short
            works = [count for count in range(1, mesh.size + 1) if count == 1 or size % (count * BLOCK) == 0]
            faults.append(
                f"{kind}={size} in blocks of {BLOCK} over {ways} devices ({'*'.join(over)}={ways}): a boundary would "
                f"cut a block. Make it one of {works}"
            )
    return faults


def _row_step(weight: Int4Tensor) -> int:
    """Rows between places where a weight may be cut: whole tiles and whole groups."""
    return TILE if weight.group >= padded(weight.shape[0]) else math.lcm(TILE, weight.group)


def _pieces(weight: Int4Tensor) -> str:
    return f"groups of {weight.group}" if _row_step(weight) > TILE else f"tiles of {TILE}"


def _dense(weight: Any) -> Any:
    """The dense weight that a packed one stands for; other arrays are themselves."""
    if isinstance(weight, LoraTensor):
        return _dense(weight.base)
    if not isinstance(weight, Int4Tensor | Fp8Tensor):
        return weight
    stack = weight.codes.shape[:-2] if isinstance(weight, Fp8Tensor) else weight.words.shape[:-4]
    return jax.ShapeDtypeStruct((*stack, *weight.shape), jnp.bfloat16)

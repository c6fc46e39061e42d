"""What a Hub folder holds for each parameter of each layer: tensors of one, dense, or those of a quantised format."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Shaped

from jaxflash.config import ModelConfig
from jaxflash.hf import safetensors
from jaxflash.hf.fp8 import SCALES
from jaxflash.hf.names import Place, places
from jaxflash.hf.place import at
from jaxflash.hf.scheme import FLOAT, FP8, Scheme
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.w4a16.layout import unpack_columns, unpack_zeros
from quant.formats import fp8
from quant.formats.api import FORMATS
from quant.formats.grid import Format, Grid, LinearSpec, grid_of
from quant.fp8 import Fp8Tensor
from quant.recipe import Recipe
from quant.tensor import Int4Tensor

type Arrays = Mapping[str, Shaped[np.ndarray, "..."]]
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One parameter of one layer on its way into a file.

    tensors: name -> (dtype as safetensors names it, shape). fetch: brings it to the host of every process, who all call
    it. encode: makes of that the tensors.
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    fetch: Callable[[], Any]
    encode: Callable[[Any], Arrays]

    def sizes(self) -> dict[str, int]:
        """Bytes of each tensor."""
        return {
            name: int(np.prod(shape, dtype=np.int64)) * safetensors.DTYPES[stored_as].itemsize
            for name, (stored_as, shape) in self.tensors.items()
        }


def pieces(config: ModelConfig, params: Mapping[str, Any], dtype: str, scheme: Scheme | None) -> list[Piece]:
    """All of a checkpoint, in the order in which it is written. dtype: of what is dense. scheme: None: all is."""
    return [_piece(name, place, at(params, place.path), dtype, scheme) for name, place in places(config).items()]


def _piece(name: str, place: Place, leaf: Any, dtype: str, scheme: Scheme | None) -> Piece:
    if scheme is not None and scheme.format in FORMATS and isinstance(leaf, Int4Tensor):
        return _packed_piece(name.removesuffix(".weight"), place, leaf, FORMATS[scheme.format], scheme)
    if scheme is not None and scheme.format in (FP8, FLOAT) and isinstance(leaf, Fp8Tensor):
        return _kept_piece(name, place, leaf, scheme)
    if scheme is not None and scheme.format == FP8 and place.layer is not None and place.transposed:
        return _fp8_piece(name, place, leaf, scheme)
    stored_as = safetensors.NAMES[np.dtype(jnp.dtype(dtype))]
    return Piece(
        tensors={name: (stored_as, place.shape)},
        fetch=functools.partial(fetch_dense, leaf, place, dtype, name),
        encode=lambda values: {name: values},
    )


def fetch_dense(leaf: Any, place: Place, dtype: str, name: str) -> Shaped[np.ndarray, "..."]:
    """One tensor in the orientation and dtype of the file, on the host of every process; a packed one as it stands for.

    Raises ValueError where `dtype` makes a finite weight infinite.
    """
    fetch = _fetcher(_replicated(leaf), jnp.dtype(dtype), place.transposed, place.layer is not None)
    values, fits = fetch(leaf, np.int32(place.layer or 0))
    if not bool(np.asarray(fits)):
        raise ValueError(
            f"save: {name!r} has weights beyond the largest {dtype} - they would be infinite. Save it as float32."
        )
    return np.ascontiguousarray(values.addressable_data(0))


@functools.lru_cache(maxsize=64)
def _fetcher(everywhere: Any, dtype: Any, transposed: bool, stacked: bool) -> Any:
    def fetch(leaf, layer):
        piece = jax.tree.map(lambda a: a[layer], leaf) if stacked else leaf
        piece = piece.dequantize() if isinstance(piece, Int4Tensor | Fp8Tensor) else piece
        values = (piece.T if transposed else piece).astype(dtype)
        return values, (jnp.isfinite(values) | ~jnp.isfinite(piece.T if transposed else piece)).all()

    return jax.jit(fetch, out_shardings=everywhere)


def _replicated(leaf: Any) -> NamedSharding | None:
    """The layout that has all of a parameter on every device of its mesh."""
    sharding = jax.tree.leaves(leaf)[0].sharding
    return NamedSharding(sharding.mesh, P()) if isinstance(sharding, NamedSharding) else None


# 4 bits.


def packed_scheme(params: Mapping[str, Any], format: str, config: ModelConfig) -> tuple[Scheme, list[str]]:
    """(the scheme of a model's packed weights in `format`, the linears of its layers that are dense). Every process.

    Raises:
      Unsupported: what the format cannot hold, by parameter, layer, group and column. Reads all but the codes.
    """
    weights = {name: (place, at(params, place.path)) for name, place in places(config).items() if place.transposed}
    form, faults, dense, groups = FORMATS[format], [], [], {}
    symmetric, ordered = True, False
    for name, (place, leaf) in weights.items():
        if place.layer is None:
            continue
        if not isinstance(leaf, Int4Tensor):
            dense += [name.split(".", 3)[3].removesuffix(".weight")] if place.layer == 0 else []
            continue
        grid = _fetch_grid(leaf, place.layer)
        groups.setdefault(grid.group if grid.group < leaf.shape[0] else None, []).append(leaf.shape[0])
        faults += [f"{name}: {fault}" for fault in form.faults(grid)]
        symmetric, ordered = symmetric and grid.zeros is None, ordered or grid.g_idx is not None
    whole = groups.pop(None, [])
    group = min(groups, default=None)
    if len(groups) > 1 or (group is not None and whole and max(whole) > group):
        sizes = [*(f"{size} rows" for size in sorted(groups)), *(["whole columns"] if whole else [])]
        faults.insert(0, f"groups of {' and '.join(sizes)}, of which a checkpoint has one")
    _refuse("save", format, faults)
    return Scheme(format=format, group=group, symmetric=symmetric, ordered=ordered), dense


def check_sizes(op: str, config: ModelConfig, format: str, recipe: Recipe, *, ordered: bool) -> None:
    """Raises Unsupported for what `format` could not hold of this model's blocks in 4 bits, as far as sizes tell.

    ordered: whether rows will be in activation order.
    """
    faults = []
    for name, place in places(config).items():
        if place.layer == 0 and place.transposed:
            N, K = place.shape
            g_idx = np.zeros(K, np.int32) if ordered else None
            grid = Grid(shape=(K, N), group=recipe.group_rows(K), scales=np.ones((1, 1), np.float16), g_idx=g_idx)
            faults += [f"{name}: {fault}" for fault in FORMATS[format].faults(grid)]
    _refuse(op, format, faults)


def _refuse(op: str, format: str, faults: list[str]) -> None:
    if not faults:
        return
    rest = f"\n  and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    raise Unsupported(
        f"{op}: {format!r} cannot hold {len(faults)} of this model's properties - nothing is rounded or left out. "
        f"Choose another format.\n  " + "\n  ".join(faults[:_SHOWN]) + rest,
        [(format, fault) for fault in faults],
    )


def _spec(leaf: Int4Tensor, scheme: Scheme) -> LinearSpec:
    K, N = leaf.shape
    return LinearSpec(K=K, N=N, group=min(leaf.group, K), zeros=not scheme.symmetric, ordered=scheme.ordered)


def _packed_piece(module: str, place: Place, leaf: Int4Tensor, form: Format, scheme: Scheme) -> Piece:
    spec = _spec(leaf, scheme)
    scales = jnp.dtype(leaf.scales.dtype).name

    def stored(dtypes: tuple[str, ...]) -> str:
        written = (form.scales_written_as or scales) if scales in dtypes else dtypes[0]
        return safetensors.NAMES[np.dtype(jnp.dtype(written))]

    return Piece(
        tensors={f"{module}.{suffix}": (stored(t.dtypes), t.shape) for suffix, t in form.layout(spec).items()},
        fetch=lambda: (_fetch_codes(leaf, place.layer or 0), _fetch_grid(leaf, place.layer or 0)),
        encode=functools.partial(_encode, module, form, spec),
    )


def _encode(module: str, form: Format, spec: LinearSpec, values: tuple[Any, Grid]) -> Arrays:
    """The tensors of one linear, which are decoded again and compared before they are let go.

    Raises ValueError where they are not the same codes on the same grid: a fault of this program.
    """
    assert form.write is not None  # `save` chose among those that have it
    codes, grid = values
    tensors = form.write(codes, grid, spec)
    same = np.array_equal(form.read_codes(tensors[form.codes], spec), codes)
    if not same or not form.read_grid(tensors, spec).same_as(grid):
        raise ValueError(f"save: {module!r} in {form.name!r} does not read back as it was - report this as a fault.")
    return {f"{module}.{suffix}": array for suffix, array in tensors.items()}


def _fetch_codes(leaf: Int4Tensor, layer: int) -> Shaped[np.ndarray, "k n"]:
    return np.asarray(_plain_codes(_replicated(leaf))(leaf, np.int32(layer)).addressable_data(0))


@functools.lru_cache(maxsize=16)
def _plain_codes(everywhere: Any) -> Any:
    def fetch(leaf: Int4Tensor, layer: Any) -> Array:
        one: Int4Tensor = jax.tree.map(lambda a: a[layer], leaf)
        codes = one.codes()[0]
        return codes if one.permutation is None else jnp.zeros_like(codes).at[one.permutation].set(codes)

    return jax.jit(fetch, out_shardings=everywhere)


def _fetch_grid(leaf: Int4Tensor, layer: int) -> Grid:
    small = dataclasses.replace(leaf, words=None)
    arrays = _plain_grid(_replicated(small))(small, np.int32(layer))
    scales, zeros, order = (None if a is None else np.asarray(a.addressable_data(0)) for a in arrays)
    K, N = leaf.shape
    spec = LinearSpec(K=K, N=N, group=min(leaf.group, K))
    g_idx = None
    if order is not None:
        g_idx = np.empty(K, np.int32)
        g_idx[order] = np.arange(K, dtype=np.int32) // spec.group
    assert scales is not None
    return grid_of(spec, scales[: spec.groups], None if zeros is None else zeros[: spec.groups], g_idx)


@functools.lru_cache(maxsize=16)
def _plain_grid(everywhere: Any) -> Any:
    def fetch(leaf: Int4Tensor, layer: Any) -> Any:
        one: Int4Tensor = jax.tree.map(lambda a: a[layer], leaf)
        N = one.shape[1]
        zeros = None if one.zeros is None else unpack_zeros(one.zeros, N)
        return unpack_columns(one.scales, N), zeros, one.permutation

    return jax.jit(fetch, out_shardings=everywhere)


# FP8.


def kept_scheme(params: Mapping[str, Any], format: str | None, config: ModelConfig) -> tuple[Scheme, list[str]]:
    """(the scheme of a model's Fp8Tensors in `format`, the linears of its layers that are dense).

    None: DeepSeek's, "fp8", of blocks, and else compressed-tensors'. Raises Unsupported for scales of several kinds, or
    of a kind that the format does not have.
    """
    linears = {name: at(params, p.path) for name, p in places(config).items() if p.transposed and p.layer == 0}
    kinds = sorted({leaf.scaling for leaf in linears.values() if isinstance(leaf, Fp8Tensor)})
    dense = [n.split(".", 3)[3].removesuffix(".weight") for n, w in linears.items() if not isinstance(w, Fp8Tensor)]
    check_scalings(kinds, format)
    block = fp8.BLOCK if kinds == ["block"] else None
    stored = FLOAT if format == "compressed-tensors" or block is None else FP8
    return Scheme(format=stored, block=block, by_row=kinds == ["row"]), dense


def check_scalings(kinds: Sequence[str], format: str | None) -> None:
    """Raises Unsupported where scales of these kinds cannot be in one folder, or not in one of `format`."""
    if len(kinds) > 1 or (format == FP8 and kinds != ["block"]):
        reason = f"FP8 weights with scales by {' and '.join(kinds)}"
        remedy = "Quantise all alike." if len(kinds) > 1 else "Use 'compressed-tensors'."
        raise Unsupported(f"save: {format!r} cannot hold {reason}. {remedy}", [(format or FP8, reason)])


def _kept_piece(name: str, place: Place, leaf: Fp8Tensor, scheme: Scheme) -> Piece:
    """Codes and scales as they are."""
    scales = name.removesuffix("weight") + SCALES[scheme.format == FLOAT]
    # One scale of a tensor has one dim in files.
    shape = (1,) if leaf.scaling == "tensor" else tuple(leaf.scales.shape[1:])
    return Piece(
        tensors={
            name: (safetensors.NAMES[fp8.DTYPE], place.shape),
            scales: (safetensors.NAMES[np.dtype(leaf.scales.dtype)], shape),
        },
        fetch=functools.partial(_fetch_kept, leaf, place.layer or 0),
        encode=lambda values: {name: values[0], scales: values[1].reshape(shape)},
    )


def _fetch_kept(leaf: Fp8Tensor, layer: int) -> tuple[Shaped[np.ndarray, "n k"], Shaped[np.ndarray, "rows columns"]]:
    codes, scales = _plain_kept(_replicated(leaf))(leaf, np.int32(layer))
    return np.asarray(codes.addressable_data(0)), np.asarray(scales.addressable_data(0))


@functools.lru_cache(maxsize=16)
def _plain_kept(everywhere: Any) -> Any:
    return jax.jit(lambda leaf, layer: (leaf.codes[layer], leaf.scales[layer]), out_shardings=everywhere)


def _fp8_piece(name: str, place: Place, leaf: Any, scheme: Scheme) -> Piece:
    assert scheme.block is not None
    scales = name.removesuffix("weight") + SCALES[0]
    rows, columns = place.shape
    shape = fp8.scale_shape((rows, columns), scheme.block)
    return Piece(
        tensors={name: (safetensors.NAMES[fp8.DTYPE], place.shape), scales: ("F32", shape)},
        fetch=functools.partial(fetch_dense, leaf, place, "float32", name),
        encode=functools.partial(_encode_fp8, name, scales, scheme.block),
    )


def _encode_fp8(name: str, scales_name: str, block: tuple[int, int], weight: Any) -> Arrays:
    try:
        scales = fp8.amax_scales(weight, block)
        return {name: fp8.quantize(weight, scales, block=block), scales_name: scales}
    except ValueError as error:
        raise ValueError(f"save: {name!r}: {error}") from error

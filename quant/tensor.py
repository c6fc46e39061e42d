"""A weight of packed 4-bit codes as a pytree: what takes a dense weight's place in a model."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, UInt8

from pallas_kernels.w4a16 import layout, tile
from pallas_kernels.w4a16.spec import SCALE_DTYPES, check_group, check_packed, group_count

_OP = "Int4Tensor"


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("words", "scales", "zeros", "permutation"),
    meta_fields=("shape", "group"),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Int4Tensor:
    """A weight W of shape (K, N), used as y = x W, of 4-bit codes with a scale for every group of rows of a column.

        V[i, n] = (code[i, n] - zero[i // group, n]) * scale[i // group, n]        W[permutation[i], n] = V[i, n]

    with the packed arrays, where K' and N' are K and N rounded up to whole tiles and G = ceil(K' / group),

        words        int32 (N'/64, K'/64, 8, 64)     pallas_kernels.w4a16.layout.pack(code)
        scales       bfloat16 or float16 (N'/64, G, 64)     scales[n // 64, r, n % 64] = scale[r, n]
        zeros        uint8 (N'/64, G, 64), or None: zero = 8 everywhere (symmetric)     layout.pack_zeros(zero)
        permutation  int32 (K,), or None: the identity (activation order, GPTQ's g_idx: group of row permutation[i] is
                     i // group)

    and the static facts `shape` = (K, N) and `group` = 32, 64 or 128, or K' or more for one scale a column. Padding is
    never visible: its codes are zero points.

    Transformations may stack weights on leading axes of all arrays, which `lax.scan` and `vmap` take off again, and
    put other things in the arrays' places; so nothing is checked on construction. `validate` checks.
    """

    words: Any
    scales: Any
    zeros: Any = None
    permutation: Any = None
    shape: tuple[int, int]
    group: int

    @classmethod
    def from_codes(
        cls,
        codes: Any,
        scales: Any,
        zeros: Any = None,
        *,
        group: int | None,
        g_idx: Any = None,
        scale_dtype: DTypeLike | None = None,
    ) -> "Int4Tensor":
        """Packs the codes of a weight that is quantised already, all in the order of W.

        Args:
          codes: integers 0..15 (K, N).
          scales: floating (ceil(K / group), N).
          zeros: integers 0..15 of the scales' shape; None: 8, symmetric.
          group: 32, 64, 128, or K or more, or None, for the whole column. A last group may have fewer rows.
          g_idx: integers (K,), the group of every row; None: k // group. Every group but the last has `group` rows.
          scale_dtype: bfloat16 or float16; None: that of the scales.

        Raises:
          ValueError: shapes that do not go together, values out of range, groups of other sizes, or scales that
            `scale_dtype` cannot hold to its precision. Values are looked at outside of jit only.
        """
        _check_codes("codes", codes)
        codes, scales = jnp.asarray(codes), jnp.asarray(scales)
        if codes.ndim != 2 or 0 in codes.shape:
            raise ValueError(
                f"{_OP}: got codes of shape {codes.shape} - must be (K, N), both at least 1. Stack weights once packed."
            )
        K, N = codes.shape
        group = layout.padded(K) if group is None or group >= K else group
        check_group(_OP, group, K)
        per_group = (-(-K // group), N)
        for name, values in (("scales", scales), ("zeros", zeros)):
            if values is not None and tuple(values.shape) != per_group:
                raise ValueError(
                    f"{_OP}: got {name} of shape {tuple(values.shape)} - codes of shape {(K, N)} in groups of {group} "
                    f"rows need {per_group}. Give one row for every group."
                )
        if zeros is not None:
            _check_codes("zeros", zeros)
            zeros = jnp.asarray(zeros)
        stored = _stored(scales, jnp.dtype(scale_dtype or scales.dtype))
        permutation = None if g_idx is None else _permutation(g_idx, K, group)
        words, packed_scales, packed_zeros = _packed(codes, stored, zeros, permutation, group=group)
        return cls(
            words=words,
            scales=packed_scales,
            zeros=packed_zeros,
            permutation=permutation,
            shape=(K, N),
            group=group,
        )

    def validate(self) -> "Int4Tensor":
        """The tensor itself, once its arrays are seen to be those of a weight of this shape and group.

        Raises ValueError, naming the array, its shape and the right one, or values that no weight has (outside of jit).
        """
        check_packed(_OP, self.words, self.scales, self.zeros, shape=self.shape, group=self.group)
        if isinstance(self.scales, jax.Array) and not _holds(jnp.isfinite(self.scales)):
            raise ValueError(f"{_OP}: scales are not all finite - the weight would not be. Quantise finite weights.")
        if isinstance(self.zeros, jax.Array):
            _check_codes("zeros", self.zeros)
        if self.permutation is not None:
            K = self.shape[0]
            if tuple(self.permutation.shape) != (K,) or self.permutation.dtype != jnp.int32:
                raise ValueError(
                    f"{_OP}: got permutation of shape {tuple(self.permutation.shape)} and dtype "
                    f"{self.permutation.dtype} - a weight of shape {self.shape} needs int32 {(K,)}. Use from_codes."
                )
            if isinstance(self.permutation, jax.Array) and not _holds(jnp.sort(self.permutation) == jnp.arange(K)):
                raise ValueError(f"{_OP}: permutation does not name each of the {K} rows once. Use from_codes.")
        return self

    def codes(self) -> tuple[UInt8[Array, "k n"], Float[Array, "groups n"], UInt8[Array, "groups n"] | None]:
        """(codes, scales, zeros or None) without padding, rows and groups in the packed order."""
        return _unpacked(self)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> Float[Array, "k n"]:
        """W (K, N) in the order of its rows: the equations above, rounded once to `dtype`."""
        return _dequantized(self, jnp.dtype(dtype).name)


@functools.partial(jax.jit, static_argnames="group")
def _packed(codes: Array, scales: Array, zeros: Array | None, permutation: Array | None, *, group: int) -> Any:
    """(words, scales, zeros) of a weight in the order of W."""
    rows = codes.shape[0]
    codes = (codes if permutation is None else codes[permutation]).astype(jnp.uint8)
    zeros = None if zeros is None else zeros.astype(jnp.uint8)
    return (
        layout.pack(_padded_codes(codes, zeros, group)),
        layout.pack_columns(_padded_groups(scales, rows, group)),
        None if zeros is None else layout.pack_zeros(_padded_groups(zeros, rows, group)),
    )


@jax.jit
def _unpacked(tensor: Int4Tensor) -> Any:
    (K, N), scales, zeros = tensor.shape, tensor.scales, tensor.zeros
    groups = -(-K // tensor.group)
    return (
        layout.unpack(tensor.words, (K, N)),
        layout.unpack_columns(scales, N)[:groups],
        None if zeros is None else layout.unpack_zeros(zeros, N)[:groups],
    )


@functools.partial(jax.jit, static_argnames="dtype")
def _dequantized(tensor: Int4Tensor, dtype: str) -> Array:
    codes, scales, zeros = tensor.codes()
    w = tile.dequantize(codes, scales, zeros, group=tensor.group, dtype=dtype)
    return w if tensor.permutation is None else jnp.zeros_like(w).at[tensor.permutation].set(w)


def _padded_codes(codes: Array, zeros: Array | None, group: int) -> Array:
    """Codes with rows up to K', whose values are 0: the zero point of their group, or code 0 where there is none."""
    K, N = codes.shape
    rows = np.arange(K, layout.padded(K))
    if zeros is None:
        padding = jnp.full((rows.size, N), tile.SYMMETRIC_ZERO, jnp.uint8)
    else:
        padding = _padded_groups(zeros, K, group)[rows // group]
    return jnp.concatenate([codes, padding])


def _padded_groups(values: Array, rows: int, group: int) -> Array:
    """Values of the groups of K rows with zeros for those that lie in the padding alone."""
    return jnp.pad(values, ((0, group_count(rows, group) - values.shape[0]), (0, 0)))


def _permutation(g_idx: Any, rows: int, group: int) -> Array | None:
    """The stable order that puts the rows of every group together; None where they are already."""
    if isinstance(g_idx, Tracer):
        raise ValueError(f"{_OP}: g_idx is traced - the order of rows is computed ahead. Pack outside of jit.")
    index = np.asarray(g_idx)
    if index.shape != (rows,) or index.dtype.kind not in "iu":
        raise ValueError(
            f"{_OP}: got g_idx of shape {index.shape} and dtype {index.dtype} - must be integers ({rows},)."
        )
    order = np.argsort(index, kind="stable")
    wrong = np.nonzero(index[order] != np.arange(rows) // group)[0]
    if wrong.size:
        number = int(wrong[0]) // group
        raise ValueError(
            f"{_OP}: {int((index == number).sum())} of {rows} rows have g_idx={number} - all groups but the last must "
            f"have {group=} rows, numbered from 0. Check that g_idx belongs to this weight."
        )
    return None if (order == np.arange(rows)).all() else jnp.asarray(order, jnp.int32)


def storable(scales: Float[Array, "..."], dtype: DTypeLike) -> Bool[Array, ""]:
    """Whether `dtype` holds every scale to its precision: no overflow, no underflow, no NaN."""
    wide = scales.astype(jnp.float32)
    error = jnp.abs(wide.astype(dtype).astype(jnp.float32) - wide)
    return (error <= float(jnp.finfo(dtype).eps) / 2 * jnp.abs(wide)).all()


def check_storable(scales: Float[Array, "..."], dtype: DTypeLike, op: str) -> None:
    """Raises ValueError, outside of jit, for scales that are not `storable`."""
    if isinstance(scales, Tracer) or bool(storable(scales, dtype)):
        return
    size, limits = np.abs(np.asarray(scales, np.float64)), jnp.finfo(dtype)
    if not np.isfinite(size).all():
        raise ValueError(f"{op}: scales are not all finite - the weight would not be. Quantise finite weights.")
    raise ValueError(
        f"{op}: scales between {size[size > 0].min():.3g} and {size.max():.3g} in {jnp.dtype(dtype).name} - it holds "
        f"{float(limits.tiny):.3g} to {float(limits.max):.3g} to its precision. Use bfloat16 scales."
    )


def _stored(scales: Array, dtype: np.dtype) -> Array:
    if dtype.name not in SCALE_DTYPES or not jnp.issubdtype(scales.dtype, jnp.floating):
        raise ValueError(
            f"{_OP}: got {scales.dtype} scales to store as {dtype.name} - must be one of {', '.join(SCALE_DTYPES)}. "
            "Give scale_dtype."
        )
    check_storable(scales, dtype, _OP)
    return scales.astype(dtype)


def _check_codes(name: str, codes: Any) -> None:
    if not jnp.issubdtype(codes.dtype, jnp.integer) or not _holds((codes >= 0) & (codes <= 15)):
        raise ValueError(f"{_OP}: {name} of dtype {codes.dtype} - must be integers 0..15. Clip or unpack them first.")


def _holds(condition: Any) -> bool:
    """Whether it holds everywhere; taken for granted under jit, where no value is known."""
    return isinstance(condition, Tracer) or bool(condition.all())

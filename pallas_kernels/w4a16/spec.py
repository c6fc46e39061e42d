"""The facts of one product with a packed 4-bit weight, read by validation, dispatch, tests and byte counts."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp

from pallas_kernels.w4a16.layout import TILE, padded

OP = "w4a16_matmul"
GROUPS = (32, 64, 128)
DTYPES = ("bfloat16", "float16", "float32")
SCALE_DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class W4A16Spec:
    """One call of `w4a16_matmul`: y = x W with x (M, K) and W (K, N) of 4-bit codes. Hashable; holds no array.

        W[k, n] = (code[k, n] - zero[k // group, n]) * scale[k // group, n],    zero = 8 where `zeros` is False

    `group` is 32, 64 or 128 rows of W, or K' (K in whole tiles) or more for one scale a column. `dtype` is that of x
    and y; `scale_dtype` that of the scales.

    Raises ValueError, naming the field, for sizes, groups or dtypes that have no meaning.
    """

    op: ClassVar[str] = OP

    M: int
    K: int
    N: int
    group: int
    zeros: bool
    dtype: str
    scale_dtype: str

    def __post_init__(self):
        if self.M < 0 or self.K < 1 or self.N < 1:
            raise ValueError(f"{OP}: M={self.M} K={self.K} N={self.N} - a weight has at least one row and one column.")
        check_group(OP, self.group, self.K)
        for name, allowed in (("dtype", DTYPES), ("scale_dtype", SCALE_DTYPES)):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{OP}: {name}={getattr(self, name)!r} - must be one of {', '.join(allowed)}. Cast the "
                    f"{'activations' if name == 'dtype' else 'scales'}."
                )

    @property
    def padded_K(self) -> int:
        """Rows of the packed weight: K in whole tiles."""
        return padded(self.K)

    @property
    def padded_N(self) -> int:
        """Columns of the packed weight: N in whole tiles."""
        return padded(self.N)

    @property
    def groups(self) -> int:
        """Rows of scales."""
        return group_count(self.K, self.group)

    @property
    def operand_dtype(self) -> str:
        """What W is rounded to before it meets x: x's dtype; float32 where that is float16, whose range is narrower
        than a bfloat16 scale's."""
        narrow = self.dtype == "float16" and self.scale_dtype == "bfloat16"
        return "float32" if narrow else self.dtype

    @property
    def empty(self) -> bool:
        """Whether there is no output element."""
        return self.M == 0

    def __str__(self) -> str:
        group = "column" if self.groups == 1 else f"group {self.group}"
        kind = "asymmetric" if self.zeros else "symmetric"
        return f"M={self.M} K={self.K} N={self.N} {self.dtype}, {kind} {group}, {self.scale_dtype} scales"

    def flops(self) -> int:
        """2 M K N: those of the product; unpacking and padding do not count."""
        return 2 * self.M * self.K * self.N

    def weight_bytes(self) -> int:
        """Bytes of the packed weight: codes, scales and zero points, padding included."""
        per_scale = 2 + self.zeros
        return self.padded_K * self.padded_N // 2 + self.groups * self.padded_N * per_scale

    def bytes(self) -> int:
        """Bytes that a call cannot avoid to move: the packed weight, x and y, each once."""
        return self.weight_bytes() + self.M * (self.K + self.N) * jnp.dtype(self.dtype).itemsize


def group_count(rows: int, group: int) -> int:
    """Rows of scales of a weight of that many rows: one for every group that a tile of the padded weight reaches."""
    return -(-padded(rows) // group)


def check_group(op: str, group: int, rows: int) -> None:
    """Refuses a group size that is neither one of GROUPS nor the whole column."""
    if group not in GROUPS and group < padded(rows):
        raise ValueError(
            f"{op}: {group=} of K={rows} rows - must be one of {GROUPS}, or {padded(rows)} or more (K in tiles of "
            f"{TILE}) for one scale a column. Requantise with such a group."
        )


def make_spec(x: Any, words: Any, scales: Any, zeros: Any = None, *, shape: tuple[int, int], group: int) -> W4A16Spec:
    """The spec of a call on x (M, K) and a packed weight of `shape` (K, N). Reads only `.shape` and `.dtype` of arrays.

    Raises ValueError, naming the argument and both shapes, where they do not go together.
    """
    K, N = shape
    if len(x.shape) != 2 or x.shape[1] != K:
        raise _mismatch("x", x, ("M", K), "bring the input features, which are W's rows, last")
    spec = W4A16Spec(
        M=x.shape[0],
        K=K,
        N=N,
        group=group,
        zeros=zeros is not None,
        dtype=jnp.dtype(x.dtype).name,
        scale_dtype=jnp.dtype(scales.dtype).name,
    )
    check_packed(OP, words, scales, zeros, shape=shape, group=group)
    return spec


def check_packed(op: str, words: Any, scales: Any, zeros: Any, *, shape: tuple[int, int], group: int) -> None:
    """Refuses packed arrays that are not those of a weight of `shape` (K, N): names the array, its shape and the right
    one. Of arrays only `.shape` and `.dtype` are read."""
    K, N = shape
    check_group(op, group, K)
    per_column = (padded(N) // TILE, group_count(K, group), TILE)
    wanted: dict[str, tuple[Any, tuple[int, ...], tuple[str, ...]]] = {
        "words": (words, (padded(N) // TILE, padded(K) // TILE, 8, TILE), ("int32",)),
        "scales": (scales, per_column, SCALE_DTYPES),
    }
    if zeros is not None:
        wanted["zeros"] = (zeros, per_column, ("uint8",))
    for name, (array, right, dtypes) in wanted.items():
        if tuple(array.shape) != right or jnp.dtype(array.dtype).name not in dtypes:
            raise _mismatch(name, array, right, f"pack a weight of shape {(K, N)}, {group=}", op=op, dtypes=dtypes)


def _mismatch(
    name: str, array: Any, right: tuple[Any, ...], remedy: str, *, op: str = OP, dtypes: tuple[str, ...] = ()
) -> ValueError:
    kind = f" and dtype {' or '.join(dtypes)}" if dtypes else ""
    fact = f"{name} of shape {tuple(array.shape)} and dtype {jnp.dtype(array.dtype).name}"
    shape = f"({', '.join(map(str, right))})"
    return ValueError(f"{op}: got {fact} - must have shape {shape}{kind}. {remedy[0].upper()}{remedy[1:]}.")

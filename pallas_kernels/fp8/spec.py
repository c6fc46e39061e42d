"""The facts of one product of 8-bit operands, read by validation, dispatch, tests and byte counts."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp

OP = "fp8_matmul"
BLOCK = 128  # operands that share a scale, and the steps of K after which sums are promoted
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
DTYPES = ("bfloat16", "float32")

SCALINGS = ("tensor", "row", "block")


@dataclass(frozen=True, kw_only=True)
class Fp8Spec:
    """One product y = x W^T of codes x (M, K) and W (N, K), both 8-bit floats, with scales. Hashable; holds no array.

        y[m, n] = sum over k of (x[m, k] * x_scale of its block) * (w[n, k] * w_scale of its block)

    scaling says what shares a scale, in rows and columns of each operand; scales are float32 and have two dims:

        tensor    the whole of x (1, 1)          the whole of W (1, 1)
        row       a row of x (M, 1)              a row of W (N, 1), which is a column of y
        block     1 x 128 (M, K/128 up)          128 x 128 (N/128 up, K/128 up)

    x_dtype, w_dtype: float8_e4m3fn or float8_e5m2. dtype: that of y. power_of_two: all scales are; then XLA takes them
    into its product. fast_accumulation: whether the tensor core alone may sum over K, in some 14 bits (cuBLASLt's).
    Raises ValueError, naming the field.
    """

    op: ClassVar[str] = OP

    M: int
    K: int
    N: int
    scaling: str
    dtype: str
    x_dtype: str = E4M3
    w_dtype: str = E4M3
    power_of_two: bool = False
    fast_accumulation: bool = True

    def __post_init__(self):
        if self.M < 0 or self.K < 1 or self.N < 1:
            raise ValueError(f"{OP}: M={self.M} K={self.K} N={self.N} - a weight has at least one row and one column.")
        check_scaling(OP, self.scaling)
        for name, allowed in (("dtype", DTYPES), ("x_dtype", tuple(LARGEST)), ("w_dtype", tuple(LARGEST))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{OP}: {name}={getattr(self, name)!r} - must be one of {', '.join(allowed)}.")

    @property
    def empty(self) -> bool:
        """Whether there is no output element."""
        return self.M == 0

    @property
    def k_blocks(self) -> int:
        """Blocks of 128 of K, the last one perhaps short."""
        return -(-self.K // BLOCK)

    def __str__(self) -> str:
        kinds = f"{self.x_dtype} x {self.w_dtype}"
        return f"M={self.M} K={self.K} N={self.N} {kinds}, scales by {self.scaling}, {self.dtype} result"

    def flops(self) -> int:
        """2 M K N: those of the product."""
        return 2 * self.M * self.K * self.N

    def weight_bytes(self) -> int:
        """Bytes of W's codes and scales."""
        rows, columns = scale_shape((self.N, self.K), w_block(self.scaling, (self.N, self.K)))
        return self.N * self.K + 4 * rows * columns

    def bytes(self) -> int:
        """Bytes that a call cannot avoid to move: both operands with their scales, and y, each once."""
        rows, columns = scale_shape((self.M, self.K), x_block(self.scaling, (self.M, self.K)))
        y = self.M * self.N * jnp.dtype(self.dtype).itemsize
        return self.weight_bytes() + self.M * self.K + 4 * rows * columns + y


def check_scaling(op: str, scaling: str) -> None:
    """Refuses the name of a scaling that there is not."""
    if scaling not in SCALINGS:
        raise ValueError(f"{op}: {scaling=} - must be one of {', '.join(SCALINGS)}.")


def x_block(scaling: str, shape: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of activations (M, K) that share a scale."""
    return {"tensor": shape, "row": (1, shape[1]), "block": (1, BLOCK)}[scaling]


def w_block(scaling: str, shape: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of a weight (N, K) that share a scale."""
    return {"tensor": shape, "row": (1, shape[1]), "block": (BLOCK, BLOCK)}[scaling]


def scale_shape(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Shape of the scales of an operand in such blocks, the last of which may be smaller."""
    rows, columns = (-(-size // max(part, 1)) for size, part in zip(shape, block, strict=True))
    return rows, columns


def make_spec(
    x: Any,
    x_scales: Any,
    w: Any,
    w_scales: Any,
    *,
    scaling: str,
    dtype: str,
    power_of_two: bool = False,
    fast_accumulation: bool = True,
) -> Fp8Spec:
    """The spec of a call. Reads only `.shape` and `.dtype` of arrays.

    Raises ValueError, naming the argument, its shape and the right one, where they do not go together.
    """
    if len(x.shape) != 2 or len(w.shape) != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(
            f"{OP}: got x of shape {tuple(x.shape)} and w of shape {tuple(w.shape)} - must be (M, K) and (N, K). "
            "Bring the dim that is summed over last."
        )
    spec = Fp8Spec(
        M=x.shape[0],
        K=x.shape[1],
        N=w.shape[0],
        scaling=scaling,
        dtype=dtype,
        x_dtype=jnp.dtype(x.dtype).name,
        w_dtype=jnp.dtype(w.dtype).name,
        power_of_two=power_of_two,
        fast_accumulation=fast_accumulation,
    )
    check_scales(OP, "x_scales", x_scales, scale_shape(x.shape, x_block(scaling, x.shape)), scaling)
    check_scales(OP, "w_scales", w_scales, scale_shape(w.shape, w_block(scaling, w.shape)), scaling)
    return spec


def check_scales(op: str, name: str, scales: Any, right: tuple[int, int], scaling: str) -> None:
    """Refuses scales that are not float32 of that shape."""
    if tuple(scales.shape) != right or jnp.dtype(scales.dtype).name != "float32":
        raise ValueError(
            f"{op}: got {name} of shape {tuple(scales.shape)} and dtype {jnp.dtype(scales.dtype).name} - must have "
            f"shape {right} and dtype float32 with {scaling=}. Quantise the operand with that scaling."
        )

"""Named products, small enough for a CPU, from which tests draw; `dataclasses.replace` makes larger ones."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.w4a16 import layout
from pallas_kernels.w4a16.spec import W4A16Spec, group_count

COLUMN = 1 << 30  # a group of any number of rows: one scale a column


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call. Scales are uniform in [scale / 2, scale]; activations are normal with standard deviation `spread`;
    `empty_groups` makes every second group of every third column all zero: codes equal to the zero point."""

    M: int = 5
    K: int = 256
    N: int = 128
    group: int = 64
    zeros: bool = False
    dtype: str = "bfloat16"
    scale_dtype: str = "bfloat16"
    scale: float = 0.02
    spread: float = 1.0
    empty_groups: bool = False

    def operands(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """x (M, K), codes (K, N), scales (groups, N) and zeros (groups, N) or None, in the order of W."""
        rng = np.random.default_rng(seed)
        groups = group_count(self.K, self.group)
        x = self.spread * rng.standard_normal((self.M, self.K))
        codes = rng.integers(0, 16, (self.K, self.N), dtype=np.uint8)
        scales = self.scale * rng.uniform(0.5, 1.0, (groups, self.N))
        zeros = rng.integers(0, 16, (groups, self.N), dtype=np.uint8) if self.zeros else None
        if self.empty_groups:
            group_of_row = np.minimum(np.arange(self.K) // self.group, groups - 1)
            blank = (group_of_row[:, None] % 2 == 0) & (np.arange(self.N)[None, :] % 3 == 0)
            codes = np.where(blank, np.uint8(8) if zeros is None else zeros[group_of_row], codes)
        return x.astype(jnp.dtype(self.dtype)), codes, scales.astype(jnp.dtype(self.scale_dtype)), zeros

    def packed(self, seed: int = 0) -> tuple[Any, Any, Any, Any]:
        """x, words, scales and zeros as an implementation takes them."""
        x, codes, scales, zeros = self.operands(seed)
        columns = None if zeros is None else layout.pack_zeros(jnp.asarray(zeros))
        return jnp.asarray(x), layout.pack(jnp.asarray(codes)), layout.pack_columns(jnp.asarray(scales)), columns

    def spec(self) -> W4A16Spec:
        """The spec of the call."""
        return W4A16Spec(
            M=self.M,
            K=self.K,
            N=self.N,
            group=self.group,
            zeros=self.zeros,
            dtype=self.dtype,
            scale_dtype=self.scale_dtype,
        )


CASES: dict[str, Case] = {
    "plain": Case(),
    "asymmetric": Case(zeros=True),
    "group_32_asymmetric": Case(group=32, zeros=True),
    "group_128": Case(group=128),
    "column_asymmetric": Case(group=COLUMN, zeros=True),
    "one_row": Case(M=1),
    "rows_17": Case(M=17, group=128),
    "rows_130": Case(M=130, group=32, zeros=True),
    "one_of_each": Case(M=1, K=1, N=1, group=32),
    "k_tail": Case(K=200, group=128, zeros=True),
    "k_below_a_group": Case(K=40, group=128, zeros=True),
    "k_odd_tiles": Case(K=192, group=128, zeros=True),
    "k_tail_column": Case(K=100, group=COLUMN),
    "n_tail": Case(N=100, zeros=True),
    "tails": Case(M=3, K=167, N=203, group=32, zeros=True),
    "empty_groups": Case(empty_groups=True),
    "empty_groups_asymmetric": Case(empty_groups=True, zeros=True, group=32),
    "tiny_scales": Case(scale=1e-8, zeros=True),
    "huge_scales": Case(scale=6e4),
    "huge_activations": Case(spread=1e4, zeros=True),
    "float16": Case(dtype="float16", scale_dtype="float16", zeros=True),
    "bfloat16_float16_scales": Case(scale_dtype="float16", zeros=True, group=32),
    "float16_bfloat16_scales": Case(dtype="float16", zeros=True),
    "float32": Case(dtype="float32", zeros=True),
}

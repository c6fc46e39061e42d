"""Named products, small enough for a CPU, from which tests draw; `dataclasses.replace` makes larger ones."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from pallas_kernels.fp8.spec import E4M3, E5M2, Fp8Spec, scale_shape, w_block, x_block


@dataclass(frozen=True, kw_only=True)
class Case:
    """One product of codes. Values are log-normal in size, of both signs, so that codes use their exponents; scales
    are uniform in [scale / 2, scale]. `empty_blocks` makes the first 128 columns of x and 128 rows of W zero."""

    M: int = 37
    K: int = 256
    N: int = 128
    scaling: str = "block"
    dtype: str = "bfloat16"
    x_dtype: str = E4M3
    w_dtype: str = E4M3
    scale: float = 0.02
    empty_blocks: bool = False

    def operands(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """x (M, K), x_scales, w (N, K), w_scales."""
        rng = np.random.default_rng(seed)

        def codes(rows: int, dtype: str) -> np.ndarray:
            values = rng.choice([-1, 1], (rows, self.K)) * np.exp(rng.standard_normal((rows, self.K)))
            return values.astype(jnp.dtype(dtype))

        def scales(shape: tuple[int, int]) -> np.ndarray:
            return (self.scale * rng.uniform(0.5, 1.0, shape)).astype(np.float32)

        x, w = codes(self.M, self.x_dtype), codes(self.N, self.w_dtype)
        if self.empty_blocks:
            x[:, :128] = 0
            w[:128] = 0
        x_shape, w_shape = (self.M, self.K), (self.N, self.K)
        x_scales = scales(scale_shape(x_shape, x_block(self.scaling, x_shape)))
        return x, x_scales, w, scales(scale_shape(w_shape, w_block(self.scaling, w_shape)))

    def spec(self) -> Fp8Spec:
        """The spec of the call."""
        return Fp8Spec(
            M=self.M,
            K=self.K,
            N=self.N,
            scaling=self.scaling,
            dtype=self.dtype,
            x_dtype=self.x_dtype,
            w_dtype=self.w_dtype,
        )


CASES: dict[str, Case] = {
    "block": Case(),
    "row": Case(scaling="row"),
    "tensor": Case(scaling="tensor"),
    "one_of_each": Case(M=1, K=1, N=1),
    "one_row": Case(M=1, K=384, N=200),
    "tails": Case(M=67, K=300, N=203),
    "tails_row": Case(M=67, K=300, N=203, scaling="row"),
    "many_rows": Case(M=300, K=256, N=130),
    "gradient": Case(x_dtype=E5M2, scaling="tensor"),
    "weight_gradient": Case(w_dtype=E5M2, scaling="tensor", K=200),
    "empty_blocks": Case(empty_blocks=True, N=256),
    "tiny_scales": Case(scale=1e-15),
    "huge_scales": Case(scale=1e15),
    "float32": Case(dtype="float32"),
}

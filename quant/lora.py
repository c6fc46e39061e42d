"""Low-rank adapters: a weight that stays as it is, and beside it the product of two small matrices that is trained.

LoRA, 2106.09685; over a weight of 4 bits, QLoRA, 2305.14314.
"""

import dataclasses
import functools
import math
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Which weights have an adapter, and which one.

    rank: columns of A and rows of B. alpha: the product counts `alpha / rank` times or, where `rank_stabilized`,
    `alpha / sqrt(rank)` times (rsLoRA, 2312.03732). dropout: the share of what A reads that a training step leaves out.
    targets: a regular expression for whole names of linears, "attention/q", "k", "v", "out", "mlp/gate", "up", "down".

    Raises ValueError for a rank, alpha, dropout or expression that is none.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    rank_stabilized: bool = False
    targets: str = ".*"

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"LoraConfig: rank={self.rank} - must be at least 1. 8 to 64 are usual.")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"LoraConfig: alpha={self.alpha} - must be positive and finite. Twice the rank is usual.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"LoraConfig: dropout={self.dropout} - must lie in [0, 1).")
        try:
            re.compile(self.targets)
        except re.error as error:
            raise ValueError(f"LoraConfig: targets={self.targets!r} is no regular expression: {error}.") from error

    @property
    def scale(self) -> float:
        """What the product A B is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    def matches(self, name: str) -> bool:
        """Whether the linear of this name has an adapter."""
        return re.fullmatch(self.targets, name) is not None


@functools.partial(jax.tree_util.register_dataclass, data_fields=("base", "a", "b", "key"), meta_fields=("config",))
@dataclass(frozen=True, kw_only=True)
class LoraTensor:
    """A weight W of shape (K, N) with an adapter, used as

        y = x base + scale * (x A) B        W = base + scale * A B        scale = config.scale

    base: any other weight that `quant.matmul` takes; no gradient reaches it. a: (K, r) and b: (r, N), float32. key:
    None, or a typed key: then the share `config.dropout` of the x that A reads is 0, the rest divided by what is left.

    Transformations may stack weights on leading axes of all arrays, as they do with an Int4Tensor.
    """

    base: Any
    a: Any
    b: Any
    key: Any = None
    config: LoraConfig

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> Float[Array, "k n"]:
        """W (K, N), computed in float32 and rounded once to `dtype`."""
        base = self.base.astype(jnp.float32) if isinstance(self.base, jax.Array) else self.base.dequantize()
        return (base + self.config.scale * jnp.matmul(self.a, self.b, precision="highest")).astype(dtype)


def init_factors(
    key: Key[Array, ""], shape: tuple[int, ...], rank: int
) -> tuple[Float[Array, "*stack k r"], Float[Array, "*stack r n"]]:
    """(A, B) for weights of shape (..., K, N), float32: A uniform within 1/sqrt(K), B zero, so that A B is 0.

    As peft begins: Kaiming's uniform with a = sqrt(5), whose bound is sqrt(6 / ((1 + 5) K)).
    """
    *stack, K, N = shape
    bound = 1 / math.sqrt(K)
    a = jax.random.uniform(key, (*stack, K, rank), jnp.float32, -bound, bound)
    return a, jnp.zeros((*stack, rank, N), jnp.float32)


def low_rank_product(x: Float[Array, "*batch k"], weight: LoraTensor) -> Float[Array, "*batch n"]:
    """scale * (x A) B in x's dtype, with dropout of x where the weight has a key."""
    if weight.key is not None:
        kept = 1 - weight.config.dropout
        x = jnp.where(jax.random.bernoulli(weight.key, kept, x.shape), x / kept, 0)
    # Scaled in float32, before A is cast: the activations are not rounded once more.
    a, b = (m.astype(x.dtype) for m in (weight.config.scale * weight.a, weight.b))
    return (x @ a) @ b


def with_key(weight: LoraTensor, key: Key[Array, ""]) -> LoraTensor:
    """The stack of weights with a key for each of them, where there is anything to leave out."""
    if not weight.config.dropout:
        return weight
    return dataclasses.replace(weight, key=jax.random.split(key, weight.a.shape[0]))

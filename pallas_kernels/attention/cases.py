"""Named attention calls, small enough for a CPU, from which tests draw; `dataclasses.replace` makes larger ones."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.spec import AttentionSpec, CausalAlignment, make_spec

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call. `bias` and `mask` name the axes they keep ("bnts", "1n1s"); runs are (segment id, count) pairs."""

    B: int = 2
    T: int = 48
    S: int = 48
    N: int = 4
    K: int = 2
    H: int = 16
    H_v: int = 16
    dtype: str = "float32"
    scale: float | None = None
    is_causal: bool = False
    causal_alignment: CausalAlignment = "top_left"
    window: int | tuple[int, int] | None = None
    query_lengths: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    query_runs: Runs | None = None
    kv_runs: Runs | None = None
    bias: str | None = None
    bias_dtype: str = "float32"
    bias_hides: bool = False
    mask: str | None = None

    def arguments(self, seed: int = 0) -> dict[str, Any]:
        """The keyword arguments of `dot_product_attention`: standard normal operands, all else as the case says."""
        rng = np.random.default_rng(seed)
        sizes = {"b": self.B, "n": self.N, "t": self.T, "s": self.S, "1": 1}
        arguments: dict[str, Any] = {
            "query": jnp.asarray(rng.standard_normal((self.B, self.T, self.N, self.H)), self.dtype),
            "key": jnp.asarray(rng.standard_normal((self.B, self.S, self.K, self.H)), self.dtype),
            "value": jnp.asarray(rng.standard_normal((self.B, self.S, self.K, self.H_v)), self.dtype),
            "scale": self.scale,
            "is_causal": self.is_causal,
            "causal_alignment": self.causal_alignment,
            "local_window_size": self.window,
        }
        if self.query_lengths is not None:
            arguments["query_seq_lengths"] = jnp.asarray(self.query_lengths, jnp.int32)
        if self.kv_lengths is not None:
            arguments["key_value_seq_lengths"] = jnp.asarray(self.kv_lengths, jnp.int32)
        if self.query_runs is not None:
            arguments["segment_ids"] = (
                _segments(self.query_runs, self.B),
                _segments(self.kv_runs or self.query_runs, self.B),
            )
        if self.bias is not None:
            bias = rng.standard_normal([sizes[axis] for axis in self.bias])
            if self.bias_hides:
                bias = np.where(rng.random(bias.shape) < 0.2, -np.inf, bias)
                bias[0, 0, 0, :] = -np.inf
            arguments["bias"] = jnp.asarray(bias, self.bias_dtype)
        if self.mask is not None:
            mask = rng.random([sizes[axis] for axis in self.mask]) < 0.7
            mask[0, 0, 0, :] = False
            arguments["mask"] = jnp.asarray(mask)
        return arguments

    def spec(self, *, return_lse: bool = False) -> AttentionSpec:
        """The spec of the call."""
        return make_spec(**self.arguments(), return_lse=return_lse)


def _segments(runs: Runs, batch: int) -> Any:
    """Segment ids (B, length); each batch entry is turned by one more token, so that no two are cut alike."""
    ids = np.concatenate([np.full(count, segment) for segment, count in runs])
    return jnp.asarray(np.stack([np.roll(ids, b) for b in range(batch)]), jnp.int32)


CASES: dict[str, Case] = {
    "plain": Case(),
    "causal": Case(is_causal=True),
    "multi_query": Case(K=1, is_causal=True),
    "multi_head_odd": Case(N=3, K=3, H=5, H_v=5, T=37, S=37, is_causal=True),
    "group_of_3": Case(N=9, K=3, T=33, S=41),
    "head_dim_40": Case(B=1, H=40, H_v=40, is_causal=True),
    "value_dim_larger": Case(H=8, H_v=24, is_causal=True),
    "value_dim_smaller": Case(H=24, H_v=8),
    "head_dims_192_128": Case(H=192, H_v=128, is_causal=True),
    "head_dims_72_200_segments": Case(H=72, H_v=200, query_runs=((0, 20), (1, 28))),
    "head_dim_200_lengths": Case(H=200, H_v=200, query_lengths=(48, 11), kv_lengths=(13, 48), is_causal=True),
    "head_dim_256_window": Case(H=256, H_v=256, window=(6, 2)),
    "scale": Case(scale=0.3, is_causal=True),
    "one_query": Case(T=1, S=61),
    "one_key": Case(T=19, S=1, is_causal=True),
    "one_of_each": Case(B=1, T=1, S=1, N=1, K=1, H=1, H_v=1),
    "cross_long_keys": Case(T=29, S=67),
    "cross_causal_top_left": Case(T=29, S=67, is_causal=True),
    "cross_causal_bottom_right": Case(T=29, S=67, is_causal=True, causal_alignment="bottom_right"),
    "more_queries_top_left": Case(T=67, S=29, is_causal=True),
    "more_queries_bottom_right": Case(T=67, S=29, is_causal=True, causal_alignment="bottom_right"),
    "window": Case(T=65, S=65, window=(7, 3)),
    "window_int": Case(window=5),
    "window_causal": Case(T=65, S=65, window=(9, 9), is_causal=True),
    "window_one_key": Case(window=(0, 0)),
    "window_cross_bottom_right": Case(T=40, S=65, window=(6, 2), causal_alignment="bottom_right"),
    "window_past_the_keys": Case(T=65, S=20, window=(4, 4)),
    "lengths": Case(query_lengths=(48, 11), kv_lengths=(13, 48)),
    "lengths_zero": Case(query_lengths=(0, 48), kv_lengths=(48, 0), is_causal=True),
    "lengths_causal_bottom_right": Case(
        T=29, S=50, query_lengths=(29, 7), kv_lengths=(20, 50), is_causal=True, causal_alignment="bottom_right"
    ),
    "kv_lengths_decode": Case(T=1, S=50, kv_lengths=(20, 50), is_causal=True, causal_alignment="bottom_right"),
    "segments": Case(query_runs=((0, 13), (1, 20), (2, 15)), is_causal=True),
    "segments_out_of_order": Case(T=40, S=40, query_runs=((3, 9), (0, 12), (3, 7), (-1, 12))),
    "segments_cross": Case(T=30, S=50, query_runs=((0, 10), (1, 12), (-1, 8)), kv_runs=((1, 21), (0, 20), (5, 9))),
    "bias": Case(bias="bnts"),
    "bias_over_batch": Case(bias="1nts", is_causal=True),
    "bias_over_heads": Case(bias="b1ts", dtype="bfloat16", bias_dtype="bfloat16"),
    "bias_of_keys": Case(bias="b11s", T=33),
    "bias_of_queries": Case(bias="1nt1", T=33),
    "bias_hides": Case(bias="1nts", bias_hides=True, is_causal=True),
    "mask": Case(mask="bnts"),
    "mask_of_keys": Case(mask="b11s", is_causal=True),
    "mask_over_heads": Case(mask="11ts", T=50, S=33),
    "everything": Case(
        T=50, S=61, H_v=12, is_causal=True, causal_alignment="bottom_right", window=(30, 30), query_lengths=(50, 33),
        kv_lengths=(61, 40), query_runs=((0, 20), (1, 30)), kv_runs=((0, 31), (1, 30)), bias="b1ts", bias_hides=True,
        mask="1n1s",
    ),
    "bfloat16": Case(dtype="bfloat16", is_causal=True),
    "float16": Case(dtype="float16", T=61, S=61),
    "bfloat16_float32_bias": Case(dtype="bfloat16", bias="1nts"),
}  # fmt: skip

"""The facts of one attention call: sizes, dtypes and flags, read by validation, dispatch, tests and FLOP counts."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import jax.numpy as jnp
import numpy as np

CausalAlignment = Literal["top_left", "bottom_right"]
ContextParallel = Literal["ring", "all_gather"]
Precision = Literal["input", "fp8"]
Descaled = Literal["by head", "by block"]

OP = "dot_product_attention"
_DTYPES = ("float16", "bfloat16", "float32", "float64")
_CODES = "float8_e4m3fn"
DESCALED_ROWS = (64, 128, 128)  # of queries, keys and values: how many share one of `descales` by block


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One call of `dot_product_attention`. Hashable; holds no array.

    Sizes: B batch, T queries, S keys, N query heads, K key/value heads, H query/key head dim, H_v value head dim.
    `window` is (left, right): query i sees keys i + shift - left ... i + shift + right, both ends included, where
    shift is 0 for "top_left"; for "bottom_right" it is such that the last query is level with the last key (of each
    batch entry, where lengths are given). `bias` is (shape, dtype name) and `mask` a shape, both 4-D.
    `traced_scale` says that the scale is an array and not a Python number. `zigzag` is the number of devices in whose
    zigzag order the sequences are stored, 1 for their own order; lengths, causality and windows go by places in the
    sequence. `context` is the number of devices that sequences are cut over, and `context_parallel` how they meet.

    `precision` is what products are of: "input": numbers of the input dtype; "fp8": of e4m3. `descaled` says that the
    inputs are e4m3 numbers to be multiplied by scales, one a head or one a block; `dtype` is then the output's.

    `shifted` is for calls that see a part of the sequences: the shift comes with the arrays, one per batch entry.
    """

    op: ClassVar[str] = OP

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    H_v: int
    dtype: str
    is_causal: bool = False
    causal_alignment: CausalAlignment = "top_left"
    window: tuple[int, int] | None = None
    query_lengths: bool = False
    kv_lengths: bool = False
    segments: bool = False
    bias: tuple[tuple[int, ...], str] | None = None
    mask: tuple[int, ...] | None = None
    traced_scale: bool = False
    return_lse: bool = False
    zigzag: int = 1
    context: int = 1
    context_parallel: ContextParallel = "ring"
    shifted: bool = False
    precision: Precision = "input"
    descaled: Descaled | None = None

    @property
    def G(self) -> int:
        """Query heads per key/value head."""
        return self.N // self.K

    @property
    def accumulation_dtype(self) -> np.dtype:
        """The type of logits, softmax, accumulator and LSE: float32, and float64 for float64 inputs."""
        return jnp.promote_types(self.dtype, jnp.float32)

    @property
    def shift(self) -> int | None:
        """Position of query 0 among the keys, or None where it differs by batch entry and is known at run time."""
        if self.shifted:
            return None
        if self.causal_alignment == "top_left":
            return 0
        return None if self.query_lengths or self.kv_lengths else self.S - self.T

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        """(below, above): query i sees only keys j with i + shift - below <= j <= i + shift + above; None: no bound."""
        below, above = self.window or (None, None)
        if self.is_causal:
            above = 0
        return below, above

    @property
    def default_scale(self) -> float:
        """1 / sqrt(H), with H as the caller gave it: padding a head dim must not change the scale."""
        return 1.0 / math.sqrt(self.H)

    @property
    def empty(self) -> bool:
        """Whether no output element depends on any input: there is no output, or there are no keys."""
        return 0 in (self.B, self.T, self.S, self.N, self.H_v)

    def __str__(self) -> str:
        fields = [f"B={self.B} T={self.T} S={self.S} N={self.N} K={self.K} H={self.H} H_v={self.H_v} {self.dtype}"]
        if self.is_causal or self.window is not None:
            fields.append(f"is_causal={self.is_causal} window={self.window} {self.causal_alignment}")
        fields += [name for name in ("query_lengths", "kv_lengths", "segments") if getattr(self, name)]
        fields += [f"{name}={getattr(self, name)}" for name in ("bias", "mask") if getattr(self, name) is not None]
        fields += [name for name in ("traced_scale", "return_lse", "shifted") if getattr(self, name)]
        if self.precision != "input":
            fields.append(f"precision={self.precision}")
        if self.descaled:
            fields.append(f"descales {self.descaled}")
        if self.zigzag > 1:
            fields.append(f"zigzag={self.zigzag}")
        if self.context > 1:
            fields.append(f"context={self.context} ({self.context_parallel})")
        return ", ".join(fields)

    def live_pairs(self) -> int:
        """(query, key) pairs that causality and the window leave, per batch entry and head; no lengths, no masks."""
        if self.shift is None:
            raise ValueError(
                f"{self.op}: live pairs are not static where the shift is not: with {self.shifted=}, or "
                "causal_alignment='bottom_right' and sequence lengths - it must be known. Drop those from the spec."
            )
        below, above = self.bounds
        centre = np.arange(self.T) + self.shift
        first = np.zeros(self.T, int) if below is None else np.maximum(centre - below, 0)
        last = np.full(self.T, self.S - 1) if above is None else np.minimum(centre + above, self.S - 1)
        return int(np.maximum(last - first + 1, 0).sum())

    def flops(self, *, backward: bool = False, live: bool = False) -> int:
        """Matmul FLOPs of the forward pass, or with `backward` of the backward pass alone.

        forward = 2 * B * N * pairs * (H + H_v); backward = 2.5 * forward. `pairs` is T * S, halved if causal, as
        the FlashAttention papers count (arXiv 2407.08608, section 4.1); with `live` it is the exact number of pairs
        that causality and the window leave, so that no convention flatters a short window.
        """
        pairs = self.live_pairs() if live else self.T * self.S // (2 if self.is_causal else 1)
        forward = 2 * self.B * self.N * pairs * (self.H + self.H_v)
        return forward * 5 // 2 if backward else forward


def make_spec(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    return_residual: bool = False,
    causal_alignment: Any = "top_left",
    segment_ids: Any = None,
    return_lse: bool = False,
    zigzag: int = 1,
    context_parallel: Any = "ring",
    precision: Any = "input",
    descales: Any = None,
) -> AttentionSpec:
    """The spec of a call of `dot_product_attention`; of arrays only `.shape` and `.dtype` are read.

    Raises ValueError, naming the argument, for a call that has no meaning.
    """
    for name, operand in (("query", query), ("key", key), ("value", value)):
        if len(operand.shape) not in (3, 4):
            raise _error(
                name, operand, "must be (batch, length, heads, head dim), or the same without batch", "Reshape it"
            )
        if descales is not None and jnp.dtype(operand.dtype).name != _CODES:
            raise _error(name, operand, f"dtype must be {_CODES} to go with descales", "Cast it, or give no descales")
        if descales is None and jnp.dtype(operand.dtype).name == _CODES:
            raise _error(name, operand, "needs descales and precision='fp8'", "Give them, or cast it to bfloat16")
        if descales is None and jnp.dtype(operand.dtype).name not in _DTYPES:
            raise _error(name, operand, f"dtype must be one of {', '.join(_DTYPES)}", "Cast it")
    B, T, N, H = _rank4(query.shape)
    _, S, K, H_v = _rank4(value.shape)
    if _rank4(key.shape) != (B, S, K, H):
        raise _error(
            "key", key, f"must be {(B, S, K, H)} to go with {query.shape=} and {value.shape=}", "Align the three"
        )
    if _rank4(value.shape)[0] != B:
        raise _error("value", value, f"batch size must be the query's {B}", "Align the two")
    if not query.dtype == key.dtype == value.dtype:
        raise _error("query", query, f"dtype must equal {key.dtype=} and {value.dtype=}", "Cast the three to one dtype")
    if H == 0:
        raise _error("query", query, "the head dim must be at least 1", "Give the heads at least one dim")
    if K == 0 or N % K:
        raise _error(
            "query", query, f"its {N} heads must be a multiple of the {K} key/value heads", "Repeat or drop heads"
        )
    for name, lengths in (("query_seq_lengths", query_seq_lengths), ("key_value_seq_lengths", key_value_seq_lengths)):
        if lengths is not None and not _integers(lengths, (B,)):
            raise _error(name, lengths, f"must be integers of shape {(B,)}", "Give one length per batch entry")
    if segment_ids is not None:
        for ids, length in zip(segment_sides(segment_ids), (T, S), strict=True):
            if not _integers(ids, (B, length)):
                raise _error(
                    "segment_ids", ids, f"must be integers of shape {(B, length)}",
                    "Give one id per token, as a pair (of the queries, of the keys) where the two differ",
                )  # fmt: skip
    if mask is not None and mask.dtype != jnp.bool_:
        raise _error(
            "mask", mask, "dtype must be bool, True where attention is allowed", "Pass an additive mask as bias"
        )
    if bias is not None and not jnp.issubdtype(bias.dtype, jnp.floating):
        raise _error("bias", bias, "dtype must be floating", "Pass a boolean mask as mask")
    for name, operand in (("bias", bias), ("mask", mask)):
        if operand is not None and not _broadcasts(operand.shape, (B, N, T, S)):
            raise _error(name, operand, f"must broadcast to (B, N, T, S) = {(B, N, T, S)}", "Insert axes of size 1")
    if scale is not None and jnp.shape(scale) != ():
        raise ValueError(f"{OP}: {jnp.shape(scale)=} - must be a scalar. Multiply the query by anything else.")
    if causal_alignment not in get_args(CausalAlignment):
        raise ValueError(
            f"{OP}: unknown {causal_alignment=} - must be one of {get_args(CausalAlignment)}. Use 'top_left' for "
            "jax.nn's meaning and 'bottom_right' for FlashAttention's."
        )
    if context_parallel not in get_args(ContextParallel):
        raise ValueError(
            f"{OP}: unknown {context_parallel=} - must be one of {get_args(ContextParallel)}. Use 'ring', which needs "
            "the memory of one shard of keys."
        )
    if precision not in get_args(Precision):
        raise ValueError(
            f"{OP}: unknown {precision=} - must be one of {get_args(Precision)}. Use 'input' for products in "
            "the inputs' dtype."
        )
    descaled = None if descales is None else _descaled(descales, B, ((N, T), (K, S), (K, S)))
    if descaled and (precision != "fp8" or zigzag > 1):
        raise ValueError(
            f"{OP}: descales with {precision=} and {zigzag=} - they go with precision='fp8' and sequences in their own "
            "order. Give both so, or bfloat16 arrays without descales."
        )
    if zigzag < 1 or (zigzag > 1 and (T % (2 * zigzag) or S % (2 * zigzag))):
        raise ValueError(
            f"{OP}: {zigzag=} with {T} queries and {S} keys - both must be multiples of twice a positive number of "
            "devices. Pad them, or give zigzag=1 for sequences in their own order."
        )
    if return_residual and return_lse:
        raise ValueError(
            f"{OP}: {return_residual=} with {return_lse=} - they are two forms of one result. Ask for return_lse."
        )
    return AttentionSpec(
        B=B, T=T, S=S, N=N, K=K, H=H, H_v=H_v,
        dtype="bfloat16" if descaled else jnp.dtype(query.dtype).name,
        is_causal=is_causal,
        causal_alignment=causal_alignment,
        window=_window(local_window_size),
        query_lengths=query_seq_lengths is not None,
        kv_lengths=key_value_seq_lengths is not None,
        segments=segment_ids is not None,
        bias=None if bias is None else (_rank4(bias.shape), jnp.dtype(bias.dtype).name),
        mask=None if mask is None else _rank4(mask.shape),
        traced_scale=scale is not None and not isinstance(scale, (int, float)),
        return_lse=return_lse or return_residual,
        zigzag=zigzag,
        context_parallel=context_parallel,
        precision=precision,
        descaled=descaled,
    )  # fmt: skip


def _descaled(descales: Any, B: int, sides: tuple[tuple[int, int], ...]) -> Descaled:
    """What the descales of queries, keys and values, with these numbers of heads and rows, are of."""
    if not isinstance(descales, (tuple, list)) or len(descales) != 3:
        raise ValueError(f"{OP}: descales of type {type(descales).__name__} - must be three. Give (query, key, value).")
    descaled: Descaled = "by head"
    for scale, name, (heads, rows), block in zip(
        descales, ("query", "key", "value"), sides, DESCALED_ROWS, strict=True
    ):
        number = isinstance(scale, (int, float))
        shape, dtype = ((), "float32") if number else (tuple(scale.shape), jnp.dtype(scale.dtype).name)
        count = -(-rows // block)
        if shape not in ((), (B, heads), (B, heads, count)) or dtype != "float32":
            raise ValueError(
                f"{OP}: a descale of the {name} of {shape=} and {dtype=} - must be float32 and one number, "
                f"{(B, heads)}, or {(B, heads, count)}, one for every {block} rows. Reshape or cast it."
            )
        descaled = "by block" if len(shape) == 3 else descaled
    return descaled


def segment_sides(segment_ids: Any) -> tuple[Any, Any]:
    """(ids of the queries, ids of the keys); one array is both."""
    if not isinstance(segment_ids, (tuple, list)):
        return segment_ids, segment_ids
    if len(segment_ids) != 2:
        raise ValueError(f"{OP}: {len(segment_ids)=} - must be one array or a pair. Give (query ids, key ids).")
    return segment_ids[0], segment_ids[1]


def _rank4(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1,) * (4 - len(shape)) + tuple(shape)


def _broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    return len(shape) <= 4 and all(size in (1, whole) for size, whole in zip(_rank4(shape), full, strict=True))


def _integers(operand: Any, shape: tuple[int, ...]) -> bool:
    return operand.shape == shape and jnp.issubdtype(operand.dtype, jnp.signedinteger)


def _window(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    if size is None:
        return None
    left, right = (size, size) if isinstance(size, int) else size
    if left < 0 or right < 0:
        raise ValueError(
            f"{OP}: negative local_window_size={size!r} - both sides count keys and must be >= 0. For no limit on a "
            "side give a number as large as the key length."
        )
    return left, right


def _error(name: str, operand: Any, requirement: str, remedy: str) -> ValueError:
    fact = f"{name} of shape {tuple(operand.shape)} and dtype {jnp.dtype(operand.dtype).name}"
    return ValueError(f"{OP}: got {fact} - {requirement}. {remedy}.")

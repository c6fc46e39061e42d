"""Perplexity of a model on a text, with an interval: what a change of its weights costs.

    window 0   | context .............. |         scores all of its tokens but the first
    window 1            | .............. context |      the tokens that no window before it scored
               | stride |

With a stride of the whole context every window stands alone, and its first token is predicted by none.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float64, Int, Int32, Int64, Integer

from jaxflash.config import ModelConfig
from jaxflash.corpus.tokens import token_stream
from jaxflash.language_model import LanguageModel, load
from jaxflash.loss import chunked_cross_entropy
from jaxflash.model import abstract

_OP = "evaluate"
_LOGITS = 1024  # places whose logits are alive at a time
_RESAMPLES = 10_000
_TAIL = 2.5  # per cent, on either side of the interval


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """exp(nats / tokens) over the scored tokens, and how it was measured; prints as one line.

    low, high: where 95 % of the perplexities of windows drawn anew from these, with repetition, lie (the percentile
    bootstrap; Efron and Tibshirani 1993, section 13.3). It says what other text of this kind would change, and is as
    wide as the perplexity itself varies from window to window; NaN for a single window.
    """

    value: float
    low: float
    high: float
    nats: float
    tokens: int
    windows: int
    context: int
    stride: int

    def __str__(self) -> str:
        return (
            f"perplexity {self.value:.3f}, 95 % interval {self.low:.3f} to {self.high:.3f} "
            f"({self.tokens:,} tokens in {self.windows} windows of {self.context}, stride {self.stride})"
        )


def evaluate(
    model: LanguageModel | str | Path,
    data: str | Iterable[str] | Integer[np.ndarray, "..."],
    *,
    context: int = 512,
    stride: int | None = None,
    max_tokens: int | None = None,
    batch_size: int = 8,
) -> Perplexity:
    """Perplexity of `data`, in windows of `context` tokens, one every `stride`; the last one may be shorter.

    Every kind of weight is multiplied as it is in `generate`. Texts are tokenised one after the other with nothing
    between them and no start token.

    Args:
      model: a LanguageModel, or what `load` takes.
      data: a text, several, or token ids.
      context: tokens a window, at most the model's. stride: None is `context`; less gives every token more to go by.
      max_tokens: only the first ones of `data`.
      batch_size: windows at a time; the result does not depend on it beyond rounding.

    Raises:
      ValueError: a window, stride or text that nothing can be predicted in, or ids outside of the vocabulary.
      FloatingPointError: the model's loss is not finite; names the window.

    >>> evaluate(run.model, "To be, or not to be", context=8)  # doctest: +SKIP
    Perplexity(value=11.2, ...)
    """
    model = model if isinstance(model, LanguageModel) else load(model)
    stride = context if stride is None else stride
    _check_windows(model.config, context, stride, max_tokens, batch_size)
    if isinstance(data, np.ndarray):
        tokens = data[:max_tokens]
    else:
        texts = [data] if isinstance(data, str) else data
        tokens = token_stream(texts, model.tokenizer, limit=max_tokens)
    _check_tokens(model.config, tokens)
    rows, targets, mask = windows(tokens, context=context, stride=stride)
    sums = [
        np.asarray(_nats(model.params, *batch, config=model.config), np.float64)[: len(rows) - start]
        for start, batch in _batches(rows, targets, mask, size=min(batch_size, len(rows)))
    ]
    return _perplexity(np.concatenate(sums), mask.sum(axis=1), context, stride)


def windows(
    tokens: Integer[np.ndarray, " n"], *, context: int, stride: int
) -> tuple[Int32[np.ndarray, "w t"], Int32[np.ndarray, "w t"], Bool[np.ndarray, "w t"]]:
    """(tokens, targets, whether a target counts) of every window that has a target, as drawn at the top of this file.

    A short last window is filled up with zeros that do not count.
    """
    count = 1 + -(-max(len(tokens) - context, 0) // stride)
    starts = np.arange(count) * stride
    place = starts[:, None] + np.arange(context)
    padded = np.zeros(int(starts[-1]) + context + 1, np.int32)
    padded[: len(tokens)] = tokens
    scored = np.append(0, starts[:-1] + context)[:, None]  # targets before this one counted in an earlier window
    mask = (place + 1 >= scored) & (place + 1 < len(tokens)) & (np.arange(context) < context - 1)
    some = mask.any(axis=1)
    return padded[place][some], padded[place + 1][some], mask[some]


def _check_windows(config: ModelConfig, context: int, stride: int, max_tokens: int | None, batch_size: int) -> None:
    if not 2 <= context <= config.context:
        raise ValueError(
            f"{_OP}: {context=} - must be from 2, one token to read and one to predict, to the model's "
            f"context={config.context}. Choose another."
        )
    if not 1 <= stride <= context:
        raise ValueError(f"{_OP}: {stride=} - must be from 1 to {context=}: a longer one would skip tokens. Lower it.")
    if max_tokens is not None and max_tokens < 2:
        raise ValueError(f"{_OP}: {max_tokens=} - must be at least 2, or None for the whole text. Raise it.")
    if batch_size < 1:
        raise ValueError(f"{_OP}: {batch_size=} - must be at least 1.")


def _check_tokens(config: ModelConfig, tokens: Integer[np.ndarray, "..."]) -> None:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"{_OP}: got tokens of shape {tokens.shape} and dtype {tokens.dtype} - must be integers (n,). "
            "Concatenate rows first."
        )
    if len(tokens) < 2:
        raise ValueError(f"{_OP}: the text has {len(tokens)} token(s) - nothing can be predicted. Give a longer one.")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= config.vocab_size:
        raise ValueError(
            f"{_OP}: token ids lie in [{low}, {high}], outside the vocabulary of {config.vocab_size}. "
            "Use the tokenizer that the model was trained with."
        )


def _batches(rows: np.ndarray, targets: np.ndarray, mask: np.ndarray, *, size: int) -> Any:
    """(number of its first window, `size` windows) at a time; the last batch is filled up, so that all compile once."""
    for start in range(0, len(rows), size):
        chosen = np.minimum(np.arange(start, start + size), len(rows) - 1)
        yield start, (rows[chosen], targets[chosen], mask[chosen])


@functools.partial(jax.jit, static_argnames="config")
def _nats(
    params: Any, tokens: Int[Array, "b t"], targets: Int[Array, "b t"], mask: Bool[Array, "b t"], *, config: ModelConfig
) -> Float[Array, " b"]:
    """Nats of every window, with the logits of one window alive at a time."""
    model = nnx.merge(abstract(config)[0], params)

    def one(row: Any) -> Array:
        hidden, targets, mask = jax.tree.map(lambda a: a[None], row)
        return chunked_cross_entropy(model.logits, hidden, targets, mask, chunk=_LOGITS)[0]

    return jax.lax.map(one, (model.hidden(tokens), targets, mask))


def _perplexity(
    nats: Float64[np.ndarray, " w"], counts: Int64[np.ndarray, " w"], context: int, stride: int
) -> Perplexity:
    wrong = np.flatnonzero(~np.isfinite(nats))
    if wrong.size:
        raise FloatingPointError(
            f"{_OP}: the loss of window {wrong[0]} is {nats[wrong[0]]} - must be finite. Look at the model's weights."
        )
    low, high = bootstrap(nats, counts)
    return Perplexity(
        value=math.exp(nats.sum() / counts.sum()),
        low=low,
        high=high,
        nats=float(nats.sum()),
        tokens=int(counts.sum()),
        windows=len(nats),
        context=context,
        stride=stride,
    )


def bootstrap(
    nats: Float64[np.ndarray, " w"], counts: Int64[np.ndarray, " w"], *, seed: int = 0
) -> tuple[float, float]:
    """The 95 % interval of exp(sum of nats / sum of counts) over windows drawn with repetition; NaN for one window."""
    if len(nats) == 1:
        return math.nan, math.nan
    rng = np.random.default_rng(seed)
    means = np.empty(_RESAMPLES)
    for i in range(_RESAMPLES):
        drawn = rng.integers(0, len(nats), len(nats))
        means[i] = nats[drawn].sum() / counts[drawn].sum()
    low, high = np.exp(np.percentile(means, [_TAIL, 100 - _TAIL]))
    return float(low), float(high)

"""Text run through a model one block at a time, and the statistics of what the linears of a block read.

    tokens -> embed -> x -> block 0 -> x -> block 1 -> ...      only x and one block are alive
                             | a tap before a linear adds  sum x x^T,  sum |x|,  count,  and
                             | sum x (r - x)^T  where r, of the dense model's blocks, comes along beside x

The model does not know that it is observed: a tap takes a linear's place in a module made for this one trace, and
whatever comes after the last tap is dead code to the compiler. A block's parameters here are a flat dict,
"attention/q/weight" -> leaf.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float, Int, PyTree

from jaxflash.config import ModelConfig
from jaxflash.data import Batch, open_dataset
from jaxflash.layers import Linear, rotary_table
from jaxflash.model import Block, abstract
from jaxflash.tokenizer import Tokenizer
from quant.observe import Statistics, observe

_OP = "quantize"

type BlockParams = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Linears of a block that read the same inputs, and what makes these linearly: a norm or another linear."""

    linears: tuple[str, ...]
    producer: str


# In the order in which a block computes them: each stage sees the effect of the stages before it.
STAGES = (
    Stage(linears=("attention/q", "attention/k", "attention/v"), producer="attention_norm"),
    Stage(linears=("attention/out",), producer="attention/v"),
    Stage(linears=("mlp/gate", "mlp/up"), producer="mlp_norm"),
    Stage(linears=("mlp/down",), producer="mlp/up"),
)


def calibration_batches(
    data: Sequence[str | Path], tokenizer: Tokenizer, *, vocab_size: int, rows: int, seq_len: int, batch_size: int
) -> list[Batch]:
    """`rows` rows of `seq_len` tokens from evenly over the documents of `data`, which follow one another as one stream.

    Raises:
      FileNotFoundError, ValueError: as `jaxflash.data.open_dataset`; and text for fewer rows.
    """
    if min(rows, batch_size) < 1:
        raise ValueError(f"{_OP}: {rows=} and {batch_size=} - both must be at least 1.")
    packed = open_dataset(
        data, tokenizer, seq_len=seq_len, packing="stream", vocab_size=vocab_size, validation_fraction=0.0
    ).train
    if len(packed) < rows:
        raise ValueError(
            f"{_OP}: the calibration text makes {len(packed)} rows of {seq_len=} tokens, and {rows=} are asked for. "
            "Give more text, or ask for fewer."
        )
    chosen = np.arange(rows) * len(packed) // rows
    return [packed.gather(chosen[start : start + batch_size]) for start in range(0, rows, batch_size)]


class Calibration:
    """Checked batches on the device, and the hidden states that they have reached: those after the blocks `advance`d.

    tokens: how many count, in all batches together. fingerprint: a digest of all that was given.

    reference: whether the dense model's hidden states come along: as many again, and twice the passes.

    Raises:
      ValueError: nothing that counts, too little of it, ids outside of the vocabulary, rows longer than the context, or
        arrays that do not go together.
    """

    def __init__(
        self, config: ModelConfig, params: Mapping[str, Any], batches: Iterable[Batch], *, reference: bool = False
    ):
        batches = list(batches)
        self.tokens = _check_batches(config, batches)
        self.fingerprint = _fingerprint(batches)
        # The depth changes nothing in a block: models of one width share the compiled programs.
        self._config = config = dataclasses.replace(config, n_layers=1)
        self._places = [
            {
                "positions": jnp.asarray(batch.positions),
                "segment_ids": None if batch.segment_ids is None else jnp.asarray(batch.segment_ids),
                "mask": jnp.asarray(batch.loss_mask),
            }
            for batch in batches
        ]
        outer = {name: leaf for name, leaf in params.items() if name != "blocks"}
        self._hidden = [_embed(outer, jnp.asarray(batch.tokens), config=config) for batch in batches]
        self._reference = [x.copy() for x in self._hidden] if reference else None

    def statistics(
        self, block: BlockParams, linears: tuple[str, ...], dense: BlockParams | None = None
    ) -> dict[str, Statistics]:
        """Of the inputs of each of `linears`, over all tokens that count, where `block` reads the hidden states.

        With the drift from what they are where `dense`, if given, reads the dense model's.
        """
        drift = dense is not None
        total = {name: Statistics.empty(block[f"{name}/weight"].shape[0], drift=drift) for name in linears}
        for i, (x, places) in enumerate(zip(self._hidden, self._places, strict=True)):
            beside = None if dense is None else (dense, self._dense_states()[i])
            total = _add_statistics(total, block, x, places, beside, config=self._config)
        return total

    def advance(self, block: BlockParams, dense: BlockParams | None = None) -> None:
        """Runs the hidden states through `block`, and the dense model's, if they are there, through `dense`."""
        _advance(self._hidden, block, self._places, self._config)
        if dense is not None:
            _advance(self._dense_states(), dense, self._places, self._config)

    def _dense_states(self) -> list[Array]:
        if self._reference is None:
            raise ValueError(f"{_OP}: this calibration has no hidden states of a dense model. Make it with reference.")
        return self._reference


def _advance(hidden: list[Array], block: BlockParams, places: list[dict[str, Any]], config: ModelConfig) -> None:
    for i, (x, place) in enumerate(zip(hidden, places, strict=True)):
        hidden[i] = _forward(block, x, place, config=config)


def block_params(stacked: PyTree, layer: int) -> BlockParams:
    """Block `layer` of the stacked parameters of all."""
    return _take(flatten_dict(stacked, sep="/"), np.int32(layer))


@jax.jit
def _take(stacked: BlockParams, layer: Int[Array, ""]) -> BlockParams:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False), stacked)


class _Tap:
    """Stands where a linear stood: keeps what it reads, and lets it through."""

    def __init__(self, linear: Linear, seen: dict[str, Array], name: str):
        self._linear, self._seen, self._name = linear, seen, name

    def __call__(self, x: Float[Array, "b t k"]) -> Float[Array, "b t n"]:
        self._seen[self._name] = x.astype(self._linear.dtype)
        return self._linear(x)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="total")
def _add_statistics(
    total: dict[str, Statistics],
    block: BlockParams,
    x: Float[Array, "b t d"],
    places: dict[str, Any],
    beside: tuple[BlockParams, Float[Array, "b t d"]] | None,
    *,
    config: ModelConfig,
) -> dict[str, Statistics]:
    """beside: the dense block, and what it reads."""
    seen = _reads(block, x, places, tuple(total), config)
    before = {} if beside is None else _reads(*beside, places, tuple(total), config)
    return {name: sums + observe(seen[name], places["mask"], before.get(name)) for name, sums in total.items()}


def _reads(
    block: BlockParams, x: Array, places: dict[str, Any], linears: tuple[str, ...], config: ModelConfig
) -> dict[str, Array]:
    """What each of `linears` reads where the block reads x."""
    module, seen = _module(block, config), {}
    for name in linears:
        *owners, last = name.split("/")
        owner = functools.reduce(getattr, owners, module)
        setattr(owner, last, _Tap(getattr(owner, last), seen, name))
    _run(module, x, places, config)
    return seen


@functools.partial(jax.jit, static_argnames="config", donate_argnames="x")
def _forward(
    block: BlockParams, x: Float[Array, "b t d"], places: dict[str, Any], *, config: ModelConfig
) -> Float[Array, "b t d"]:
    return _run(_module(block, config), x, places, config)


@functools.partial(jax.jit, static_argnames="config")
def _embed(outer: PyTree, tokens: Int[Array, "b t"], *, config: ModelConfig) -> Float[Array, "b t d"]:
    graph, shapes, _ = abstract(config)
    return nnx.merge(graph, {**shapes, **outer}).embed(tokens)


def _module(block: BlockParams, config: ModelConfig) -> Block:
    graph, _ = nnx.split(nnx.eval_shape(lambda: Block(config, rngs=nnx.Rngs(0))), nnx.Param)
    return nnx.merge(graph, unflatten_dict(block, sep="/"))


def _run(block: Block, x: Array, places: dict[str, Any], config: ModelConfig) -> Array:
    rope = rotary_table(places["positions"], config.head_dim, config.rope_theta, config.rope_scaling)
    return block(x, rope, places["segment_ids"], jnp.int32(0), None)[0]  # without a cache, no matter which layer


def _check_batches(config: ModelConfig, batches: list[Batch]) -> int:
    """The number of tokens that count."""
    for i, batch in enumerate(batches):
        shape, mask = np.shape(batch.tokens), np.asarray(batch.loss_mask)
        arrays = (batch.loss_mask, batch.positions, *(() if batch.segment_ids is None else (batch.segment_ids,)))
        if len(shape) != 2 or any(np.shape(array) != shape for array in arrays) or mask.dtype != np.bool_:
            raise ValueError(
                f"{_OP}: calibration batch {i} has tokens of shape {shape}, and other arrays of shapes "
                f"{[np.shape(array) for array in arrays]} - all must be (B, T), loss_mask bool. Use jaxflash.data."
            )
        if shape[1] > config.context:
            raise ValueError(
                f"{_OP}: calibration batch {i} has rows of {shape[1]} tokens, more than the model's "
                f"context={config.context}. Cut them."
            )
        counted = np.asarray(batch.tokens)[mask]
        if counted.size and (counted.min() < 0 or counted.max() >= config.vocab_size):
            raise ValueError(
                f"{_OP}: calibration tokens lie in [{counted.min()}, {counted.max()}], outside the vocabulary of "
                f"{config.vocab_size}. Use the tokenizer that the model was trained with."
            )
    tokens = sum(int(np.asarray(batch.loss_mask).sum()) for batch in batches)
    places = sum(np.asarray(batch.tokens).size for batch in batches)
    if not tokens:
        what = f"all {places} places of calibration are padding" if places else "calibration has no batches"
        raise ValueError(f"{_OP}: {what} - there is nothing to observe. Give text.")
    # A second moment of fewer tokens than inputs is singular: error feedback would follow what it has not seen.
    widest = max(config.d_model, config.n_heads * config.head_dim, config.d_ff)
    if tokens < widest:
        raise ValueError(
            f"{_OP}: {tokens} tokens of calibration - must be at least {widest}, the inputs of the widest linear, or "
            "most directions stay unseen. Give more text; 32 rows of 512 tokens or more are usual."
        )
    return tokens


def _fingerprint(batches: list[Batch]) -> str:
    digest = hashlib.sha256()
    for batch in batches:
        for array in (batch.tokens, batch.loss_mask, batch.positions, batch.segment_ids):
            digest.update(b"none" if array is None else f"{np.shape(array)}".encode() + np.asarray(array).tobytes())
    return digest.hexdigest()

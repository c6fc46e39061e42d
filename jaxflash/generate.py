"""Text from a model: prefill and decode with a KV cache, inside one jit.

    prompts (right-padded) -> prefill -> while_loop(decode -> sample) -> tokens

Every row keeps its own length: a row's tokens do not depend on which prompts stand beside it.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxflash.config import ModelConfig, Sampling
from jaxflash.language_model import LanguageModel, load
from jaxflash.model import KVCache, abstract
from quant.matmul import holds_packed

# Prompt and cache lengths are rounded up to this, so that prompts of similar length share a compilation.
_BUCKET = 64


@overload
def generate(model: LanguageModel | str | Path, prompts: str, sampling: Sampling = ...) -> str: ...
@overload
def generate(model: LanguageModel | str | Path, prompts: Sequence[str], sampling: Sampling = ...) -> list[str]: ...
def generate(
    model: LanguageModel | str | Path, prompts: str | Sequence[str], sampling: Sampling | None = None
) -> str | list[str]:
    """Continues each prompt: the new text only, without the stop token.

    model: a LanguageModel, or what `load` takes. An empty prompt starts a new document. Generation of a row ends at a
    stop token (default: any of the tokenizer's `stop_ids`), or after `max_new_tokens`.

    Raises:
      ValueError: no prompts, or a prompt that with `max_new_tokens` is longer than the model's context.

    >>> generate(run.model, "To be, or", Sampling(max_new_tokens=8))  # doctest: +SKIP
    ' not to b'
    """
    sampling = Sampling() if sampling is None else sampling
    model = model if isinstance(model, LanguageModel) else load(model)
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    tokens = [model.tokenizer.encode_prompt(text).tolist() or [model.tokenizer.eos_id] for text in texts]
    stops = sampling.stop_tokens or model.tokenizer.stop_ids
    rows = generate_tokens(
        model.config, model.params, tokens, sampling, stops=stops, vocab_limit=model.tokenizer.vocab_size
    )
    out = [model.tokenizer.decode(row) for row in rows]
    return out[0] if isinstance(prompts, str) else out


def generate_tokens(
    config: ModelConfig,
    params: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    stops: tuple[int, ...] = (),
    vocab_limit: int | None = None,
) -> list[list[int]]:
    """Token ids after each prompt, stop token left out. vocab_limit: ids from there on are never drawn (table padding).

    Raises:
      ValueError: no prompts, an empty one, ids outside the vocabulary, or too long for the context.
    """
    lengths = np.array([len(p) for p in prompts], np.int32)
    _check_prompts(config, prompts, lengths, sampling.max_new_tokens)
    width = _round_up(int(lengths.max()))
    padded = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    tokens, counts = program(holds_packed(params))(
        params,
        padded,
        lengths,
        jax.random.key(sampling.seed),
        np.float32(max(sampling.temperature, np.finfo(np.float32).tiny)),
        np.array(stops, np.int32),
        np.int32(config.vocab_size if vocab_limit is None else vocab_limit),
        config=config,
        steps=sampling.max_new_tokens,
        greedy=sampling.temperature == 0,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
    )
    return [row[:n].tolist() for row, n in zip(np.asarray(tokens), np.asarray(counts), strict=True)]


def sample(
    logits: Float[Array, "b v"],
    keys: Key[Array, " b"],
    temperature: Float[Array, ""],
    *,
    greedy: bool,
    top_k: int,
    top_p: float,
) -> Int[Array, " b"]:
    """Draws a token a row from softmax(logits / temperature), cut to the top_k most likely and, of those, to the fewest
    whose probability reaches top_p (nucleus sampling, 1904.09751). Among equal logits the lower id comes first.
    """
    if greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # Shifted first: a small temperature then drives the others to -inf, and not the largest to inf.
    logits = (logits - logits.max(axis=-1, keepdims=True)) / temperature
    if not top_k and top_p == 1.0:
        return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    if top_k:
        rank = jnp.arange(ranked.shape[-1])[None, :]
        ranked = jnp.where(rank < top_k, ranked, -jnp.inf)
    if top_p < 1.0:
        p = jax.nn.softmax(ranked, axis=-1)
        before = jnp.cumsum(p, axis=-1) - p  # the first token always stays
        ranked = jnp.where(before < top_p, ranked, -jnp.inf)
    drawn = jax.vmap(jax.random.categorical)(keys, ranked)
    return jnp.take_along_axis(order, drawn[:, None], axis=-1)[:, 0].astype(jnp.int32)


@functools.cache
def program(packed: bool) -> Any:
    """`_run` compiled for packed or for 16-bit weights. The options tell XLA what to do otherwise on a GPU.

    On an H200 (jaxlib 0.11.2, an 8B shape, batch 1) XLA copies each layer's 16-bit weights out of their stack in front
    of a product that it gives to Triton, 6.5 of 12.5 ms a token; cuBLAS reads them in place. Kernels of packed weights
    read in place anyway, but single ones between others are launched one by one: 3.17 ms, and 2.93 in CUDA graphs.
    """
    options = {"xla_gpu_graph_min_graph_size": 1} if packed else {"xla_gpu_enable_triton_gemm": False}
    static = ("config", "steps", "greedy", "top_k", "top_p")
    return jax.jit(_run, static_argnames=static, compiler_options=options)


def _run(params, prompts, lengths, key, temperature, stops, vocab_limit, *, config, steps, greedy, top_k, top_p):
    """(B, steps) tokens and, per row, how many of them come before the stop."""
    model = nnx.merge(abstract(config)[0], params)
    batch, width = prompts.shape
    rows = jnp.arange(batch)
    row_keys = jax.vmap(jax.random.fold_in, (None, 0))(key, rows)
    live = (jnp.arange(config.vocab_size) < vocab_limit)[None, :]

    def draw(logits, step):
        keys = jax.vmap(jax.random.fold_in, (0, None))(row_keys, step)
        return sample(jnp.where(live, logits, -jnp.inf), keys, temperature, greedy=greedy, top_k=top_k, top_p=top_p)

    def record(out, done, counts, token, step):
        done = done | (token[:, None] == stops[None, :]).any(axis=1)
        return out.at[:, step].set(jnp.where(done, 0, token)), done, counts + ~done

    def unfinished(carry):
        step, _, _, done, _, _ = carry
        return (step < steps) & ~done.all()

    def body(carry):
        step, token, out, done, counts, cache = carry
        logits, cache = model.decode(token, cache)
        token = draw(logits, step)
        out, done, counts = record(out, done, counts, token, step)
        return step + 1, token, out, done, counts, cache

    logits, cache = model.prefill(prompts, lengths, KVCache.empty(config, batch, _round_up(width + steps)))
    token = draw(logits, 0)
    out, done, counts = record(
        jnp.zeros((batch, steps), jnp.int32), jnp.zeros(batch, bool), jnp.zeros(batch, jnp.int32), token, 0
    )
    _, _, out, _, counts, _ = jax.lax.while_loop(unfinished, body, (1, token, out, done, counts, cache))
    return out, counts


def _check_prompts(config: ModelConfig, prompts: Sequence[Sequence[int]], lengths: np.ndarray, new: int) -> None:
    if not len(prompts):
        raise ValueError("generate: no prompts - at least one is required. Give a text, or a list of texts.")
    if not lengths.all():
        raise ValueError(f"generate: prompt {int(lengths.argmin())} has no tokens - give it at least one.")
    longest = int(lengths.max())
    if longest + new > config.context:
        raise ValueError(
            f"generate: prompt {int(lengths.argmax())} has {longest} tokens and max_new_tokens={new} follow, more than "
            f"the model's context={config.context}. Shorten the prompt, or set "
            f"max_new_tokens={max(config.context - longest, 0)} or less."
        )
    low, high = min(map(min, prompts)), max(map(max, prompts))
    if low < 0 or high >= config.vocab_size:
        raise ValueError(
            f"generate: prompt tokens lie in [{low}, {high}], outside the vocabulary of {config.vocab_size}. "
            "Use the tokenizer that the model was trained with."
        )


def _round_up(n: int) -> int:
    return -(-n // _BUCKET) * _BUCKET

"""What a model, a training run and a sampler are made of: frozen dataclasses, presets, dotted overrides and JSON."""

import dataclasses
import json
import math
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxflash.fields import build, check_literals, read
from pallas_kernels.attention.spec import ContextParallel, Precision
from quant.lora import LoraConfig
from quant.matmul import Precision as LinearPrecision
from sharding.names import did_you_mean
from sharding.schedule import Name as ScheduleName

Packing = Literal["documents", "stream"]
DType = Literal["float32", "bfloat16"]
Zero = Literal[1, 3]
Remat = Literal["none", "full", "dots", "attention", "dots_and_attention"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama-3 frequency scaling of the rotary embedding (Llama 3 report, 3.2; as published in `rope_scaling`)."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self):
        if self.factor < 1 or self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"RopeScaling: {self.factor=} must be at least 1 and {self.low_freq_factor=} below "
                f"{self.high_freq_factor=}. Copy the values of the checkpoint's rope_scaling."
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder: Llama 2/3, Mistral, Qwen 2/3 and SmolLM2 are settings of it, not code.

    Sizes count elements; `head_dim` is per head; `context` is the longest sequence the rotary table is meant for;
    `sliding_window` counts the keys a query sees, itself included. `attention` names an implementation of
    `dot_product_attention`, None lets the dispatcher choose; `context_parallel` says how it meets the keys of other
    devices where a mesh cuts sequences, `attention_precision` what numbers it multiplies (decoding: the cache's).
    `linear_precision="fp8"` rounds what the blocks' linears multiply to 8 bits, in both passes
    (`pallas_kernels.fp8.derivative`); parameters and everything else stay as they are.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    context: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    sliding_window: int | None = None
    param_dtype: DType = "float32"
    compute_dtype: DType = "bfloat16"
    linear_precision: LinearPrecision = "compute_dtype"
    attention: str | None = None
    context_parallel: ContextParallel = "ring"
    attention_precision: Precision = "input"
    remat: Remat = "none"
    init_std: float = 0.02

    def __post_init__(self):
        check_literals("ModelConfig", self)
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"ModelConfig: {name}={getattr(self, name)} - must be at least 1.")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"ModelConfig: n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}. Every "
                "key/value head serves the same number of query heads; choose a divisor of n_heads."
            )
        if self.head_dim % 2:
            raise ValueError(f"ModelConfig: head_dim={self.head_dim} is odd - the rotary embedding rotates pairs.")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"ModelConfig: sliding_window={self.sliding_window} - must be at least 1, or None.")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run. The fields in `RESUMABLE` may differ when a run folder is continued; all others name the run.

    init_from: the model to begin with, as `load` takes it (None: fresh parameters); lora: adapters to train instead of
    its own parameters, which then stay as they are. data: files, folders or globs of .txt and .jsonl (None: the shipped
    corpus). tokenizer: "byte", the path of a tokenizer.json, or "model": that of init_from. seq_len: tokens a row;
    batch_size: rows an optimizer step over the whole mesh, of which `accumulate` equal parts are computed one after the
    other: the microbatches of a pipeline, if the mesh has stages. These take turns by `schedule`, each with one run of
    layers or, interleaved, with `stage_chunks`. zero: what the mesh axis `fsdp` splits: parameters, gradients and
    optimizer state (3: a layer is gathered where it is used), or only the state and the sums of gradients (1: more
    memory, and parameters are gathered once a step). Learning rate: linear over `warmup_steps`, then a cosine to
    `final_lr_fraction` of the peak at `schedule_steps` (None: `steps`). beta1, beta2, epsilon: Adam's, as in its paper
    (1412.6980).
    eval_every, checkpoint_every: steps (0: only at the end). eval_batches: batches an evaluation
    (0: the whole validation split).
    """

    model: ModelConfig
    data: tuple[str, ...] | None = None
    init_from: str | None = None
    lora: LoraConfig | None = None
    tokenizer: str = "byte"
    packing: Packing = "documents"
    validation_fraction: float = 0.1
    seq_len: int = 128
    batch_size: int = 32
    accumulate: int = 1
    steps: int = 100
    schedule_steps: int | None = None
    learning_rate: float = 3e-4
    warmup_steps: int = 10
    final_lr_fraction: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    clip_norm: float = 1.0
    loss_chunk: int = 1024
    seed: int = 0
    mesh: Mapping[str, int] = field(default_factory=dict)
    schedule: ScheduleName = "1f1b"
    stage_chunks: int = 2
    zero: Zero = 3
    out: str | None = None
    eval_every: int = 0
    eval_batches: int = 0
    checkpoint_every: int = 0
    keep: int = 2

    def __post_init__(self):
        # JSON and callers hand over lists; a frozen dataclass keeps tuples and a plain dict.
        object.__setattr__(self, "data", None if self.data is None else tuple(map(str, _as_tuple(self.data))))
        object.__setattr__(self, "mesh", dict(self.mesh))
        check_literals("TrainConfig", self)
        for name in ("seq_len", "batch_size", "accumulate", "steps", "decay_steps", "loss_chunk", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"TrainConfig: {name}={getattr(self, name)} - must be at least 1.")
        for what, on in (("lora", self.lora is not None), ("tokenizer='model'", self.tokenizer == "model")):
            if on and self.init_from is None:
                raise ValueError(f"TrainConfig: {what} without init_from - there is no model. Set init_from (--model).")
        if self.stage_chunks < 2:
            raise ValueError(
                f"TrainConfig: stage_chunks={self.stage_chunks} - interleaved stages have at least 2 runs of layers. "
                "With one each, the schedule is '1f1b'."
            )
        for name in ("warmup_steps", "eval_every", "eval_batches", "checkpoint_every", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"TrainConfig: {name}={getattr(self, name)} - must not be negative.")
        if self.seq_len > self.model.context:
            raise ValueError(
                f"TrainConfig: seq_len={self.seq_len} is longer than the model's context={self.model.context}. "
                "Shorten the rows, or set model.context."
            )
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"TrainConfig: batch_size={self.batch_size} is not divisible by accumulate={self.accumulate}. "
                f"Use batch_size={_next_multiple(self.batch_size, self.accumulate)}."
            )
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"TrainConfig: validation_fraction={self.validation_fraction} - must lie between 0 and 1.")
        if not (self.learning_rate > 0 and self.clip_norm > 0):
            raise ValueError(f"TrainConfig: {self.learning_rate=} and {self.clip_norm=} must be positive.")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and self.epsilon > 0):
            raise ValueError(
                f"TrainConfig: {self.beta1=} and {self.beta2=} must lie in [0, 1), and {self.epsilon=} be positive."
            )
        if not (self.weight_decay >= 0 and 0 <= self.final_lr_fraction <= 1):
            raise ValueError(
                f"TrainConfig: {self.weight_decay=} must not be negative and {self.final_lr_fraction=} lie in [0, 1]."
            )

    @property
    def decay_steps(self) -> int:
        """The step at which the learning rate reaches its floor."""
        return self.steps if self.schedule_steps is None else self.schedule_steps


# What may change between two calls that continue one run: how far, where, and how often it reports.
RESUMABLE = frozenset(
    {
        "steps",
        "mesh",
        "schedule",
        "stage_chunks",
        "zero",
        "out",
        "eval_every",
        "eval_batches",
        "checkpoint_every",
        "keep",
    }
)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn: temperature 0 is greedy; top_k 0 and top_p 1 keep every token."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    stop_tokens: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "stop_tokens", tuple(self.stop_tokens))
        if self.max_new_tokens < 1:
            raise ValueError(f"Sampling: max_new_tokens={self.max_new_tokens} - must be at least 1.")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"Sampling: temperature={self.temperature} - must be 0 (greedy) or positive and finite.")
        if self.top_k < 0:
            raise ValueError(f"Sampling: top_k={self.top_k} - must be 0 (off) or positive.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"Sampling: top_p={self.top_p} - must lie in (0, 1]; 1 is off.")


def _llama(**sizes: Any) -> dict[str, Any]:
    return dict(vocab_size=128256, head_dim=128, n_kv_heads=8, rope_theta=500_000.0) | sizes


_LLAMA31 = RopeScaling(factor=8.0)
_LLAMA32 = RopeScaling(factor=32.0)

# Sizes as published in each checkpoint's config.json; tests/jaxflash/test_model.py holds the published counts.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": dict(
        vocab_size=320, d_model=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, d_ff=384, context=512,
        tie_embeddings=True, compute_dtype="float32",
    ),
    "smollm2-135m": dict(
        vocab_size=49152, d_model=576, n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64, d_ff=1536, context=8192,
        rope_theta=100_000.0, tie_embeddings=True,
    ),
    "qwen2.5-0.5b": dict(
        vocab_size=151936, d_model=896, n_layers=24, n_heads=14, n_kv_heads=2, head_dim=64, d_ff=4864, context=32768,
        rope_theta=1e6, norm_eps=1e-6, qkv_bias=True, tie_embeddings=True,
    ),
    "qwen3-0.6b": dict(
        vocab_size=151936, d_model=1024, n_layers=28, n_heads=16, n_kv_heads=8, head_dim=128, d_ff=3072, context=40960,
        rope_theta=1e6, norm_eps=1e-6, qk_norm=True, tie_embeddings=True,
    ),
    "1b": _llama(
        d_model=2048, n_layers=16, n_heads=32, head_dim=64, d_ff=8192, context=131072, rope_scaling=_LLAMA32,
        tie_embeddings=True,
    ),
    "3b": _llama(
        d_model=3072, n_layers=28, n_heads=24, d_ff=8192, context=131072, rope_scaling=_LLAMA32, tie_embeddings=True,
    ),
    "llama2-7b": dict(
        vocab_size=32000, d_model=4096, n_layers=32, n_heads=32, n_kv_heads=32, head_dim=128, d_ff=11008, context=4096,
    ),
    "mistral-7b": dict(
        vocab_size=32000, d_model=4096, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128, d_ff=14336, context=32768,
        sliding_window=4096,
    ),
    "qwen2.5-7b": dict(
        vocab_size=152064, d_model=3584, n_layers=28, n_heads=28, n_kv_heads=4, head_dim=128, d_ff=18944, context=32768,
        rope_theta=1e6, norm_eps=1e-6, qkv_bias=True,
    ),
    "qwen3-8b": dict(
        vocab_size=151936, d_model=4096, n_layers=36, n_heads=32, n_kv_heads=8, head_dim=128, d_ff=12288, context=40960,
        rope_theta=1e6, norm_eps=1e-6, qk_norm=True,
    ),
    "llama3-8b": _llama(d_model=4096, n_layers=32, n_heads=32, d_ff=14336, context=8192),
    "llama3.1-8b": _llama(
        d_model=4096, n_layers=32, n_heads=32, d_ff=14336, context=131072, rope_scaling=_LLAMA31,
    ),
    "llama3-70b": _llama(d_model=8192, n_layers=80, n_heads=64, d_ff=28672, context=8192),
}  # fmt: skip

# Rows, batch and rate that suit a preset; a preset not named here trains with the defaults below.
_TRAIN_DEFAULTS: dict[str, dict[str, Any]] = {
    "tiny": dict(seq_len=128, batch_size=32, learning_rate=3e-3, warmup_steps=20, weight_decay=0.01),
}
_LARGE_DEFAULTS: dict[str, Any] = dict(seq_len=4096, batch_size=8, warmup_steps=100, packing="stream", loss_chunk=4096)


def preset(name: str, **changes: Any) -> ModelConfig:
    """The ModelConfig called `name`, with some fields changed: `preset("tiny", n_layers=2)`."""
    if name not in PRESETS:
        raise ValueError(f"preset: unknown {name=}. {did_you_mean(name, PRESETS)}")
    config = ModelConfig(**PRESETS[name])
    return override(config, changes)


def train_preset(name: str, **changes: Any) -> TrainConfig:
    """The TrainConfig that suits preset `name`, with fields changed, dotted ones too: `{"model.n_layers": 2}`."""
    model = preset(name)
    defaults = _TRAIN_DEFAULTS.get(name, _LARGE_DEFAULTS)
    if name not in _TRAIN_DEFAULTS:
        model = dataclasses.replace(model, remat="dots_and_attention")
    return override(TrainConfig(model=model, **defaults), changes)


def override[C](config: C, changes: Mapping[str, Any]) -> C:
    """`config` with each dotted key set; strings are read as the field's type (`"none"` is None).

    Raises:
      ValueError: an unknown key (the nearest is named) or a value of the wrong type.
    """
    nested: dict[str, dict[str, Any]] = {}
    flat: dict[str, Any] = {}
    hints = typing.get_type_hints(type(config))
    for key, value in changes.items():
        head, _, rest = key.partition(".")
        if head not in hints:
            raise ValueError(f"{type(config).__name__}: unknown key {key!r}. {did_you_mean(head, hints)}")
        if rest:
            nested.setdefault(head, {})[rest] = value
        else:
            flat[head] = read(f"{type(config).__name__}.{head}", value, hints[head])
    for head, inner in nested.items():
        base = flat.get(head, getattr(config, head))
        if not dataclasses.is_dataclass(base):
            raise ValueError(f"{type(config).__name__}: {head!r} is {base!r} and has no fields. Set {head} itself.")
        flat[head] = override(base, inner)
    return dataclasses.replace(config, **flat)  # type: ignore[type-var]


def to_json(config: TrainConfig) -> str:
    """The whole configuration as JSON text, read back by `from_json`."""
    return json.dumps(dataclasses.asdict(config), indent=2)


def from_json(text: str) -> TrainConfig:
    """Inverse of `to_json`. Unknown or missing keys, and values of the wrong type, raise ValueError naming them."""
    values = json.loads(text)
    if not isinstance(values, Mapping):
        raise ValueError(f"TrainConfig: the JSON text is a {type(values).__name__} - must be an object of its fields.")
    return build(TrainConfig, values, "TrainConfig")


def differences(a: TrainConfig, b: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """The dotted keys, `RESUMABLE` ones left out, in which two runs differ, with both values."""
    # A schedule that follows `steps` is part of the run, `steps` itself is not: compare what the rate will do.
    left, right = (_flatten(dataclasses.asdict(c) | {"schedule_steps": c.decay_steps}) for c in (a, b))
    keys = [k for k in left | right if k.split(".")[0] not in RESUMABLE]
    return {k: (left.get(k), right.get(k)) for k in keys if left.get(k) != right.get(k)}


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and key != "mesh":
            out |= _flatten(value, f"{prefix}{key}.")
        else:
            out[prefix + key] = value
    return out


def _as_tuple(value: Any) -> tuple:
    return (value,) if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)


def _next_multiple(n: int, k: int) -> int:
    return -(-n // k) * k

"""config.json of a Hub folder <-> ModelConfig. An architecture, or a switch of one, that is not served is refused."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxflash.config import ModelConfig, RopeScaling
from jaxflash.hf.documents import get_flag, get_positive, get_size
from pallas_kernels.dispatch import Unsupported
from sharding.names import did_you_mean


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What a published architecture fixes, and what it means when config.json leaves a key out."""

    name: str
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    sliding_window: int | None = None
    switches_window: bool = False  # whether use_sliding_window decides; False: the number alone does


# By model_type. The defaults are those of transformers' configuration classes of that name (v4 and v5 agree).
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(name="LlamaForCausalLM"),
    "mistral": Architecture(name="MistralForCausalLM", sliding_window=4096),
    "qwen2": Architecture(name="Qwen2ForCausalLM", qkv_bias=True, sliding_window=4096, switches_window=True),
    "qwen3": Architecture(
        name="Qwen3ForCausalLM", qk_norm=True, head_dim=128, sliding_window=4096, switches_window=True
    ),
}

_GEMMA = "scales by 1 + weight in its norms, multiplies embeddings by sqrt(d) and gates with GELU"
_EXPERTS = "is a mixture of experts"
_REFUSED: dict[str, str] = {
    "gemma": _GEMMA,
    "gemma2": f"{_GEMMA}, norms twice a layer and caps its logits",
    "gemma3": f"{_GEMMA}, norms twice a layer and mixes window sizes",
    "gemma3_text": f"{_GEMMA}, norms twice a layer and mixes window sizes",
    "mixtral": _EXPERTS,
    "qwen2_moe": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "llama4": _EXPERTS,
    "phi3": "fuses its q, k and v, and its gate and up projections",
    "smollm3": "leaves the rotation out of every fourth layer",
}


def to_model_config(values: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig that config.json describes; its parameter dtype is the file's matter, and left at the default.

    Raises:
      Unsupported: an architecture or a switch of one that the model does not have.
      ValueError: a missing key, a value of the wrong type, or two that contradict each other.
    """
    model_type, known = _architecture(values)
    _refuse_switches(model_type, values)
    heads, width = get_size(values, "num_attention_heads"), get_size(values, "hidden_size")
    if model_type == "llama" and values.get("num_key_value_heads") is None:
        kv_heads = heads
    else:
        kv_heads = get_size(values, "num_key_value_heads")
    head_dim = known.head_dim
    if values.get("head_dim") is not None:
        head_dim = get_size(values, "head_dim")
    if head_dim is None:
        if width % heads:
            raise ValueError(
                f"load: config.json has no head_dim, and hidden_size={width} is no multiple of "
                f"num_attention_heads={heads}. Add head_dim."
            )
        head_dim = width // heads
    layers = get_size(values, "num_hidden_layers")
    theta, scaling = _rope(values)
    return ModelConfig(
        vocab_size=get_size(values, "vocab_size"),
        d_model=width,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        d_ff=get_size(values, "intermediate_size"),
        context=get_size(values, "max_position_embeddings"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=get_positive(values, "rms_norm_eps", 1e-6),
        qkv_bias=known.qkv_bias,
        qk_norm=known.qk_norm,
        tie_embeddings=get_flag(values, "tie_word_embeddings", False),
        sliding_window=_window(values, known, layers),
    )


def from_model_config(config: ModelConfig, dtype: str, token_ids: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of `config` with weights of `dtype`, in the keys that transformers 4 and 5 and vLLM read.

    token_ids: `eos_token_id` and the like, written as they are.

    Raises:
      Unsupported: no published architecture has these switches together.
    """
    model_type = _family_of(config)
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES[model_type].name],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_values(config.rope_scaling),
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
        "torch_dtype": dtype,
        **token_ids,
    }
    if model_type != "qwen2":  # which has biases for q, k and v, and no key that says so
        values |= {"attention_bias": False, "mlp_bias": False}
    if model_type == "mistral":
        values["sliding_window"] = config.sliding_window
    if ARCHITECTURES[model_type].switches_window:
        values["use_sliding_window"] = config.sliding_window is not None
        values["sliding_window"] = config.sliding_window
        values["max_window_layers"] = 0 if config.sliding_window is not None else config.n_layers
    return values


def _family_of(config: ModelConfig) -> str:
    for model_type, known in ARCHITECTURES.items():
        if (known.qkv_bias, known.qk_norm) == (config.qkv_bias, config.qk_norm):
            return "mistral" if model_type == "llama" and config.sliding_window is not None else model_type
    reason = f"{config.qkv_bias=} together with {config.qk_norm=} is in none of them"
    raise Unsupported(
        f"save: {reason} - a Hub folder is of a published architecture. Keep the model as a run folder.",
        [(known.name, reason) for known in ARCHITECTURES.values()],
    )


def _architecture(values: Mapping[str, Any]) -> tuple[str, Architecture]:
    model_type, listed = values.get("model_type"), values.get("architectures")
    if listed is not None and not (isinstance(listed, list) and len(listed) == 1 and isinstance(listed[0], str)):
        raise ValueError(f"load: config.json has architectures={listed!r} - must be a list of one name.")
    if model_type is not None and not isinstance(model_type, str):
        raise ValueError(f"load: config.json has {model_type=} - must be a text.")
    by_name = {known.name: key for key, known in ARCHITECTURES.items()}
    name = listed[0] if listed else None
    if model_type is None and name is not None:
        model_type = by_name.get(name)
    reason = _REFUSED.get(model_type or "")
    if reason is None and (model_type not in ARCHITECTURES or (name is not None and name not in by_name)):
        hint = did_you_mean(str(name or model_type), by_name if name else ARCHITECTURES)
        reason = f"is not a known architecture. {hint}"
    if reason is not None:
        raise Unsupported(f"load: {name or model_type!r} {reason.rstrip('.')}.", [(str(name or model_type), reason)])
    if name is not None and by_name[name] != model_type:
        raise ValueError(f"load: config.json has {model_type=} but architectures={listed} - which one holds? Fix one.")
    return str(model_type), ARCHITECTURES[str(model_type)]


def _refuse_switches(model_type: str, values: Mapping[str, Any]) -> None:
    """Everything that would change the function and that the model does not have."""
    problems = []
    if values.get("hidden_act") not in (None, "silu", "swish"):
        problems.append(f"hidden_act={values['hidden_act']!r}; the MLP gates with silu")
    for key in ("attention_bias", "mlp_bias"):
        # Qwen2 has its q, k and v biases whatever the file says, and ignores the key.
        if model_type != "qwen2" and get_flag(values, key, False):
            problems.append(f"{key}=true; only q, k and v can have a bias, in Qwen2")
    for holder in (values, values.get("rope_parameters"), values.get("rope_scaling")):
        partial = holder.get("partial_rotary_factor") if isinstance(holder, Mapping) else None
        if partial not in (None, 1):
            problems.append(f"partial_rotary_factor={partial!r}; whole heads are rotated")
    if problems:
        raise Unsupported(
            f"load: {ARCHITECTURES[model_type].name} with {'; '.join(problems)}. Use another checkpoint of the model.",
            [(ARCHITECTURES[model_type].name, problem) for problem in problems],
        )


def _window(values: Mapping[str, Any], known: Architecture, layers: int) -> int | None:
    """The window of every layer; windows in some layers only are refused."""
    if known.sliding_window is None:
        return None
    window = values.get("sliding_window", known.sliding_window)
    if window is not None:
        window = get_size({"sliding_window": window}, "sliding_window")
    if known.switches_window and not get_flag(values, "use_sliding_window", False):
        window = None
    if window is None:
        return None
    kinds = values.get("layer_types")
    if isinstance(kinds, Sequence) and not isinstance(kinds, str):
        with_window = sum(kind == "sliding_attention" for kind in kinds)
    elif known.switches_window:
        # Qwen's layers below this one see everything.
        with_window = max(layers - get_size(values, "max_window_layers", least=0), 0)
    else:
        with_window = layers
    if with_window == layers:
        return window
    if with_window == 0:
        return None
    reason = f"sliding_window={window} in {with_window} of {layers} layers; the model has one window for all"
    raise Unsupported(f"load: {known.name} with {reason}. Use a checkpoint without.", [(known.name, reason)])


def _rope(values: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary embedding, from transformers 4's two keys or 5's one; a file may have both."""
    old, new = (_rope_object(values, key) for key in ("rope_scaling", "rope_parameters"))
    thetas = {get_positive(held, "rope_theta") for held in (values, old, new) if held.get("rope_theta") is not None}
    if len(thetas) > 1:
        raise ValueError(f"load: config.json has {sorted(thetas)} as rope_theta, here and there. Keep one.")
    theta = thetas.pop() if thetas else 10_000.0
    old, new = ({key: value for key, value in held.items() if key != "rope_theta"} for held in (old, new))
    if old and new and old != new:
        raise ValueError(
            f"load: config.json has rope_scaling={old} but rope_parameters={new}. Keep the one that holds."
        )
    scaling = old or new
    kind = scaling.get("rope_type", "default")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        reason = f"rotary scaling of type {kind!r}; only 'llama3' and none are served"
        raise Unsupported(f"load: {reason}. Use a checkpoint without it.", [("rotary", reason)])
    return theta, RopeScaling(
        factor=get_positive(scaling, "factor"),
        low_freq_factor=get_positive(scaling, "low_freq_factor"),
        high_freq_factor=get_positive(scaling, "high_freq_factor"),
        original_context=get_size(scaling, "original_max_position_embeddings"),
    )


def _rope_object(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """One of the two, {} where there is none; its kind, which early files call "type", as "rope_type"."""
    held = values.get(key)
    if held is not None and not isinstance(held, Mapping):
        raise ValueError(f"load: config.json has {key}={held!r} - must be an object or null.")
    found = {name: value for name, value in (held or {}).items() if value is not None}
    nested = [name for name, value in found.items() if isinstance(value, Mapping)]
    if nested:
        reason = f"{key} of its own for each of {', '.join(map(repr, nested))}; all layers rotate alike"
        raise Unsupported(f"load: {reason}. Use a checkpoint without.", [("rotary", reason)])
    kind = found.pop("type", None)
    if kind is not None and found.setdefault("rope_type", kind) != kind:
        raise ValueError(
            f"load: config.json has {key} with type={kind!r} but rope_type={found['rope_type']!r}. Keep one."
        )
    return found


def _rope_values(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context,
    }

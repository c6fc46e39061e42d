"""Tensor names of the Hub <-> parameters of the model, and the shape of each by algebra from the configuration."""

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from jaxflash.config import ModelConfig
from jaxflash.hf.tensors import StoredTensor

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# (tensor, parameter, its shape in the file). Matrices lie there as (out, in), in the model as (in, out).
_WHOLE = (
    (TABLE, "table", ("vocab", "width")),
    ("model.norm.weight", "norm/scale", ("width",)),
    (HEAD, "head/weight", ("vocab", "width")),
)
_LAYER = (
    ("input_layernorm.weight", "attention_norm/scale", ("width",)),
    ("self_attn.q_proj.weight", "attention/q/weight", ("queries", "width")),
    ("self_attn.k_proj.weight", "attention/k/weight", ("keys", "width")),
    ("self_attn.v_proj.weight", "attention/v/weight", ("keys", "width")),
    ("self_attn.q_proj.bias", "attention/q/bias", ("queries",)),
    ("self_attn.k_proj.bias", "attention/k/bias", ("keys",)),
    ("self_attn.v_proj.bias", "attention/v/bias", ("keys",)),
    ("self_attn.o_proj.weight", "attention/out/weight", ("width", "queries")),
    ("self_attn.q_norm.weight", "attention/q_norm/scale", ("head",)),
    ("self_attn.k_norm.weight", "attention/k_norm/scale", ("head",)),
    ("post_attention_layernorm.weight", "mlp_norm/scale", ("width",)),
    ("mlp.gate_proj.weight", "mlp/gate/weight", ("hidden", "width")),
    ("mlp.up_proj.weight", "mlp/up/weight", ("hidden", "width")),
    ("mlp.down_proj.weight", "mlp/down/weight", ("width", "hidden")),
)
# Left in files by early versions of transformers: a function of the configuration.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_FLOATS = ("float32", "float16", "bfloat16")
_SHOWN = 3


class Place(NamedTuple):
    """Where a tensor goes: the parameter's path, its layer where parameters are stacked, its shape in the file."""

    path: tuple[str, ...]
    layer: int | None
    shape: tuple[int, ...]

    @property
    def transposed(self) -> bool:
        """Whether the model has it the other way round."""
        return self.path[-1] == "weight"


def places(config: ModelConfig) -> dict[str, Place]:
    """Every tensor that a checkpoint of `config` has, by name, in the order in which it is written."""
    sizes = {
        "vocab": config.vocab_size,
        "width": config.d_model,
        "queries": config.n_heads * config.head_dim,
        "keys": config.n_kv_heads * config.head_dim,
        "head": config.head_dim,
        "hidden": config.d_ff,
    }

    def place(parameter: str, layer: int | None, dims: tuple[str, ...]) -> Place:
        return Place(tuple(parameter.split("/")), layer, tuple(sizes[dim] for dim in dims))

    table, norm, head = ((name, place(parameter, None, dims)) for name, parameter, dims in _WHOLE)
    layers = [
        (f"model.layers.{layer}.{name}", place(f"blocks/{parameter}", layer, dims))
        for layer in range(config.n_layers)
        for name, parameter, dims in _LAYER
        if (config.qkv_bias or not name.endswith("bias")) and (config.qk_norm or "_norm." not in name)
    ]
    return dict([table, *layers, norm] + ([] if config.tie_embeddings else [head]))


def wanted(config: ModelConfig, stored: Collection[str]) -> dict[str, Place]:
    """`places` of a configuration that belongs to so many tensors; ValueError where they are too few.

    Looked at before a list of all of them is made: the number of layers may be absurd.
    """
    if config.n_layers > len(stored):
        raise ValueError(
            f"load: the configuration has n_layers={config.n_layers}, the files {len(stored)} tensors - one of the two "
            "is of another model. Fetch both again."
        )
    return places(config)


def match(
    config: ModelConfig, stored: Mapping[str, StoredTensor], elsewhere: Collection[str] = ()
) -> dict[str, tuple[Place, StoredTensor]]:
    """Pairs every tensor of the model with the one stored, and looks at no weight. elsewhere: those that are not here.

    Raises:
      ValueError: tensors that are missing, not expected, of another shape than the configuration's, or no dense floats.
    """
    places = {n: place for n, place in wanted(config, [*stored, *elsewhere]).items() if n not in elsewhere}
    missing = [name for name in places if name not in stored]
    if missing:
        hint = " If the head is the embedding table, set tie_word_embeddings." if missing == [HEAD] else ""
        raise ValueError(
            f"load: {len(missing)} of {len(places)} tensors are missing: {some(missing)} - the checkpoint is not "
            f"complete, or the configuration is of another model.{hint}"
        )
    extra = [n for n in stored if n not in places and not _DERIVED.fullmatch(n) and n != HEAD]
    if extra:
        raise ValueError(
            f"load: {len(extra)} tensors are not expected: {some(extra)} - the configuration describes a "
            "model without them. Fetch both again."
        )
    for name, place in places.items():
        if stored[name].shape != place.shape:
            raise ValueError(
                f"load: {name!r} has shape={stored[name].shape}, the configuration makes it {place.shape} - one "
                "of the two is of another model. Fetch both again."
            )
        if stored[name].dtype.name not in _FLOATS:
            raise ValueError(
                f"load: {name!r} has dtype={stored[name].stored_as!r} - dense weights are {', '.join(_FLOATS)}. "
                "Use a checkpoint that is not quantised."
            )
    return {name: (place, stored[name]) for name, place in places.items()}


def same_values(a: StoredTensor, b: StoredTensor, *, part: int, parts: int) -> bool:
    """Whether two matrices are the same bytes; of blocks of rows, every `parts`-th is read, from the `part`-th on."""
    if (a.shape, a.stored_as) != (b.shape, b.stored_as):
        return False
    rows = max(1, (4 << 20) // max(a.nbytes // a.shape[0], 1))
    blocks = [(slice(start, start + rows), slice(None)) for start in range(part * rows, a.shape[0], parts * rows)]
    return all(a.read(block).tobytes() == b.read(block).tobytes() for block in blocks)


def some(names: list[str]) -> str:
    """The first few of many names, and how many more there are."""
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + rest

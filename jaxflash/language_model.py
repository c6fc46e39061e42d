"""A model with its parameters and its tokenizer: what `load` gives, `save` writes and `generate` takes."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxflash import checkpoint
from jaxflash.adapters import adapter_layout, freeze, join
from jaxflash.config import DType, ModelConfig, TrainConfig
from jaxflash.gguf.model import open_gguf
from jaxflash.gguf.tokenizer import gguf_tokenizer
from jaxflash.hf.adapter import read_adapter
from jaxflash.hf.load import is_hub_folder, load_params, open_checkpoint
from jaxflash.hf.place import OnTensor, layout
from jaxflash.hf.save import FileDType, FileFormat, save_folder
from jaxflash.model import Transformer, abstract
from jaxflash.tokenizer import HFTokenizer, NoTokenizer, Tokenizer, find_tokenizer, load_tokenizer
from quant.fp8 import Fp8Tensor
from quant.tensor import Int4Tensor
from sharding.mesh import make_mesh


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """config, params (nested dict, as `jaxflash.model.abstract` shapes it) and tokenizer."""

    config: ModelConfig
    params: Any
    tokenizer: Tokenizer

    @property
    def module(self) -> Transformer:
        """The Flax NNX module over these parameters."""
        return nnx.merge(abstract(self.config)[0], self.params)

    def astype(self, dtype: DType) -> "LanguageModel":
        """The model with all parameters but those of 4 and 8 bits in another dtype."""

        def is_low(leaf: Any) -> bool:
            return isinstance(leaf, Int4Tensor | Fp8Tensor)

        params = jax.tree.map(lambda leaf: leaf if is_low(leaf) else leaf.astype(dtype), self.params, is_leaf=is_low)
        return LanguageModel(dataclasses.replace(self.config, param_dtype=dtype), params, self.tokenizer)


def load(
    path: str | Path,
    *,
    adapter: str | Path | None = None,
    step: int | None = None,
    mesh: Mesh | None = None,
    param_dtype: DType | None = None,
    keep_fp8: bool = False,
    on_tensor: OnTensor | None = None,
) -> LanguageModel:
    """Loads a model: a run folder that `train` wrote, a folder from the Hugging Face Hub, or a .gguf file.

    Of the Hub, weights are dense, of 4 bits (GPTQ, AWQ, compressed-tensors), which become Int4Tensors code by code, or
    FP8, which become the float32 that they stand for or, with `keep_fp8`, the blocks' linears Fp8Tensors, byte by byte:
    their products then round activations to 8 bits as well (W8A8), by tensor, row or 1 x 128 as weights are.

    adapter: a folder that peft or `save_adapter` wrote; its matrices, float32, go beside the weights they are of. A run
    that trained adapters is its model, loaded from where it was, with them.

    step: which checkpoint of a run (None: the newest). mesh: where the parameters go by rule, each process reading only
    its slices (None: the first device). param_dtype: None is the run's own or, of other files, the one that holds every
    value as it is: bfloat16 if all weights are, else float32. on_tensor: called with name and bytes of each tensor read
    from a Hub folder or GGUF.

    Raises:
      FileNotFoundError: no such folder, file or checkpoint, or a part of it is missing.
      ValueError: a broken or contradictory file, another model's checkpoint or adapter, or a mesh that it does not
        divide over.
      Unsupported: an architecture, a switch of one, a quantisation, a GGUF type or kind of adapter that is not served.
    """
    mesh = make_mesh(devices=jax.local_devices()[:1]) if mesh is None else mesh
    model = _load(Path(path).expanduser(), step, mesh, param_dtype, on_tensor, keep_fp8)
    if adapter is None:
        return model
    lora, adapters = read_adapter(Path(adapter).expanduser(), model.config, mesh)
    return dataclasses.replace(model, params=join(freeze(model.config, model.params, lora), adapters))


def open_model(path: Path) -> tuple[ModelConfig, Tokenizer]:
    """Configuration and tokenizer of what `load` takes, without its weights. Raises what `load` does."""
    if not is_foreign(path):
        config = checkpoint.read_config(path)
        return config.model, _run_tokenizer(path, config)
    opened = open_gguf(path) if path.suffix == ".gguf" else open_checkpoint(path)
    return opened.config, foreign_tokenizer(path)


def save(
    model: LanguageModel,
    path: str | Path,
    *,
    dtype: FileDType | None = None,
    format: FileFormat | None = None,
    max_shard_bytes: int = 5_000_000_000,
    on_tensor: OnTensor | None = None,
) -> None:
    """Writes `model` as a folder of the Hugging Face Hub, which transformers, vLLM and `load` read.

    config.json, model.safetensors or several of at most `max_shard_bytes` with an index, and the tokenizer with its
    chat template. The folder appears whole or not at all. dtype: of the dense weights (None: the parameters' own).

    format: how a quantised model's weights are stored: "gptq" (version 1), "gptq_v2", "awq" or "compressed-tensors",
    each code, scale and zero point as it is (every linear is decoded again and compared), so that what is read back has
    the same logits, bit by bit; or "dense", as the numbers that they stand for, rounded to dtype. In float32 these are
    exact, with the logits of the dequantised weights, bit by bit; those of the packed ones differ by the order in which
    float32 products are added up, some 1e-5 of the largest. Of a dense model: "dense", or "fp8", in blocks of 128 x 128
    with the scale max|w| / 448. Of Fp8Tensors: "fp8" (DeepSeek's names, of blocks) or "compressed-tensors", byte by
    byte, or "dense". None: "fp8" for blocks of 8 bits, "compressed-tensors" for what is quantised otherwise, "dense"
    for a dense model.

    Raises:
      FileExistsError: `path` exists and is not an empty folder.
      OSError: too little free space, found before anything is written; or the first of several processes failed.
      Unsupported: no published architecture has the configuration's switches; or the format cannot hold the weights,
        with the list of what it cannot hold: groups of several sizes, activation order or scales beyond float16 (awq),
        zero points of 0 (gptq).
      ValueError: dtype is float16 and a weight is beyond its range; or a format that is not for such a model.
    """
    save_folder(
        model.config,
        model.params,
        model.tokenizer,
        Path(path),
        dtype=dtype,
        format=format,
        max_shard_bytes=max_shard_bytes,
        on_tensor=on_tensor,
    )


def _load(
    path: Path, step: int | None, mesh: Mesh, param_dtype: DType | None, on_tensor: OnTensor | None, keep_fp8: bool
) -> LanguageModel:
    if not is_foreign(path):
        return _load_run(path, step, mesh, param_dtype)
    if step is not None:
        raise ValueError(f"load: {step=} - only run folders have steps, and {str(path)!r} is none. Leave it out.")
    opened = open_gguf(path) if path.suffix == ".gguf" else open_checkpoint(path, keep_fp8=keep_fp8)
    tokenizer = foreign_tokenizer(path)
    config, params = load_params(opened, mesh, param_dtype=param_dtype, on_tensor=on_tensor)
    return LanguageModel(config, params, tokenizer)


def _load_run(run: Path, step: int | None, mesh: Mesh, param_dtype: DType | None) -> LanguageModel:
    config = checkpoint.read_config(run)
    model = config.model
    if config.lora is None:
        params, _ = checkpoint.load_params(run, lambda packed: _laid_out(*layout(model, mesh, packed)), step)
        loaded = LanguageModel(model, params, _run_tokenizer(run, config))
        return loaded if param_dtype is None else loaded.astype(param_dtype)
    base = load(str(config.init_from), mesh=mesh, param_dtype=param_dtype or model.param_dtype)
    shapes = _laid_out(*adapter_layout(model, config.lora, mesh))
    adapters, _ = checkpoint.load_params(run, lambda _: shapes, step)
    params = join(freeze(model, base.params, config.lora), adapters)
    if param_dtype is not None:
        model = dataclasses.replace(model, param_dtype=param_dtype)
    return LanguageModel(model, params, _run_tokenizer(run, config))


def _laid_out(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda s, d: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=d), shapes, shardings)


def _run_tokenizer(run: Path, config: TrainConfig) -> Tokenizer:
    tokenizer = load_tokenizer(run if config.tokenizer != "byte" else None)
    return tokenizer.prefixed() if isinstance(tokenizer, HFTokenizer) and tokenizer.saved_prefixed else tokenizer


def is_foreign(path: Path) -> bool:
    """Whether `path` is no run folder of ours, but one of the Hub or a GGUF file."""
    return path.suffix == ".gguf" or is_hub_folder(path)


def foreign_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer beside the weights; else the one inside a GGUF; else none, told where text is first used."""
    is_gguf = path.suffix == ".gguf"
    folder = path.parent if is_gguf else path
    tokenizer = find_tokenizer(folder) or (gguf_tokenizer(path) if is_gguf else None) or NoTokenizer(folder)
    return tokenizer.prefixed() if isinstance(tokenizer, HFTokenizer) else tokenizer

"""What a checkpoint is, from its headers alone: no weight is read."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from jaxflash import checkpoint
from jaxflash.config import ModelConfig
from jaxflash.gguf.model import open_gguf
from jaxflash.hf import safetensors
from jaxflash.hf.linears import StoredLinear
from jaxflash.hf.load import Checkpoint, is_hub_folder, open_checkpoint
from jaxflash.hf.names import Place, places
from jaxflash.model import count_parameters
from pallas_kernels.attention.api import explain
from pallas_kernels.dispatch import Explanation
from pallas_kernels.w4a16 import api as w4a16
from pallas_kernels.w4a16.layout import padded
from pallas_kernels.w4a16.spec import SCALE_DTYPES, W4A16Spec
from quant.formats import fp8
from quant.tensor import Int4Tensor

_FP8 = safetensors.NAMES[fp8.DTYPE]
# Name, shape, precision as stored, bytes in the files, whether it is quantised.
type Tensor = tuple[str, tuple[int, ...], str, int, bool]


@dataclass(frozen=True, kw_only=True)
class TensorKind:
    """Tensors that differ only in their layer: how many, one's shape, their precisions, bytes of all in the files.

    A quantised weight counts as one tensor, of the shape of the dense one, with the bytes of all that belong to it.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    precisions: tuple[str, ...]
    nbytes: int
    quantised: bool = False


@dataclass(frozen=True, kw_only=True)
class Product:
    """What a layer's linear of 4 bits would run, for one token and for a prompt of the model's context."""

    name: str
    token: Explanation
    prompt: Explanation


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """A checkpoint's configuration and tensors. Prints as a report."""

    path: Path
    kind: str
    config: ModelConfig
    kinds: tuple[TensorKind, ...]
    attention: Explanation
    products: tuple[Product, ...] = ()

    @property
    def parameters(self) -> int:
        """Number of parameters, a tied table counted once."""
        return count_parameters(self.config)

    @property
    def low_bit(self) -> tuple[TensorKind, ...]:
        """The blocks' weights of 4 or 8 bits."""
        return tuple(kind for kind in self.kinds if kind.quantised and kind.name.startswith("layers."))

    @property
    def has_fp8(self) -> bool:
        """Whether any of those is stored in FP8."""
        return any(stored.startswith(_FP8) for kind in self.low_bit for stored in kind.precisions)

    def __str__(self) -> str:
        c = self.config
        loaded = f"{_megabytes(self._loaded())} as {c.param_dtype}{' and 4 bits' if self.products else ''}"
        cache = 2 * c.n_layers * c.n_kv_heads * c.head_dim * np.dtype(jax.numpy.dtype(c.compute_dtype)).itemsize
        extras = [
            name
            for name, on in (
                ("QKV bias", c.qkv_bias),
                ("QK-norm", c.qk_norm),
                ("tied embeddings", c.tie_embeddings),
                (f"window of {c.sliding_window}", c.sliding_window is not None),
                ("Llama-3 rotary scaling", c.rope_scaling is not None),
            )
            if on
        ]
        width = max(len(kind.name) for kind in self.kinds)
        rows = [
            f"  {kind.name:<{width}}  {kind.count:>4} x {kind.shape!s:<16}  {_megabytes(kind.nbytes):>12}  "
            f"{', '.join(kind.precisions)}"
            for kind in self.kinds
        ]
        lines = [
            f"{self.path}: {self.kind}",
            f"model       {c.n_layers} layers, width {c.d_model}, MLP {c.d_ff}, {c.n_heads} query and {c.n_kv_heads} "
            f"key/value heads of {c.head_dim}, vocabulary {c.vocab_size}, context {c.context}",
            *([f"            {', '.join(extras)}"] if extras else []),
            f"parameters  {self.parameters:,}",
            f"in files    {_megabytes(sum(kind.nbytes for kind in self.kinds))}",
            f"loaded      {loaded}, and {cache:,} bytes of KV cache a token as {c.compute_dtype}",
            "tensors     of a layer, all layers together; precision as stored",
            *rows,
            "reading a prompt of its context would run",
            *(f"  {line}" for line in str(self.attention).splitlines()),
            *self._product_lines(),
        ]
        return "\n".join(lines)

    def _loaded(self) -> int:
        """Bytes of the parameters in memory, zero points as the configuration says."""
        specs = [cast(W4A16Spec, product.token.spec) for product in self.products]
        dense = self.parameters - self.config.n_layers * sum(spec.K * spec.N for spec in specs)
        width = np.dtype(jax.numpy.dtype(self.config.param_dtype)).itemsize
        return dense * width + self.config.n_layers * sum(spec.weight_bytes() for spec in specs)

    def _product_lines(self) -> list[str]:
        if not self.products:
            return []
        width = max(len(product.name) for product in self.products)
        return [
            "products with 4-bit weights would run, for one token; for a prompt of its context",
            *(f"  {p.name:<{width}}  {p.token.chosen}; {p.prompt.chosen}    {p.token.spec}" for p in self.products),
            f"  of {self.products[-1].name}, for one token:",
            *(f"    {line}" for line in str(self.products[-1].token).splitlines()),
        ]


def inspect(path: str | Path) -> Inspection:
    """Reads the headers of a run folder, a Hub folder or a .gguf file, and checks them as `load` does.

    Raises:
      FileNotFoundError, ValueError, Unsupported: as `load`.
    """
    path = Path(path).expanduser()
    if path.suffix == ".gguf" or is_hub_folder(path):
        opened = open_gguf(path) if path.suffix == ".gguf" else open_checkpoint(path)
        config, products = opened.config, _products(opened)
        tensors = [_tensor(name, opened) for name in places(config)]
        kind = "GGUF file" if path.suffix == ".gguf" else "Hugging Face folder"
    else:
        run = checkpoint.read_config(path)
        config = run.model
        steps, packed = checkpoint.saved_steps(path), checkpoint.packed_weights(path)
        tensors = [_saved_tensor(name, place, packed.get(place.path), config) for name, place in places(config).items()]
        products = tuple(
            _packed_product(name, packed[place.path], config)
            for name, place in places(config).items()
            if place.path in packed and place.layer == 0
        )
        kind = f"run folder with checkpoints of steps {steps}" if steps else "run folder without a checkpoint"
        if run.lora is not None:
            kind += f", of adapters of rank {run.lora.rank} for {run.init_from}, whose tensors follow"
    return Inspection(
        path=path,
        kind=kind,
        config=config,
        kinds=_kinds(tensors),
        attention=explain_prompt(config, (1, config.context)),
        products=products,
    )


def _tensor(name: str, opened: Checkpoint) -> Tensor:
    linear, block = opened.linears.get(name), None if opened.scheme is None else opened.scheme.block
    if linear is not None:
        rows = "whole columns" if linear.spec.group == linear.spec.K else f"groups of {linear.spec.group}"
        stored_as = f"INT4 {linear.format.name}, {rows}"
        return name, (linear.spec.N, linear.spec.K), stored_as, linear.nbytes, True
    tensor = opened.stored[name]
    is_fp8 = tensor.stored_as == _FP8
    stored_as = f"{tensor.stored_as}, blocks of {block[0]} x {block[1]}" if is_fp8 and block else tensor.stored_as
    return name, tensor.shape, stored_as, tensor.nbytes, is_fp8


def _products(opened: Checkpoint) -> tuple[Product, ...]:
    """Those of the first layer, with zero points and the dtype of scales as configuration and headers say."""

    def one(linear: StoredLinear) -> Product:
        stored = {tensor.dtype.name for tensor in linear.tensors.values()} & set(SCALE_DTYPES)
        spec = linear.spec
        group = spec.group if spec.group < spec.K else padded(spec.K)
        facts = {"K": spec.K, "N": spec.N, "group": group, "zeros": spec.zeros}
        return _product(linear.name, opened.config, scale_dtype=next(iter(stored), "bfloat16"), **facts)

    return tuple(one(linear) for linear in opened.linears.values() if linear.place.layer == 0)


def _packed_product(name: str, weight: Int4Tensor, config: ModelConfig) -> Product:
    (K, N), zeros = weight.shape, weight.zeros is not None
    facts = {"K": K, "N": N, "group": weight.group, "zeros": zeros, "scale_dtype": weight.scales.dtype.name}
    return _product(name.removesuffix(".weight"), config, **facts)


def _product(linear: str, config: ModelConfig, **facts: Any) -> Product:
    token, prompt = (
        w4a16.explain(W4A16Spec(M=rows, dtype=config.compute_dtype, **facts)) for rows in (1, config.context)
    )
    return Product(name=linear.split(".", 3)[3], token=token, prompt=prompt)


def _saved_tensor(name: str, place: Place, packed: Int4Tensor | None, config: ModelConfig) -> Tensor:
    """A tensor of a run folder; its layers lie in one array, of which it is one part in all."""
    if packed is None:
        size = np.dtype(jax.numpy.dtype(config.param_dtype)).itemsize
        return name, place.shape, config.param_dtype, int(np.prod(place.shape)) * size, False
    rows = "whole columns" if packed.group >= packed.shape[0] else f"groups of {packed.group}"
    nbytes = sum(int(np.prod(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(packed))
    return name, place.shape, f"INT4 packed, {rows}", nbytes // config.n_layers, True


def explain_prompt(config: ModelConfig, shape: tuple[int, int], *, packed: bool = False) -> Explanation:
    """Which attention would run on (batch, length) tokens of this model on the current device, and why."""
    query = jax.ShapeDtypeStruct((*shape, config.n_heads, config.head_dim), config.compute_dtype)
    key = jax.ShapeDtypeStruct((*shape, config.n_kv_heads, config.head_dim), config.compute_dtype)
    segments = jax.ShapeDtypeStruct(shape, "int32") if packed else None
    window = None if config.sliding_window is None else (config.sliding_window - 1, 0)
    return explain(query, key, key, is_causal=True, segment_ids=segments, local_window_size=window)


def _kinds(tensors: Sequence[Tensor]) -> tuple[TensorKind, ...]:
    groups: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(re.sub(r"^model\.layers\.\d+\.", "layers.*.", tensor[0]), []).append(tensor)
    return tuple(
        TensorKind(
            name=name,
            count=len(group),
            shape=group[0][1],
            precisions=_precisions([stored_as for _, _, stored_as, _, _ in group]),
            nbytes=sum(nbytes for _, _, _, nbytes, _ in group),
            quantised=any(quantised for *_, quantised in group),
        )
        for name, group in groups.items()
    )


def _precisions(stored_as: Sequence[str]) -> tuple[str, ...]:
    """("BF16",), or where layers differ, each with the layers that have it: ("Q4_1 (0, 2-5)", "Q8_0 (1)")."""
    if len(set(stored_as)) == 1:
        return (stored_as[0],)
    return tuple(
        f"{name} ({_ranges([layer for layer, other in enumerate(stored_as) if other == name])})"
        for name in dict.fromkeys(stored_as)
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as "0, 2-5"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"

"""Folders of 4- and 8-bit weights that jaxflash wrote, read by transformers and the packages that it calls for them.

jaxflash writes a model in every format that holds it, beside its numbers (the dense folder) and their logits. The
readers come from an environment of their own, which the tests do not need:

    python -m venv ENV && ENV/bin/pip install torch transformers optimum accelerate compressed-tensors
    ENV/bin/pip install --no-build-isolation gptqmodel
    PYTHONPATH=. python tests/golden/hf/read_quantised.py write OUT [MODEL]    # random tiny models where none is given
    TORCHDYNAMO_DISABLE=1 ENV/bin/python tests/golden/hf/read_quantised.py read OUT

For a folder are printed the largest difference of its logits as they run there, that of its linears' weights, as the
packages unpack them with scales in float32, and that of the logits with those weights in plain linears. With GPTQModel
7.7.0, compressed-tensors 0.20.1, transformers 5.24.0, optimum 2.3.0 and torch 2.13.0 on a CPU all weights were equal
bit by bit (2026-11-30): of tiny models with and without zero points, in activation order, and of FP8 by tensor, row
and block; and of SmolLM2-135M by GPTQ and by AWQ, whose logits with them differ by 9e-5 of 27.

GPTQModel's plain torch kernels are named, since its default compiles an extension for many minutes, and so would
dynamo; AWQ's multiplies in float16 (SmolLM2: 4e-2), and compressed-tensors rounds activations beside FP8 weights. It
makes room for zero points of (N, G) in an empty model, where it packs and stores (N / 8, G), so that transformers
refuses them: its own unpacking is called instead, linear by linear. It reads no g_idx, so that this pair is left out.
"""

import json
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np

PROMPT = "The capital of France is Paris, and that of Italy is"


def write(out: Path, source: str | None) -> None:
    """A model in every format, in folders below OUT/KIND, and the logits of its numbers, OUT/KIND/logits.npz."""
    from jaxflash.language_model import load
    from jaxflash.quantize import quantize
    from quant.recipe import Fp8Recipe
    from tests.jaxflash.hf.quantised import WIDE, dense, packed

    if source is not None:
        return write_model(out / "model", load(source))
    for kind in ("symmetric", "asymmetric", "ordered"):
        write_model(out / kind, packed(kind)[0])
    for scaling in ("tensor", "row", "block"):
        write_model(out / f"fp8-{scaling}", quantize(dense(WIDE), Fp8Recipe(scaling=scaling), quiet=True))


def write_model(out: Path, model: Any) -> None:
    """Prints what a format cannot hold."""
    import dataclasses

    import jax

    from jaxflash.hf.save import FORMATS
    from jaxflash.language_model import load, save

    for name in FORMATS:
        try:
            save(model, out / name, format=cast(Any, name), dtype="float32")
        except (NotImplementedError, ValueError) as error:
            print(f"{out / name}: {error}")
    numbers = load(out / "dense")
    numbers = dataclasses.replace(numbers, config=dataclasses.replace(numbers.config, compute_dtype="float32"))
    tokens = model.tokenizer.encode(PROMPT)[None]
    logits = jax.jit(lambda params, ids: dataclasses.replace(numbers, params=params).module(ids))
    np.savez(out / "logits.npz", tokens=tokens, logits=np.asarray(logits(numbers.params, tokens)))


def read(folder: Path, tokens: np.ndarray, expected: np.ndarray) -> None:
    """Prints how far the reader of this folder is from what jaxflash gave."""
    import torch  # pyright: ignore[reportMissingImports]
    from safetensors.numpy import load_file
    from transformers import (  # pyright: ignore[reportMissingImports]
        AutoModelForCausalLM,
        AwqConfig,
        FineGrainedFP8Config,
        GPTQConfig,
    )

    values = json.loads((folder / "config.json").read_text())
    kernels = {
        "gptq": lambda: GPTQConfig(4, backend="gptq_torch"),
        "awq": lambda: AwqConfig(4, backend="torch_awq"),
        "fp8": lambda: FineGrainedFP8Config(dequantize=True),
    }
    scheme = values.get("quantization_config", {})
    method = scheme.get("quant_method")
    if scheme.get("format") == "pack-quantized" and not scheme["config_groups"]["group_0"]["weights"]["symmetric"]:
        source, weights = folder.parent / "dense", unpacked_apart(folder, scheme)
        if weights is None:
            return print(f"{folder}: rows in activation order, which compressed-tensors does not read", flush=True)
    else:
        source, weights = folder, None
    chosen = {"quantization_config": kernels[method]()} if method in kernels else {}
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, device_map="cpu", **chosen).eval()

    def difference() -> str:
        with torch.no_grad():
            found = model(torch.from_numpy(tokens).long()).logits.float().numpy()
        same = (found.argmax(-1) == expected.argmax(-1)).mean()
        largest = np.abs(found - expected).max()
        return f"logits differ by {largest:.1e} of {np.abs(expected).max():.1f}, the same best token at {same:.0%}"

    kind = type(model.model.layers[0].mlp.up_proj).__name__
    print(f"{folder}:\n  {difference()} as {kind}" if weights is None else f"{folder}:", flush=True)
    numbers, worst = load_file(folder.parent / "dense" / "model.safetensors"), []
    for name in (name.removesuffix(".weight") for name in numbers if "_proj" in name):
        module = model.get_submodule(name)
        weight = (unpacked(module) if weights is None else weights[name]).detach().float().contiguous()
        worst.append(float(np.abs(weight.numpy() - numbers[f"{name}.weight"]).max()))
        plain = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=module.bias is not None)
        plain.weight, plain.bias = torch.nn.Parameter(weight), module.bias
        model.set_submodule(name, plain)
    print(f"  {len(worst)} weights differ by at most {max(worst):.1e}; with them, {difference()}", flush=True)


def unpacked_apart(folder: Path, scheme: dict) -> dict[str, Any] | None:
    """Each linear's weight as compressed-tensors itself unpacks it; None where rows are in activation order."""
    from compressed_tensors.compressors.pack_quantized import (  # pyright: ignore[reportMissingImports]
        PackedQuantizationCompressor,
    )
    from compressed_tensors.quantization import QuantizationScheme  # pyright: ignore[reportMissingImports]
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    if any(name.endswith("weight_g_idx") for name in tensors):
        return None
    group = QuantizationScheme.model_validate(scheme["config_groups"]["group_0"])

    def one(module: str) -> Any:
        own = {k.removeprefix(f"{module}."): v for k, v in tensors.items() if k.startswith(f"{module}.")}
        own["weight_scale"] = own["weight_scale"].float()
        return PackedQuantizationCompressor.decompress(own, group)["weight"]

    packed = ".weight_packed"
    return {name.removesuffix(packed): one(name.removesuffix(packed)) for name in tensors if name.endswith(packed)}


def unpacked(module: Any) -> Any:
    """The weight (out, in) of a linear, of GPTQModel's in the precision of its scales."""
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm  # pyright: ignore[reportMissingImports]

    if not hasattr(module, "qweight"):
        return module.weight
    module.scales = module.scales.float()
    if hasattr(module, "dequantize_weight"):
        return module.dequantize_weight().T
    return dequantize_gemm(module.qweight, module.qzeros, module.scales, 4, module.group_size).T


def main(command: str, out: str, source: str | None = None) -> None:
    if command == "write":
        return write(Path(out), source)
    for held in sorted(Path(out).glob("*/logits.npz")):
        golden = np.load(held)
        for config in sorted(held.parent.glob("*/config.json")):
            read(config.parent, golden["tokens"], golden["logits"])


if __name__ == "__main__":
    main(*sys.argv[1:])

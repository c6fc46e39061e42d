"""Small checkpoints: the golden folders, copies of them to break, and folders written by the `safetensors` package."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

GOLDEN = Path(__file__).parents[2] / "golden" / "hf"
NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/logits.npz"))


def copy(name: str, to: Path) -> Path:
    """A golden checkpoint, to be changed."""
    return Path(shutil.copytree(GOLDEN / name, to / name, ignore=shutil.ignore_patterns("logits.npz")))


def edit(path: Path, **changes: Any) -> None:
    """Sets keys of a JSON file; ... takes one out."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


def rewrite(file: Path, **changes: Any) -> None:
    """Sets tensors of a safetensors file, by the package's own writer; ... takes one out. __ stands for a dot."""
    tensors = load_file(file) | {name.replace("__", "."): value for name, value in changes.items()}
    save_file({name: value for name, value in tensors.items() if value is not ...}, file)


def llama_folder(path: Path, *, vocab: int, width: int, tied: bool = True, dtype: str = "F32") -> Path:
    """A one-layer Llama whose weights are a hole in the file: all zeros, and no bytes on the disk."""
    path.mkdir(parents=True)
    values = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=vocab, hidden_size=width,
        intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8, max_position_embeddings=64,
        tie_word_embeddings=tied,
    )  # fmt: skip
    (path / "config.json").write_text(json.dumps(values))
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (vocab, width),
        layer + "input_layernorm.weight": (width,),
        layer + "post_attention_layernorm.weight": (width,),
        "model.norm.weight": (width,),
        **{f"{layer}self_attn.{name}_proj.weight": (16, width) for name in "qkv"},
        layer + "self_attn.o_proj.weight": (width, 16),
        **{f"{layer}mlp.{name}_proj.weight": (16, width) for name in ("gate", "up")},
        layer + "mlp.down_proj.weight": (width, 16),
    }
    if not tied:
        shapes["lm_head.weight"] = (vocab, width)
    hole(path / "model.safetensors", shapes, dtype)
    return path


def hole(file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> None:
    """A safetensors file of zeros, written from the statement of the format alone."""
    header: dict[str, Any] = {}
    at = 0
    for name, shape in shapes.items():
        end = at + int(np.prod(shape)) * {"F32": 4, "BF16": 2, "F16": 2}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + at)

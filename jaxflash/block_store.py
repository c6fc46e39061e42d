"""Finished blocks of a quantisation in a folder, so that one that was killed goes on where it was.

DIR/settings.json             what the blocks depend on; other settings are refused
DIR/block-00003.safetensors   a block's arrays, "mlp/up/weight.words" and so on
DIR/block-00003.json          written last: the block is whole. Digests, what is packed, and the records of its linears
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxflash.atomic import write_atomically
from jaxflash.calibration import BlockParams
from jaxflash.hf import safetensors
from quant.tensor import Int4Tensor

_SETTINGS = "settings.json"
_ARRAYS = ("words", "scales", "zeros", "permutation")


class BlockStore:
    """The finished blocks in `folder`, which is made where it is missing.

    settings: a JSON object of everything but the dense blocks that their quantisation depends on.

    Raises ValueError where the folder holds blocks of other settings, naming them.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]):
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        path, now = folder / _SETTINGS, json.loads(json.dumps(settings))
        if path.exists():
            there = json.loads(path.read_text())
            changed = [key for key in there | now if there.get(key) != now.get(key)]
            if changed:
                listed = "; ".join(f"{key}: {there.get(key)!r} there, {now.get(key)!r} now" for key in changed)
                raise ValueError(
                    f"quantize: {str(folder)!r} holds blocks that were quantised otherwise ({listed}). Go on with the "
                    "same settings, or remove the folder."
                )
        write_atomically(path, json.dumps(now, indent=2))

    def read(self, layer: int, dense: BlockParams) -> tuple[BlockParams, list[dict[str, Any]]] | None:
        """(block, records) as `write` took them; None where it is not finished.

        Raises ValueError where the block there is of other dense parameters, or is damaged.
        """
        arrays, facts = self._paths(layer)
        if not facts.exists():
            return None
        said = json.loads(facts.read_text())
        if said["dense"] != digest(dense):
            raise ValueError(
                f"quantize: {str(arrays)!r} is block {layer} of another model. Go on with the same one, or remove the "
                "folder."
            )
        content = safetensors.open_file(arrays)
        found = {name: jnp.asarray(tensor.read((slice(None),) * len(tensor.shape))) for name, tensor in content.items()}
        block: BlockParams = {name: array for name, array in found.items() if "." not in name}
        for name, static in said["packed"].items():
            parts = {part: found.get(f"{name}.{part}") for part in _ARRAYS}
            block[name] = Int4Tensor(**parts, shape=tuple(static["shape"]), group=static["group"])
        if said["block"] != digest(block):
            raise ValueError(f"quantize: {str(arrays)!r} is damaged - its digest does not hold. Remove the folder.")
        return block, said["records"]

    def write(self, layer: int, dense: BlockParams, block: BlockParams, records: list[dict[str, Any]]) -> None:
        """Keeps a finished block: after a kill it is there whole, or not at all."""
        arrays, facts = self._paths(layer)
        flat = {name: np.asarray(array) for name, array in _arrays(block).items()}
        header = safetensors.encode_header((n, safetensors.NAMES[a.dtype], a.shape) for n, a in flat.items())
        write_atomically(arrays, b"".join([header, *(array.tobytes() for array in flat.values())]))
        packed = {n: {"shape": w.shape, "group": w.group} for n, w in block.items() if isinstance(w, Int4Tensor)}
        said = {"dense": digest(dense), "block": digest(block), "packed": packed, "records": records}
        write_atomically(facts, json.dumps(said))

    def _paths(self, layer: int) -> tuple[Path, Path]:
        stem = f"block-{layer:05d}"
        return self._folder / f"{stem}.safetensors", self._folder / f"{stem}.json"


def digest(arrays: Mapping[str, Any]) -> str:
    """Of names, dtypes, shapes and bytes; Int4Tensors by their arrays."""
    total = hashlib.sha256()
    for name, array in sorted(_arrays(arrays).items()):
        host = np.asarray(array)
        total.update(f"{name} {host.dtype} {host.shape}\n".encode() + host.tobytes())
    return total.hexdigest()


def _arrays(block: Mapping[str, Any]) -> dict[str, jax.Array]:
    """The block without Int4Tensors: their arrays under names of their own."""
    flat: dict[str, jax.Array] = {}
    for name, leaf in block.items():
        if isinstance(leaf, Int4Tensor):
            parts = {f"{name}.{part}": getattr(leaf, part) for part in _ARRAYS}
            flat |= {key: array for key, array in parts.items() if array is not None}
        else:
            flat[name] = leaf
    return flat

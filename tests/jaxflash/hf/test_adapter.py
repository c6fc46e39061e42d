"""Folders of adapters as peft keeps them: read by the `safetensors` package, written by it, refused in words."""

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxflash.adapters import adapted
from jaxflash.finetune import save_adapter
from jaxflash.hf.adapter import CONFIG as CONFIG_FILE
from jaxflash.hf.adapter import WEIGHTS, read_adapter
from jaxflash.language_model import load, save
from pallas_kernels.dispatch import Unsupported
from quant.lora import LoraConfig
from sharding.mesh import make_mesh
from tests.jaxflash.hf.quantised import CONFIG, dense, packed, same
from tests.jaxflash.hf.tiny import edit, rewrite
from tests.jaxflash.test_adapters import moved

# peft's names, (ours, K, N), as published with Llama; a file of these is written by the package alone below.
D, FF = CONFIG.d_model, CONFIG.d_ff
MODULES = {
    "self_attn.q_proj": ("attention/q", D, D),
    "self_attn.k_proj": ("attention/k", D, D),
    "self_attn.v_proj": ("attention/v", D, D),
    "self_attn.o_proj": ("attention/out", D, D),
    "mlp.gate_proj": ("mlp/gate", D, FF),
    "mlp.up_proj": ("mlp/up", D, FF),
    "mlp.down_proj": ("mlp/down", FF, D),
}
RANK = 3


def key(layer: int, module: str, letter: str) -> str:
    return f"base_model.model.model.layers.{layer}.{module}.lora_{letter}.weight"


def tensors(modules, dtype: Any = np.float32):
    rng = np.random.default_rng(0)
    return {
        key(layer, module, letter): rng.standard_normal(shape).astype(dtype)
        for layer in range(CONFIG.n_layers)
        for module in modules
        for letter, shape in (("A", (RANK, MODULES[module][1])), ("B", (MODULES[module][2], RANK)))
    }


def write(folder, modules=("self_attn.q_proj", "mlp.down_proj"), dtype: Any = np.float32):
    """An adapter folder by the statement of the format, with the keys that peft 0.18 writes."""
    folder.mkdir()
    values = dict(
        alora_invocation_tokens=None, alpha_pattern={}, arrow_config=None, auto_mapping=None, bias="none",
        base_model_name_or_path="x/y", corda_config=None, ensure_weight_tying=False, eva_config=None,
        exclude_modules=None, fan_in_fan_out=False, inference_mode=True, init_lora_weights=True,
        layer_replication=None, layers_pattern=None, layers_to_transform=None, loftq_config={}, lora_alpha=6,
        lora_bias=False, lora_dropout=0.05, megatron_config=None, megatron_core="megatron.core", modules_to_save=None,
        peft_type="LORA", peft_version="0.18.0", qalora_group_size=16, r=RANK, rank_pattern={}, revision=None,
        target_modules=[module.split(".")[1] for module in modules], target_parameters=None, task_type="CAUSAL_LM",
        trainable_token_indices=None, use_dora=False, use_qalora=False, use_rslora=False,
    )  # fmt: skip
    (folder / CONFIG_FILE).write_text(json.dumps(values))
    save_file(tensors(modules, dtype), folder / WEIGHTS)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / "model"
    save(packed("symmetric")[0], path)
    return path


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_what_peft_wrote_goes_beside_the_weights_it_names(base, tmp_path, dtype):
    model = load(base, adapter=write(tmp_path / "adapter", tuple(MODULES), dtype))
    found, held = dict(adapted(model.params)), tensors(MODULES, dtype)
    assert sorted(found) == sorted(name for name, *_ in MODULES.values())
    for module, (name, K, N) in MODULES.items():
        weight = found[name]
        assert weight.a.shape == (CONFIG.n_layers, K, RANK) and weight.b.shape == (CONFIG.n_layers, RANK, N)
        assert weight.a.dtype == weight.b.dtype == jnp.float32 and weight.config.scale == 2
        for layer in range(CONFIG.n_layers):
            np.testing.assert_array_equal(weight.a[layer].T, held[key(layer, module, "A")].astype(np.float32))
            np.testing.assert_array_equal(weight.b[layer].T, held[key(layer, module, "B")].astype(np.float32))


@pytest.mark.parametrize("stabilized", [False, True])
def test_what_is_saved_is_what_peft_expects_and_reads_back_bit_for_bit(base, tmp_path, stabilized):
    lora = LoraConfig(rank=5, alpha=7.0, dropout=0.25, rank_stabilized=stabilized, targets="attention/(q|v)|mlp/up")
    model = moved(load(base), lora)
    save_adapter(model, tmp_path / "adapter", base="someone/base")
    assert sorted(file.name for file in (tmp_path / "adapter").iterdir()) == [CONFIG_FILE, WEIGHTS]
    written = json.loads((tmp_path / "adapter" / CONFIG_FILE).read_text())
    assert written.items() >= {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 5, "lora_alpha": 7.0, "lora_dropout": 0.25, "bias": "none",
        "use_rslora": stabilized, "fan_in_fan_out": False, "base_model_name_or_path": "someone/base",
    }.items()  # fmt: skip
    assert written["target_modules"] == ["q_proj", "up_proj", "v_proj"]
    held = load_file(tmp_path / "adapter" / WEIGHTS)
    assert set(held) == {
        key(layer, module, letter)
        for layer in range(CONFIG.n_layers)
        for module in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")
        for letter in "AB"
    }
    up = model.params["blocks"]["mlp"]["up"]["weight"]
    np.testing.assert_array_equal(held[key(1, "mlp.up_proj", "B")], np.asarray(up.b[1]).T)
    assert held[key(1, "mlp.up_proj", "A")].shape == (5, D) and held[key(1, "mlp.up_proj", "A")].dtype == np.float32

    again = load(base, adapter=tmp_path / "adapter")
    for (name, was), (other, weight) in zip(adapted(model.params), adapted(again.params), strict=True):
        assert name == other and same((weight.a, weight.b, weight.base), (was.a, was.b, was.base))
        assert weight.config.scale == lora.scale and weight.config.dropout == lora.dropout


def edited(**changes):
    return lambda folder: edit(folder / CONFIG_FILE, **changes)


def tensor(name: str, value: Any):
    return lambda folder: rewrite(folder / WEIGHTS, **{name: value})


@pytest.mark.parametrize(
    "change, error, message",
    [
        (edited(peft_type="IA3"), Unsupported, "peft_type='IA3' - LORA is served"),
        (edited(use_dora=True), Unsupported, "use_dora=True - plain LoRA"),
        (edited(bias="all", rank_pattern={"q_proj": 8}), Unsupported, "with bias='all', rank_pattern={'q_proj': 8}"),
        (edited(init_lora_weights="pissa"), Unsupported, "init_lora_weights='pissa'"),
        (edited(modules_to_save=["lm_head"]), Unsupported, r"modules_to_save=\['lm_head'\]"),
        (edited(fan_in_fan_out=True), Unsupported, "fan_in_fan_out=True"),
        (edited(something_new=3), Unsupported, "something_new=3"),
        (edited(r="8"), ValueError, "adapter_config.json has r='8'"),
        (edited(r=...), ValueError, "adapter_config.json has r=None"),
        (edited(lora_alpha=-1), ValueError, "adapter_config.json has lora_alpha=-1 - must be a positive number"),
        (edited(lora_dropout="x"), ValueError, "lora_dropout='x' - must be a number"),
        (edited(r=4), ValueError, r"lora_A.weight' has shape=\(3, 64\) - r=4 and a weight of K=64 .* \(4, 64\)"),
        (
            tensor(key(1, "mlp.down_proj", "B"), np.zeros((63, 3), np.float32)),
            ValueError,
            r"layers.1.mlp.down_proj.lora_B.weight' has shape=\(63, 3\) .* N=64 outputs make it \(64, 3\)",
        ),
        (tensor(key(0, "mlp.down_proj", "A"), np.zeros((3, 96), np.int32)), ValueError, "dtype='I32' - must be"),
        (tensor(key(1, "mlp.down_proj", "A"), ...), ValueError, "lacks 1 of 8 tensors: .*layers.1.mlp.down"),
        (
            tensor("base_model.model.lm_head.lora_A.weight", np.zeros((3, 64), np.float32)),
            ValueError,
            "1 tensors that are of no linear of this model's blocks: 'base_model.model.lm_head.lora_A.weight'",
        ),
        (tensor(key(2, "mlp.up_proj", "A"), np.zeros((3, 64), np.float32)), ValueError, "of no linear .*layers.2.mlp"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b""), ValueError, "at least 8"),
        (lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model.bin"), FileNotFoundError, "only safetensors"),
        (lambda folder: (folder / CONFIG_FILE).unlink(), FileNotFoundError, "adapter_config.json"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, change, error, message):

    folder = write(tmp_path / "adapter")
    change(folder)
    with pytest.raises(error, match=message):
        read_adapter(folder, CONFIG, make_mesh({"data": 1}))


def test_nothing_is_written_over(tmp_path):
    model = moved(dense())
    save_adapter(model, tmp_path / "adapter")
    with pytest.raises(FileExistsError, match="nothing is written over"):
        save_adapter(model, tmp_path / "adapter")

"""Tiny checkpoints of every architecture with random weights, and the logits that transformers gives for them.

Run in an environment of its own, which the tests do not need (transformers 5.24.0 and torch 2.13.0 made what is here):

    python -m venv ENV && ENV/bin/pip install torch transformers
    ENV/bin/python tests/golden/hf/make_golden.py            # writes the folders beside this file anew
    ENV/bin/python tests/golden/hf/make_golden.py DIR ...    # checks folders that jaxflash wrote, each a golden's copy

The second form loads each DIR/NAME with transformers and compares its logits with NAME's here.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
SIZES = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", rope_theta=10_000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16,
)  # fmt: skip

# name -> (model_type, what differs from SIZES, dtype of the file, largest shard)
CASES = {
    "llama2": ("llama", dict(num_key_value_heads=4, rms_norm_eps=1e-5), "float32", "1GB"),
    "llama3": ("llama", dict(rope_parameters=LLAMA3, tie_word_embeddings=True), "bfloat16", "20KB"),
    "mistral": ("mistral", dict(sliding_window=7, rope_parameters=dict(rope_type="default", rope_theta=1e5)),
                "float16", "1GB"),
    "qwen2": ("qwen2", dict(tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=1e6)),
              "float32", "1GB"),
    "qwen2-window": ("qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=0), "bfloat16", "1GB"),
    "qwen3": ("qwen3", dict(head_dim=12, rope_parameters=dict(rope_type="default", rope_theta=1e6)),
              "bfloat16", "30KB"),
}  # fmt: skip


# torch and transformers are imported where they are used: pytest imports this file in search of doctests.
def randomise(model) -> None:
    """Weights that make every parameter, position and mask move the logits; those of transformers are too small."""
    import torch  # pyright: ignore[reportMissingImports]

    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape)
        if "norm" in name:
            value = 1 + 0.3 * noise
        elif name.endswith("bias"):
            value = 0.5 * noise
        elif "embed" in name:
            value = noise
        else:
            value = 1.5 * noise / parameter.shape[-1] ** 0.5
        parameter.data = value


def logits_of(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """What transformers gives for a folder, computed in float32."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens)).logits.numpy()


def make(name: str) -> None:
    """Writes the folder of a case, and its logits."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoConfig, AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    model_type, changes, dtype, shard = CASES[name]
    torch.manual_seed(sorted(CASES).index(name))
    config = AutoConfig.for_model(model_type, **(SIZES | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model)
    model.tie_weights()
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard)
    (folder / "generation_config.json").unlink()
    if name in ("llama2", "mistral"):
        as_version_4(folder / "config.json")
    tokens = np.random.default_rng(7).integers(0, SIZES["vocab_size"], (2, 40))
    np.savez_compressed(folder / "logits.npz", tokens=tokens.astype(np.int32), logits=logits_of(folder, tokens))


def as_version_4(path: Path) -> None:
    """The keys as transformers 4 wrote them, which is what most of the Hub has."""
    values = json.loads(path.read_text())
    rope = values.pop("rope_parameters")
    values |= {"rope_theta": rope["rope_theta"], "rope_scaling": None, "torch_dtype": values.pop("dtype")}
    values.pop("head_dim", None)
    path.write_text(json.dumps(values, indent=2) + "\n")


def check(folder: Path) -> None:
    golden = np.load(HERE / folder.name / "logits.npz")
    found = logits_of(folder, golden["tokens"].astype(np.int64))
    print(f"{folder}: largest difference of logits {np.abs(found - golden['logits']).max():.2e}")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        check(Path(argument))
    if not sys.argv[1:]:
        for case in CASES:
            make(case)

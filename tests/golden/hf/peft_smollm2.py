"""Adapters of a real model between jaxflash and the `peft` package, both ways: the logits are the same.

Needs the network and torch, so no test runs it. DIR is that of `smollm2.py`; OUT is a new folder:

    PYTHONPATH=. python tests/golden/hf/peft_smollm2.py write DIR OUT      # our adapters, and our logits with them
    python -m venv ENV && ENV/bin/pip install torch transformers peft
    ENV/bin/python tests/golden/hf/peft_smollm2.py peft OUT                # compares, and writes adapters of its own
    PYTHONPATH=. python tests/golden/hf/peft_smollm2.py read OUT           # compares these

Float32, peft 0.21.2, transformers 5.24.0: of logits up to 35, ours with our adapters and peft's are 6.6e-5 ("all") and
9.3e-5 ("some") apart; with adapters that peft wrote 1.3e-4 and 7.1e-5.
"""

import sys
from pathlib import Path

import numpy as np

TARGETS = {
    # ours, and as peft names them: rank, alpha, rank-stabilised, linears
    "all": (8, 16, False, ".*", "all-linear"),
    "some": (5, 7, True, "attention/(q|v)|mlp/down", ["q_proj", "v_proj", "down_proj"]),
}
LIMIT = 1e-4  # of the largest logit


def compare(what: str, found: np.ndarray, wanted: np.ndarray, base: np.ndarray) -> None:
    error, moved = np.abs(found - wanted).max(), np.abs(base - wanted).max()
    top = np.abs(wanted).max()
    print(f"{what}: logits up to {top:.1f}, moved by adapters up to {moved:.2f}, apart up to {error:.1e}")
    if not error <= LIMIT * top < moved:
        raise SystemExit(f"{what}: must be at most {LIMIT} of the largest apart, and moved by more")


def write(folder: Path, out: Path) -> None:
    import dataclasses

    import jax
    import jax.numpy as jnp

    import jaxflash
    from jaxflash.adapters import join, take

    model = jaxflash.load(next(folder.glob("**/SmolLM2*.gguf")))
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, compute_dtype="float32"))
    jaxflash.save(model, out / "base", dtype="float32")
    tokens = model.tokenizer.encode("The state of the union is strong, and so it was a year ago. " * 6)[None, :64]
    np.savez(out / "base.npz", tokens=tokens, logits=np.asarray(model.module(jnp.asarray(tokens))))
    for name, (rank, alpha, stabilised, targets, _) in TARGETS.items():
        lora = jaxflash.LoraConfig(rank=rank, alpha=alpha, rank_stabilized=stabilised, targets=targets)
        ours = jaxflash.add_adapters(model, lora)
        rng = np.random.default_rng(rank)
        factors = jax.tree.map(lambda m: m + 0.02 * rng.standard_normal(m.shape, np.float32), take(ours.params))  # noqa: B023
        ours = dataclasses.replace(ours, params=join(ours.params, factors))
        jaxflash.save_adapter(ours, out / name, base=str(out / "base"))
        np.save(out / f"{name}.npy", np.asarray(ours.module(jnp.asarray(tokens))))


def with_peft(out: Path) -> None:
    import torch  # pyright: ignore[reportMissingImports]
    from peft import LoraConfig, PeftModel, get_peft_model  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    held = np.load(out / "base.npz")
    tokens = torch.tensor(held["tokens"].astype(np.int64))

    def base():
        return AutoModelForCausalLM.from_pretrained(out / "base", dtype=torch.float32).eval()

    def logits(model) -> np.ndarray:
        with torch.no_grad():
            return model(tokens).logits.numpy()

    for name, (rank, alpha, stabilised, _, modules) in TARGETS.items():
        compare(f"ours, read by peft ({name})", logits(PeftModel.from_pretrained(base(), out / name).eval()),
                np.load(out / f"{name}.npy"), held["logits"])  # fmt: skip
        torch.manual_seed(rank)
        config = LoraConfig(r=rank, lora_alpha=alpha, use_rslora=stabilised, target_modules=modules,
                            init_lora_weights=False, task_type="CAUSAL_LM")  # fmt: skip
        theirs = get_peft_model(base(), config).eval()
        with torch.no_grad():
            for key, parameter in theirs.named_parameters():
                if "lora_" in key:
                    parameter.mul_(0.2)
        theirs.save_pretrained(out / f"{name}-of-peft")
        np.save(out / f"{name}-of-peft.npy", logits(theirs))


def read(out: Path) -> None:
    import dataclasses

    import jax.numpy as jnp

    import jaxflash

    held = np.load(out / "base.npz")
    for name in TARGETS:
        model = jaxflash.load(out / "base", adapter=out / f"{name}-of-peft")
        model = dataclasses.replace(model, config=dataclasses.replace(model.config, compute_dtype="float32"))
        found = np.asarray(model.module(jnp.asarray(held["tokens"])))
        compare(f"peft's, read by jaxflash ({name})", found, np.load(out / f"{name}-of-peft.npy"), held["logits"])


if __name__ == "__main__":
    {"write": write, "peft": with_peft, "read": read}[sys.argv[1]](*map(Path, sys.argv[2:]))

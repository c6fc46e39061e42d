"""Adapters on a model: added, trained alone by the trainer, resumed, merged, and quantised again."""

import dataclasses
import functools
import json
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxflash import checkpoint
from jaxflash.adapters import adapted, freeze, join, take
from jaxflash.calibration import STAGES
from jaxflash.cli import main
from jaxflash.config import TrainConfig, override
from jaxflash.finetune import add_adapters, finetune_preset, merge, save_adapter
from jaxflash.language_model import load, save
from jaxflash.quantize import quantize
from jaxflash.train import train
from quant.lora import LoraConfig, LoraTensor
from quant.recipe import Recipe
from tests.jaxflash.hf.quantised import WIDE, dense, packed, same
from tests.jaxflash.quantize_model import batches
from tests.jaxflash.test_quantize import dequantized, is_packed, logits_by_oracle, model_of, packed_of
from tests.tolerance import assert_close

LORA = LoraConfig(rank=2, alpha=3.0, targets="attention/(q|out)|mlp/down")
TOKENS = np.random.default_rng(0).integers(0, 37, (2, 12))


def moved(model, lora=LORA):
    """The model with adapters whose B is not zero."""
    model = add_adapters(model, lora)
    rng = np.random.default_rng(1)
    factors = jax.tree.map(lambda m: m + jnp.asarray(0.2 * rng.standard_normal(m.shape), m.dtype), take(model.params))
    return dataclasses.replace(model, params=join(model.params, factors))


def weight_of(params, name):
    block, linear = name.split("/")
    return params["blocks"][block][linear]["weight"]


def merged_by_hand(params):
    """Dense parameters, W + s A B in float64 and rounded to float32."""

    def one(leaf):
        if not isinstance(leaf, LoraTensor):
            return leaf
        base = np.asarray(dequantized(leaf.base), float)
        return jnp.asarray(base + 1.5 * np.asarray(leaf.a, float) @ np.asarray(leaf.b, float), jnp.float32)

    return dequantized(jax.tree.map(one, params, is_leaf=lambda leaf: isinstance(leaf, LoraTensor)))


@pytest.mark.parametrize("base", [packed_of, model_of])
def test_a_model_with_adapters_is_the_model_of_the_merged_weights(base):
    """Fresh ones change no bit; others are held against the float64 oracle, merged by `merge` or not at all."""
    run = jax.jit(lambda model, tokens: dataclasses.replace(plain, params=model).module(tokens))
    plain = base("qwen2")
    np.testing.assert_array_equal(run(add_adapters(plain, LORA).params, TOKENS), run(plain.params, TOKENS))
    model = moved(plain)
    by_hand = merged_by_hand(model.params)
    truth, rounded = logits_by_oracle(by_hand, model.config)
    assert_close(run(model.params, TOKENS), truth, rounded)
    whole = merge(model)
    for name, _ in adapted(model.params):
        found, want = (weight_of(params, name) for params in (whole.params, by_hand))
        assert_close(found, want, want)
    assert same(weight_of(whole.params, "mlp/gate"), weight_of(plain.params, "mlp/gate"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of 4-bit weights as a Hub folder."""
    path = tmp_path_factory.mktemp("adapters") / "base"
    save(packed("symmetric", WIDE)[0], path)
    return path


def settings(folder, **changes) -> TrainConfig:
    lora = LoraConfig(rank=4, dropout=0.1, targets="attention/q|mlp/(up|down)")
    small: dict[str, Any] = dict(
        lora=lora, seq_len=32, batch_size=8, accumulate=2, steps=6, schedule_steps=6, warmup_steps=1, eval_batches=1,
        learning_rate=2e-2, mesh={"data": 1},
    )  # fmt: skip
    return finetune_preset(folder, **{"model.compute_dtype": "float32", **small, **changes})


def test_only_adapters_are_trained_and_kept_and_a_run_resumes_bit_for_bit(folder, tmp_path):
    """With remat, accumulation and dropout, over a scan of stacked layers of 4 bits."""
    config = settings(folder, out=str(tmp_path / "run"), checkpoint_every=3)
    assert config.model.remat != "none" and config.model.param_dtype == "float32" and config.tokenizer == "model"
    run = train(config, quiet=True)
    losses = run.curve()[1]
    assert losses[-1] < losses[0] - 0.2

    # What is trained: 4 (K + N) bytes a rank, a layer, a linear; its two moments in the optimizer, and counters.
    d, ff, layers = WIDE.d_model, WIDE.d_ff, WIDE.n_layers
    size = 4 * 4 * layers * ((d + d) + 2 * (d + ff))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(run.state.params)) == size
    extra = sum(leaf.nbytes for leaf in jax.tree.leaves(run.state.opt_state)) - 2 * size
    assert 0 <= extra <= 16
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(run.state.params))  # every A and B has moved from 0

    # The base is what the folder holds, bit for bit; so is what `load` makes of the run.
    base = load(folder)
    assert config.lora is not None and same(run.frozen, freeze(base.config, base.params, config.lora))
    again = load(tmp_path / "run")
    assert same(again.params, run.model.params) and same(take(again.params), run.state.params)

    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
    resumed = train(config, quiet=True)
    assert resumed.curve() == run.curve() and same(resumed.state, run.state)


def test_what_is_not_trained_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="has weights of 4 bits or with adapters .* Set lora for 4 bits"):
        train(settings(folder, lora=None), quiet=True)
    with pytest.raises(ValueError, match=r"d_ff: 128 there, 64 here\) .* Use finetune_preset"):
        train(settings(folder, **{"model.d_ff": 64}), quiet=True)
    with pytest.raises(ValueError, match="lora with stage=2 - adapters are not trained in a pipeline"):
        train(settings(folder, mesh={"stage": 2}), quiet=True)
    with pytest.raises(ValueError, match=r"lora: targets='attention/w' .* Did you mean 'attention/"):
        train(settings(folder, lora=LoraConfig(targets="attention/w")), quiet=True)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        finetune_preset(tmp_path / "nothing")
    for key, value, what in (("lora", LORA, "lora"), ("tokenizer", "model", "tokenizer='model'")):
        with pytest.raises(ValueError, match=f"TrainConfig: {what} without init_from"):
            override(TrainConfig(model=WIDE), {key: value})


def test_an_adapter_is_merged_before_anything_else_is_done(tmp_path):
    model = add_adapters(dense(), LORA)
    with pytest.raises(ValueError, match="lora: the model has adapters already"):
        add_adapters(model, LORA)
    with pytest.raises(ValueError, match="quantize: blocks/attention/out/weight has an adapter - use jaxflash.merge"):
        quantize(model)
    with pytest.raises(ValueError, match="save: the model has adapters - merge them first"):
        save(model, tmp_path / "x")
    for call in (merge, functools.partial(save_adapter, path=tmp_path / "x")):
        with pytest.raises(ValueError, match="the model has no adapters"):
            call(dense())
    assert not list(tmp_path.iterdir())


def test_settings_survive_json(folder, tmp_path):
    config = settings(folder)
    checkpoint.open_run(tmp_path / "run", config)
    assert checkpoint.read_config(tmp_path / "run") == config
    assert override(config, {"lora.rank": "8"}).lora == LoraConfig(**{**vars(config.lora), "rank": 8})


@pytest.mark.slow
def test_on_a_mesh_of_eight_devices_it_is_the_same_run(folder):
    """Adapters lie as their weights do, and the loss is that of one device; dropout too, for a mask knows no mesh."""
    config = settings(folder, steps=4)
    want = train(config, quiet=True)
    run = train(dataclasses.replace(config, mesh={"data": 2, "fsdp": 2, "tensor": 2}), quiet=True)
    np.testing.assert_allclose(run.curve()[1], want.curve()[1], rtol=0, atol=1e-4)
    for name, weight in adapted(run.model.params):
        assert weight.a.addressable_shards[0].data.shape[1] * 2 == weight.a.shape[1], name  # by fsdp, or by tensor
        assert weight.b.addressable_shards[0].data.shape[2] * 2 == weight.b.shape[2], name
    whole = merge(run.model)
    for name, weight in adapted(jax.device_get(run.model.params)):
        found = weight_of(whole.params, name)
        assert_close(found, jax.vmap(LoraTensor.dequantize)(weight), found, name)
        assert found.addressable_shards[0].data.size * 4 == found.size, name
    states = jax.tree.leaves(run.state.opt_state, is_leaf=lambda s: hasattr(s, "mu"))
    moments = [m for s in states if hasattr(s, "mu") for m in jax.tree.leaves((s.mu, s.nu))]
    assert moments and all(m.addressable_shards[0].data.nbytes * 2 == m.nbytes for m in moments)


@pytest.mark.slow
def test_a_dense_model_is_tuned_whole(tmp_path):
    """From a run of ours: all parameters are trained, from where that run left them."""
    save(dense(WIDE), tmp_path / "base")
    config = settings(tmp_path / "base", lora=None, steps=3, out=str(tmp_path / "run"), learning_rate=1e-3)
    run = train(config, quiet=True)
    assert run.frozen is None and jax.tree.structure(run.state.params) == jax.tree.structure(dense(WIDE).params)
    again = train(dataclasses.replace(config, init_from=str(tmp_path / "run"), out=None, tokenizer="byte"), quiet=True)
    assert again.curve()[1][0] < run.curve()[1][0]
    resumed = train(config, quiet=True)  # nothing is left to do: the model to begin with is not even loaded
    assert same(resumed.state, run.state)


@pytest.mark.slow
def test_merged_weights_are_quantised_again_with_their_error_reported():
    """GPTQ is solved for W + s A B of the linears that had adapters; others keep their codes, bit for bit."""
    recipe, records = Recipe(group=32, symmetric=False), []
    base = packed_of("qwen2")
    whole = merge(moved(base, dataclasses.replace(LORA, targets="attention/(q|out)")))
    again = quantize(whole, recipe, batches(), method="gptq", on_record=records.append, quiet=True)
    linears = {name for stage in STAGES for name in stage.linears}
    changed = {"attention/q", "attention/out"}
    assert [(r["block"], r["linear"]) for r in records] == [(b, n) for b in range(2) for n in sorted(changed)[::-1]]
    for name in linears:
        weight, was = (weight_of(model.params, name) for model in (again, base))
        assert is_packed(weight) and (name in changed or same(weight, was))
    for record in records:
        assert 0 < record["objective"] <= record["rtn"]
    with pytest.raises(ValueError, match="is quantised already"):
        quantize(whole, recipe, batches(), method="awq")


@pytest.mark.parametrize(
    "args, message",
    [
        (["--preset", "tiny", "--model", "x"], "--preset with --model"),
        (["--model", "nothing"], "nothing' does not exist"),
        (["--lora", "rank"], "--lora 'rank': must be KEY=VALUE, for instance rank=16"),
        (["--lora", "rnk=3"], "Did you mean 'rank'?"),
        (["--lora", "rank=3"], "lora without init_from"),
    ],
)
def test_wrong_calls_of_the_command(args, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["train", *args])
    assert ended.value.code == 2 and message in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.slow
def test_by_the_command_line(folder, tmp_path, capsys, monkeypatch):
    """Train adapters, take them out of the run, evaluate and generate with them, merge, and quantise the result."""
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 20)
    base = ["--model", str(folder)]
    main(
        ["train", *base, "--lora", "rank=2,alpha=4,targets=attention/(q|v)", "--data", "text.txt", "--mesh", "data=1",
         "--packing", "stream", "--seq-len", "32", "--batch-size", "4", "--steps", "2", "--learning-rate", "0.1",
         "--out", "run", "--set", "model.compute_dtype=float32"]
    )  # fmt: skip
    main(["convert", "run", "adapter", "--to", "adapter"])
    assert str(folder) in (tmp_path / "adapter" / "adapter_config.json").read_text()
    capsys.readouterr()

    def perplexity(*model):
        main(["evaluate", *model, "--compute-dtype", "float32", "--data", "text.txt", "--context", "32", "--json"])
        return json.loads(capsys.readouterr().out)["value"]

    with_adapter = perplexity(*base, "--adapter", "adapter")
    assert with_adapter == perplexity("--model", "run") != perplexity(*base)
    main(["generate", *base, "--adapter", "adapter", "--prompt", "To be", "--max-new-tokens", "3"])
    assert "To be" in capsys.readouterr().out
    main(["convert", "run", "merged", "--to", "dense"])
    assert perplexity("--model", "merged") == pytest.approx(with_adapter, rel=1e-4)
    main(["inspect", "run"])
    assert f"adapters of rank 2 for {folder}" in capsys.readouterr().out
    main(["quantize", *base, "--adapter", "adapter", "--method", "rtn", "--group", "32", "--out", "again"])
    again, before = load("again"), load(folder)
    assert same(weight_of(again.params, "mlp/up"), weight_of(before.params, "mlp/up"))
    assert is_packed(weight_of(again.params, "attention/q"))
    with pytest.raises(SystemExit):
        main(["convert", str(folder), "x", "--to", "adapter"])
    assert "the source is no run that trained adapters" in capsys.readouterr().err.replace("\n", " ")

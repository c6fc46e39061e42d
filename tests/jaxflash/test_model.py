"""The transformer against the NumPy oracle, published parameter counts, and the properties that training relies on."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxflash.config import PRESETS, preset
from jaxflash.model import (
    REMAT_POLICIES,
    KVCache,
    abstract,
    axis_units,
    count_parameters,
    flops_per_token,
    init_params,
)
from sharding import rules
from sharding.mesh import AXES, make_mesh
from tests.equations import equations
from tests.jaxflash import model_oracle as oracle
from tests.jaxflash.model_oracle import SHAPES, random_params, rounding_depth, small
from tests.tolerance import assert_close

EPS32 = 2.0**-24
by_shape = pytest.mark.parametrize("name", SHAPES)


def tokens_of(config, *shape, seed=1):
    return jnp.asarray(np.random.default_rng(seed).integers(0, config.vocab_size, shape), jnp.int32)


@functools.partial(jax.jit, static_argnames="config")
def forward(params, tokens, positions=None, segment_ids=None, *, config):
    model = nnx.merge(abstract(config)[0], params)
    return model(tokens, positions=positions, segment_ids=segment_ids)


def mean_nats(params, tokens, positions=None, segment_ids=None, *, config):
    logits = forward(params, tokens, positions, segment_ids, config=config)[:, :-1]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], 2).mean()


loss_and_grad = jax.jit(jax.value_and_grad(mean_nats), static_argnames="config")


def assert_rounding(got, expected, config, length):
    """Gradients of the same sum in another order: apart by at most the rounding of its longest chain."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        worst, size = np.abs(a - b).max(), np.abs(b).max()
        assert worst <= rounding_depth(config, length) * EPS32 * size, (jax.tree_util.keystr(path), worst, size)


@by_shape
def test_logits_equal_the_oracle(name):
    config, params = SHAPES[name], random_params(SHAPES[name])
    tokens = tokens_of(config, 2, 11)
    got = forward(params, tokens, config=config)
    truth, reference = (oracle.batch_logits(params, config, tokens, dtype=d) for d in (np.float64, np.float32))
    assert got.dtype == jnp.float32
    assert_close(got, truth, reference)


def test_positions_and_segments_reach_attention():
    config, params = SHAPES["llama3"], random_params(SHAPES["llama3"])
    tokens = tokens_of(config, 2, 9)
    positions = np.array([[5, 6, 7, 8, 9, 200, 201, 202, 203], [0, 1, 2, 3, 0, 1, 2, 3, 4]], np.int32)
    segments = np.array([[0] * 9, [1] * 4 + [2] * 5], np.int32)
    got = forward(params, tokens, positions, segments, config=config)
    truth, reference = (
        oracle.batch_logits(params, config, tokens, positions=positions, segments=segments, dtype=d)
        for d in (np.float64, np.float32)
    )
    assert_close(got, truth, reference)


@pytest.mark.parametrize("name", ["llama3", "mistral", "qwen2", "qwen3"])
def test_bfloat16_is_as_close_as_bfloat16_allows(name):
    config = dataclasses.replace(SHAPES[name], compute_dtype="bfloat16")
    params = random_params(config)
    tokens = tokens_of(config, 2, 11)
    got = forward(params, tokens, config=config)
    truth, reference = (oracle.batch_logits(params, config, tokens, dtype=d) for d in (np.float64, jnp.bfloat16))
    assert got.dtype == jnp.float32
    assert_close(got, truth, reference)


@pytest.mark.parametrize("name", ["llama3", "mistral", "qwen2", "qwen3"])
def test_gradients_by_central_differences(name):
    """Along one random direction per parameter, in float64 through the oracle."""
    config, params = SHAPES[name], random_params(SHAPES[name])
    tokens = tokens_of(config, 1, 9)
    _, grads = loss_and_grad(params, tokens, config=config)
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    leaves, tree = jax.tree.flatten(params)
    mask = np.arange(9) < 8

    def value(leaves):
        logits = oracle.logits(jax.tree.unflatten(tree, leaves), config, tokens[0])
        return oracle.nats(logits, np.roll(tokens[0], -1), mask) / 8

    rng, step = np.random.default_rng(2), 1e-5
    for index, (path, grad) in enumerate(jax.tree_util.tree_leaves_with_path(grads)):
        direction = rng.standard_normal(grad.shape)
        ends = [leaves[:index] + [leaves[index] + s * direction] + leaves[index + 1 :] for s in (step, -step)]
        numeric = (value(ends[0]) - value(ends[1])) / (2 * step)
        products = np.asarray(grad, np.float64) * direction
        allowed = rounding_depth(config, 9) * EPS32 * np.abs(products).sum()
        assert abs(products.sum() - numeric) <= allowed, jax.tree_util.keystr(path)
        assert abs(numeric) > allowed, "a direction that the loss does not feel shows nothing"


@pytest.mark.parametrize(("name", "segmented"), [("mistral", False), ("qwen3", True)])
def test_causality_by_gradient(name, segmented):
    """With every token once, a row of the table is a place: none is felt from the future, beyond window or segment."""
    config, length = SHAPES[name], 12
    params = random_params(config)
    tokens = jnp.arange(length, dtype=jnp.int32)[None]
    segments = jnp.asarray(np.arange(length)[None] // 5, jnp.int32) if segmented else None
    weights = jnp.asarray(np.random.default_rng(0).standard_normal((1, config.vocab_size)), jnp.float32)

    def scores(table):
        return (forward(params | {"table": table}, tokens, None, segments, config=config)[0] * weights).sum(1)

    jacobian = np.asarray(jax.jit(jax.jacrev(scores))(params["table"]))[:, :length]
    felt = np.abs(jacobian).max(axis=2)
    query, key = np.indices((length, length))
    reach = key <= query
    if config.sliding_window is not None:
        reach &= query - key <= config.n_layers * (config.sliding_window - 1)
    if segmented:
        reach &= query // 5 == key // 5
    np.testing.assert_array_equal(felt > 0, reach)


@pytest.mark.parametrize(("name", "restart"), [("mistral", False), ("qwen3", True)])
def test_packed_documents_equal_separate_ones(name, restart):
    """Values and gradients, whether or not positions start again: only distances count."""
    config, params = SHAPES[name], random_params(SHAPES[name])
    splits = ((5, 1, 7), (1, 1, 6), (13,), (2, 9, 2))  # of rows of 16: the rest is padding
    tokens = tokens_of(config, len(splits), 16)
    segments, positions = np.full((4, 16), -1, np.int32), np.tile(np.arange(16, dtype=np.int32), (4, 1))
    documents = []  # (row, start, length)
    for row, lengths in enumerate(splits):
        for index, length in enumerate(lengths):
            start = sum(lengths[:index])
            segments[row, start : start + length] = index
            if restart:
                positions[row, start : start + length] = np.arange(length)
            documents.append((row, start, length))
    # The same documents, one a row, and the same weights on their logits.
    probe = np.random.default_rng(3).standard_normal((4, 16, config.vocab_size)) * (segments >= 0)[..., None]
    alone, alone_probe = np.zeros((len(documents), 16), np.int32), np.zeros((len(documents), 16, config.vocab_size))
    for index, (row, start, length) in enumerate(documents):
        alone[index, :length] = tokens[row, start : start + length]
        alone_probe[index, :length] = probe[row, start : start + length]

    @functools.partial(jax.jit, static_argnames="packed")
    def run(params, tokens, probe, packed):
        def value(params):
            extra = (positions, segments) if packed else (None, None)
            logits = forward(params, tokens, *extra, config=config)
            return (logits * probe).sum(), logits

        return jax.value_and_grad(value, has_aux=True)(params)

    (_, together), packed_grads = run(params, tokens, jnp.asarray(probe, jnp.float32), packed=True)
    (_, apart), grads = run(params, jnp.asarray(alone), jnp.asarray(alone_probe, jnp.float32), packed=False)
    together = np.concatenate([together[row, start : start + length] for row, start, length in documents])
    apart = np.concatenate([apart[index, :length] for index, (_, _, length) in enumerate(documents)])
    truth, reference = (
        np.concatenate([oracle.logits(params, config, tokens[r, s : s + n], dtype=d) for r, s, n in documents])
        for d in (np.float64, np.float32)
    )
    assert_close(apart, truth, reference)
    assert_close(together, truth, reference)
    assert_rounding(packed_grads, grads, config, 4 * 16)


def test_remat_policies_trade_matmuls_for_memory_and_change_nothing_else():
    config = SHAPES["llama3"]
    params, tokens = random_params(config), tokens_of(config, 2, 64)

    def run(remat):
        step = jax.value_and_grad(functools.partial(mean_nats, config=dataclasses.replace(config, remat=remat)))
        dots = len(list(equations(jax.make_jaxpr(step)(params, tokens).jaxpr, "dot_general")))
        compiled = jax.jit(step).lower(params, tokens).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        return *compiled(params, tokens), dots, memory.temp_size_in_bytes

    loss, grads, *cost = run("none")
    costs = {"none": cost}
    for name in REMAT_POLICIES:
        got_loss, got, *costs[name] = run(name)
        assert abs(got_loss - loss) <= rounding_depth(config, 64) * EPS32 * loss
        assert_rounding(got, grads, config, 64)
    for axis, order in ((0, ("none", "dots", "full")), (1, ("full", "dots", "none"))):
        ranked = [costs[name][axis] for name in order]
        assert ranked[0] < ranked[1] < ranked[2], costs


def test_table_gradient_sums_over_tokens_in_float32():
    """2048 places of two tokens; in bfloat16 a row's gradient, summed in that type, would be off by a third."""
    params = random_params(SHAPES["llama2"])
    tokens = tokens_of(SHAPES["llama2"], 16, 128) % 2
    probe = jnp.asarray(np.random.default_rng(0).standard_normal((1, 1, 37)), jnp.float32)

    def table_gradient(dtype):
        config = dataclasses.replace(SHAPES["llama2"], compute_dtype=dtype, n_layers=1)
        one = params | {"blocks": jax.tree.map(lambda x: x[:1], params["blocks"])}
        grad = jax.grad(lambda table: (forward(one | {"table": table}, tokens, config=config) * probe).sum())
        return np.asarray(grad(one["table"]), np.float64)

    exact, rounded = table_gradient("float32"), table_gradient("bfloat16")
    # One block rounds about a dozen times on the way down and as often on the way back, to 2^-9 each.
    assert np.linalg.norm(rounded - exact) < 24 * 2.0**-9 * np.linalg.norm(exact)


# Published: safetensors metadata of each checkpoint on the Hub, a tied table counted once.
COUNTS = {
    "tiny": 828_544,
    "smollm2-135m": 134_515_008,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "1b": 1_235_814_400,
    "3b": 3_212_749_824,
    "llama2-7b": 6_738_415_616,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "llama3-8b": 8_030_261_248,
    "llama3.1-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
}


def test_parameter_counts_are_the_published_ones():
    assert {name: count_parameters(preset(name)) for name in PRESETS} == COUNTS


def test_flops_of_a_token_by_hand():
    # 1 layer, D 8, 2 heads and 1 kv head of 6, F 10, V 20: every matmul is 2 FLOPs a weight forward, 4 backward.
    config = small(vocab_size=20, d_model=8, n_layers=3, n_heads=2, n_kv_heads=1, head_dim=6, d_ff=10, qkv_bias=True)
    layer = 8 * 12 + 2 * 8 * 6 + 12 * 8 + 3 * 8 * 10
    # Scores and values are 2 * 6 FLOPs a query, key and head each; the mean query of 64 sees half of them.
    attention = 2 * (2 * 6) * 2 * 64 / 2
    expected = 3 * (2 * (3 * layer + 8 * 20) + 3 * attention)
    assert flops_per_token(config, 64) == expected
    assert (
        flops_per_token(dataclasses.replace(config, tie_embeddings=True, qkv_bias=False, qk_norm=True), 64) == expected
    )


@by_shape
def test_abstract_describes_what_init_makes(name):
    config = dataclasses.replace(SHAPES[name], param_dtype="bfloat16")
    _, shapes, axes = abstract(config)
    params = init_params(config, 0)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
    mesh = jax.sharding.AbstractMesh(tuple({"data": 2}.get(axis, 1) for axis in AXES), AXES)
    rules.check(shapes, axes, mesh, units=axis_units(config))  # known names, one per dim, for every parameter
    for stacked in jax.tree.leaves(axes["blocks"], is_leaf=lambda x: isinstance(x, tuple)):
        assert stacked[0] == "layer"


@pytest.mark.parametrize("name", PRESETS)
def test_presets_divide_over_a_mesh(name):
    config = preset(name)
    _, shapes, axes = abstract(config)
    ways = 2 if config.n_kv_heads % 2 == 0 else 1
    mesh = jax.sharding.AbstractMesh(tuple({"fsdp": 4, "tensor": ways}.get(axis, 1) for axis in AXES), AXES)
    rules.check(shapes, axes, mesh, units=axis_units(config))


def test_initial_values():
    config = small(d_model=96, d_ff=128, n_layers=8, n_heads=6, head_dim=16, vocab_size=500, qk_norm=True, init_std=0.1)
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), init_params(config, 3))
    for path, value in jax.tree_util.tree_leaves_with_path(params):
        keys = [k.key for k in path]
        if keys[-1] == "scale":
            assert (value == 1).all()
            continue
        std = 0.1 / 4 if {"out", "down"} & set(keys) else 0.1  # sqrt(2 * 8 layers) on what writes to the stream
        for layer in value if keys[0] == "blocks" else value[None]:
            # Five standard errors of a sample's standard deviation and mean.
            assert abs(layer.std() - std) < 5 * std / (2 * layer.size) ** 0.5
            assert abs(layer.mean()) < 5 * std / layer.size**0.5
    layers = [m for w in ("q", "k", "v", "out") for m in params["blocks"]["attention"][w]["weight"]]
    layers += [m for w in ("gate", "up", "down") for m in params["blocks"]["mlp"][w]["weight"]]
    samples = np.stack([m.ravel()[:1500] for m in [*layers, params["table"], params["head"]["weight"]]])
    # Every matrix of every layer has a stream of its own: correlations are noise, five standard errors at most.
    correlation = np.corrcoef(samples) - np.eye(len(samples))
    assert np.abs(correlation).max() < 5 / 1500**0.5


def test_seeds_differ():
    a, b = (init_params(SHAPES["qwen3"], seed)["table"] for seed in (0, 1))
    assert not np.isclose(a, b).any()


def test_initial_bits_do_not_depend_on_the_mesh():
    config = small(d_model=32, n_heads=4, n_kv_heads=4, vocab_size=40)
    _, _, axes = abstract(config)
    init = functools.partial(init_params, config, 7)
    expected = jax.jit(init)()
    for sizes in ({"fsdp": 2, "tensor": 4}, {"data": 2, "fsdp": 4}):
        mesh = make_mesh(sizes)
        with jax.set_mesh(mesh):
            got = jax.jit(init, out_shardings=rules.shardings(axes, mesh))()
        assert got["blocks"]["mlp"]["up"]["weight"].sharding.spec[1] == "fsdp"
        jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_sharded_loss_and_gradients_equal_unsharded():
    config = small(n_kv_heads=4, vocab_size=40, qk_norm=True, qkv_bias=True)
    params, tokens = random_params(config), tokens_of(config, 8, 12)
    loss, grads = loss_and_grad(params, tokens, config=config)
    _, _, axes = abstract(config)
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    with jax.set_mesh(mesh):
        laid_out = jax.device_put(params, rules.shardings(axes, mesh))
        rows = jax.device_put(tokens, jax.NamedSharding(mesh, P(("data", "fsdp"))))
        step = jax.jit(jax.value_and_grad(functools.partial(mean_nats, config=config)))
        sharded_loss, sharded = step(laid_out, rows)
    assert abs(sharded_loss - loss) <= rounding_depth(config, 12) * EPS32 * loss
    assert_rounding(sharded, grads, config, 12 * 8)


@pytest.mark.parametrize("name", ["llama3", "mistral", "qwen3"])
def test_prefill_and_decode_equal_the_full_forward(name):
    """Rows of unequal prompts, one token at a time, against the oracle's forward of the whole row."""
    config, params = SHAPES[name], random_params(SHAPES[name])
    tokens, lengths = tokens_of(config, 3, 12), np.array([1, 4, 7], np.int32)
    truth, reference = (oracle.batch_logits(params, config, tokens, dtype=d) for d in (np.float64, np.float32))

    def rows_at(logits, places):
        return logits[np.arange(3), places]

    model = nnx.merge(abstract(config)[0], params)
    prompts = jnp.where(jnp.arange(8)[None] < lengths[:, None], tokens[:, :8], 5)  # what padding holds is not seen
    decode = jax.jit(lambda token, cache: model.decode(token, cache))
    got, cache = jax.jit(model.prefill)(prompts, lengths, KVCache.empty(config, 3, 12))
    assert_close(got, rows_at(truth, lengths - 1), rows_at(reference, lengths - 1))
    for step in range(5):
        places = lengths + step
        np.testing.assert_array_equal(cache.lengths, places)
        got, cache = decode(rows_at(tokens, places), cache)
        assert_close(got, rows_at(truth, places), rows_at(reference, places))

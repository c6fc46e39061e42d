"""Cross entropy against float64, what masked places may hold, and the chunked form against the plain one."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxflash.loss import chunked_cross_entropy, cross_entropy
from tests.jaxflash.model_oracle import nats
from tests.tolerance import assert_close


def case(batch, length, vocab, seed=0, scale=3.0):
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(scale * rng.standard_normal((batch, length, vocab)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, vocab, (batch, length)), jnp.int32)
    return logits, targets, jnp.asarray(rng.random((batch, length)) < 0.7)


def plain(logits, targets, mask, dtype):
    """The definition in NumPy: sum, and gradient `softmax - one-hot`, zero where masked."""
    logits, mask = np.asarray(logits).astype(dtype), np.asarray(mask)
    shifted = logits - logits.max(-1, keepdims=True)
    total = np.exp(shifted).sum(-1, keepdims=True)
    one_hot = np.eye(logits.shape[-1], dtype=dtype)[np.asarray(targets)]
    each = np.log(total[..., 0]) - (shifted * one_hot).sum(-1)
    return (each * mask).sum(), (np.exp(shifted) / total - one_hot) * mask[..., None]


loss_and_grad = jax.jit(jax.value_and_grad(cross_entropy, has_aux=True))


@pytest.mark.parametrize(("scale", "shift"), [(3.0, 0.0), (50.0, 0.0), (1.0, 1e4)])
def test_value_and_gradient(scale, shift):
    logits, targets, mask = case(3, 10, 33, scale=scale)
    logits = logits + shift
    (total, count), gradient = loss_and_grad(logits, targets, mask)
    truth, reference = (plain(logits, targets, mask, dtype) for dtype in (np.float64, np.float32))
    assert total.dtype == count.dtype == jnp.float32
    assert count == np.asarray(mask).sum()
    np.testing.assert_allclose(truth[0], nats(logits, targets, np.asarray(mask)), rtol=1e-12)  # the loop agrees
    assert_close(total, truth[0], reference[0])
    assert_close(gradient, truth[1], reference[1])


def test_no_gradient_is_scattered_on_a_gpu():
    """Before a scatter, a compiler has to write the gradient of all logits in float32, and to read it after it."""
    program = jax.jit(loss_and_grad).trace(*case(1, 4, 33)).lower(lowering_platforms=("cuda",)).as_text()
    assert "scatter" not in program


def test_value_and_gradient_by_comparison():
    """As pipelines have it, inside a manual region; on a GPU the gradient is that everywhere."""
    args = case(1, 4, 33)
    mesh = jax.make_mesh((2,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))
    inside = jax.shard_map(loss_and_grad, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    with jax.set_mesh(mesh):
        (total, count), gradient = jax.jit(inside)(*args)
        assert "gather" not in jax.jit(inside).lower(*args).as_text()
    (expected, tokens), reference = loss_and_grad(*args)
    np.testing.assert_array_equal([total, count], [expected, tokens])
    np.testing.assert_array_equal(gradient, reference)


def test_bfloat16_logits_are_summed_in_float32():
    logits, targets, mask = case(2, 64, 33)
    rounded = logits.astype(jnp.bfloat16)
    assert cross_entropy(rounded, targets, mask) == cross_entropy(rounded.astype(jnp.float32), targets, mask)


def test_known_values():
    flat, one = jnp.zeros((1, 4, 8)), jnp.ones((1, 4), bool)
    total, count = cross_entropy(flat, jnp.zeros((1, 4), jnp.int32), one)
    np.testing.assert_allclose(total / count, math.log(8), rtol=2.0**-23)
    assert cross_entropy(flat, jnp.zeros((1, 4), jnp.int32), ~one) == (0, 0)
    certain = jnp.where(jnp.arange(8) == 3, 0.0, -jnp.inf)[None, None].repeat(4, 1)
    assert cross_entropy(certain, jnp.full((1, 4), 3, jnp.int32), one) == (0, 4)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("target", [-100, 33])
def test_masked_places_may_hold_anything(garbage, target):
    logits, targets, mask = case(2, 9, 33)
    dirty = jnp.where(mask[..., None], logits, garbage)
    dirty_targets = jnp.where(mask, targets, target)
    clean = loss_and_grad(logits, targets, mask)
    jax.tree.map(np.testing.assert_array_equal, loss_and_grad(dirty, dirty_targets, mask), clean)
    assert not np.asarray(clean[1])[~np.asarray(mask)].any()


def test_nan_at_an_unmasked_place_is_not_hidden():
    logits, targets, mask = case(1, 5, 33)
    assert np.isnan(cross_entropy(logits.at[0, 2, 5].set(jnp.nan), targets, jnp.ones_like(mask))[0])


D, V = 12, 29


def weights():
    return jnp.asarray(np.random.default_rng(5).standard_normal((D, V)), jnp.float32)


def hidden_case(batch, length):
    hidden = jnp.asarray(np.random.default_rng(6).standard_normal((batch, length, D)), jnp.float32)
    return hidden, *case(batch, length, V)[1:]


@functools.partial(jax.jit, static_argnames=("chunk", "shards"))
def through_head(weight, hidden, targets, mask, chunk, shards=1):
    def value(weight, hidden):
        return chunked_cross_entropy(lambda x: x @ weight[None], hidden, targets, mask, chunk=chunk, shards=shards)

    return jax.value_and_grad(value, argnums=(0, 1), has_aux=True)(weight, hidden)


def head_oracle(weight, hidden, targets, mask, dtype):
    weight, hidden = np.asarray(weight).astype(dtype), np.asarray(hidden).astype(dtype)
    total, gradient = plain(hidden @ weight, targets, mask, dtype)
    return total, np.einsum("btd,btv->dv", hidden, gradient), gradient @ weight.T


@pytest.mark.parametrize(
    "length, chunk, shards", [(19, 1, 1), (19, 5, 1), (19, 19, 1), (19, 1000, 1), (20, 7, 2), (20, 1, 4)]
)
def test_chunked_equals_unchunked(length, chunk, shards):
    args = weights(), *hidden_case(3, length)
    (total, count), gradients = through_head(*args, chunk=chunk, shards=shards)
    truth, reference = (head_oracle(*args, dtype) for dtype in (np.float64, np.float32))
    assert count == np.asarray(args[3]).sum()
    for got, exact, rounded in zip((total, *gradients), truth, reference, strict=True):
        assert_close(got, exact, rounded)


@pytest.mark.parametrize("chunk", [4, 1000])
def test_masked_hidden_states_may_hold_anything(chunk):
    """The head's weight gradient is hidden^T times zero: with a NaN in hidden it would be NaN."""
    weight, hidden, targets, mask = weights(), *hidden_case(2, 11)
    clean = through_head(weight, hidden, targets, mask, chunk=chunk)
    for garbage in (np.nan, np.inf):
        dirty = jnp.where(mask[..., None], hidden, garbage)
        got = through_head(weight, dirty, jnp.where(mask, targets, -100), mask, chunk=chunk)
        jax.tree.map(np.testing.assert_array_equal, got, clean)


def test_sum_and_count_add_up_over_any_split():
    """Over rows, places and chunks, of a ragged mask."""
    weight, hidden, targets, _ = weights(), *hidden_case(4, 12)
    mask = jnp.arange(12)[None] < jnp.array([1, 12, 0, 5])[:, None]
    args = (weight, hidden, targets, mask)
    truth, reference = (head_oracle(*args, dtype)[0] for dtype in (np.float64, np.float32))

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def sums(rows, places):
        part = (x[rows, places] for x in (hidden, targets, mask))
        return chunked_cross_entropy(lambda x: x @ weight[None], *part, chunk=4)

    whole = slice(None)
    for parts in (
        [(whole, whole)],
        [(slice(r, r + 1), whole) for r in range(4)],
        [(slice(0, 1), whole), (slice(1, 4), whole)],
        [(whole, slice(0, 5)), (whole, slice(5, 12))],
    ):
        totals, counts = zip(*(sums(*part) for part in parts), strict=True)
        assert sum(counts) == 18
        assert_close(np.float32(sum(totals)), truth, reference)


def test_chunks_bound_the_memory_of_the_backward_pass():
    def temporary(chunk):
        places = (2, 256)
        operands = ((16, 4096), "float32"), ((*places, 16), "float32"), (places, "int32"), (places, "bool")
        shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in operands]
        memory = through_head.lower(*shapes, chunk=chunk).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    logits = 2 * 256 * 4096 * 4
    assert temporary(256) > logits  # all at once
    assert temporary(16) < logits / 3  # a sixteenth of them at a time, a few copies, and the weights' gradient

"""What is masked contributes nothing, whatever it holds: forward, LSE and gradients, for every way to mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import reference
from pallas_kernels.attention.api import dot_product_attention
from pallas_kernels.attention.cases import Case
from tests.oracle import visible
from tests.pallas_kernels.attention.check import jit, run

IMPLEMENTATIONS = ("xla", "xla_chunked")

# Calls in which some keys and some queries are dead; bias and mask hide key 3 from everyone.
DEAD = {
    "kv_lengths": Case(kv_lengths=(13, 0)),
    "query_lengths": Case(query_lengths=(11, 0), is_causal=True),
    "both_lengths_bottom_right": Case(
        query_lengths=(30, 7), kv_lengths=(20, 48), is_causal=True, causal_alignment="bottom_right"
    ),
    "segments": Case(query_runs=((0, 13), (1, 20), (-1, 15)), is_causal=True),
    "causal_short": Case(T=20, S=48, is_causal=True),
    "window_short": Case(T=20, S=48, window=(3, 2)),
    "window_long": Case(T=48, S=20, window=(3, 2)),
    "mask": Case(mask="b11s"),
    "mask_full": Case(mask="bnts"),
    "bias_hides": Case(bias="b11s", bias_hides=True),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(reference, "chunk_sizes", lambda spec: (min(spec.T, 16), min(spec.S, 24)))


def seen_pairs(arguments):
    """(B, N, T, S) booleans, from the oracle's rule."""
    (B, T, N, _), S = arguments["query"].shape, arguments["key"].shape[1]
    facts = {
        name: arguments.get(name)
        for name in ("is_causal", "query_seq_lengths", "key_value_seq_lengths", "local_window_size",
                     "causal_alignment", "segment_ids")
    }  # fmt: skip
    seen = np.stack([visible(b, T, S, **facts) for b in range(B)])[:, None]
    for name, allowed in (("mask", lambda x: x), ("bias", lambda x: x != -np.inf)):
        if name in arguments:
            seen = seen & allowed(np.asarray(arguments[name]))
    return np.broadcast_to(seen, (B, N, T, S))


@pytest.mark.parametrize(
    "implementation, case", [*(("xla_chunked", case) for case in DEAD), ("xla", "mask_full"), ("xla", "segments")]
)
def test_dead_queries_keys_and_values_change_nothing(implementation, case):
    arguments = DEAD[case].arguments()
    if "mask" in arguments:
        arguments["mask"] = arguments["mask"].at[:, :, :, 3].set(False)
    seen = seen_pairs(arguments)
    dead_rows, dead_cols = ~seen.any(axis=(1, 3)), ~seen.any(axis=(1, 2))
    assert dead_rows.any() or dead_cols.any()
    out, lse, gradients, _ = run(arguments, implementation)
    assert (np.asarray(out)[dead_rows] == 0).all() and (np.asarray(lse)[dead_rows] == -np.inf).all()
    assert (np.asarray(gradients["query"])[dead_rows] == 0).all()
    assert (np.asarray(gradients["key"])[dead_cols] == 0).all()
    assert (np.asarray(gradients["value"])[dead_cols] == 0).all()
    for poison in (np.nan, np.inf):
        poisoned = arguments | {
            "query": jnp.where(dead_rows[:, :, None, None], poison, arguments["query"]),
            "key": jnp.where(dead_cols[:, :, None, None], poison, arguments["key"]),
            "value": jnp.where(dead_cols[:, :, None, None], poison, arguments["value"]),
        }
        poisoned_out, poisoned_lse, poisoned_gradients, _ = run(poisoned, implementation)
        np.testing.assert_array_equal(poisoned_out, out)
        np.testing.assert_array_equal(poisoned_lse, lse)
        for name, gradient in gradients.items():
            np.testing.assert_array_equal(poisoned_gradients[name], gradient, err_msg=name)


@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_bad_key_or_value_reaches_only_the_rows_that_see_it(implementation, batched, which):
    """Causal: NaN at position 20 leaves queries 0 ... 19 and their gradients as they were, also under vmap."""
    arguments = Case(B=1, is_causal=True).arguments()
    operands = [arguments[name] for name in ("query", "key", "value")]
    bad = [
        x.at[:, 20].set(jnp.nan) if name == which else x
        for name, x in zip(("query", "key", "value"), operands, strict=True)
    ]

    def early(*operands):
        out = dot_product_attention(*operands, is_causal=True, implementation=implementation)
        return (out[:, :20] ** 2).sum(), out

    def gradient(*operands):
        one = jax.value_and_grad(early, (0, 1, 2), has_aux=True)
        if not batched:
            return one(*operands)
        return jax.tree.map(lambda x: x[0], jax.vmap(one)(*(x[None] for x in operands)))

    gradient = jit(gradient)
    (_, out), gradients = gradient(*operands)
    (_, bad_out), bad_gradients = gradient(*bad)
    np.testing.assert_array_equal(bad_out[:, :20], out[:, :20])
    assert np.isnan(bad_out[:, 20:]).all()
    np.testing.assert_array_equal(bad_gradients[0][:, :20], gradients[0][:, :20])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_seen_bad_key_makes_its_readers_nan_in_gradients_too(implementation):
    arguments = Case(B=1, T=8, S=8, window=(1, 0)).arguments()
    arguments["value"] = arguments["value"].at[0, 4, 0, 0].set(jnp.inf)
    out, lse, gradients, _ = run(arguments, implementation)
    readers = np.isin(np.arange(8), (4, 5))
    # Query heads 0 and 1 read key/value head 0.
    assert np.isnan(np.asarray(out)[0, readers, :2]).all() and np.isnan(np.asarray(lse)[0, readers, :2]).all()
    assert np.isfinite(np.asarray(out)[0, ~readers]).all() and np.isfinite(np.asarray(out)[0, :, 2:]).all()
    dq, dk = np.asarray(gradients["query"])[0], np.asarray(gradients["key"])[0]
    assert np.isnan(dq[readers, :2]).all() and np.isfinite(dq[~readers]).all() and np.isfinite(dq[:, 2:]).all()
    # Keys 3 ... 5 are read by the two bad rows; the bad key itself was replaced by zeros.
    assert np.isnan(dk[[3, 5], 0]).all() and np.isfinite(dk[[0, 1, 2, 6, 7], 0]).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_zero_cotangents_give_zero_gradients(implementation):
    arguments = Case(bias="1nts", bias_hides=True, kv_lengths=(48, 0)).arguments()
    operands = [arguments.pop(name) for name in ("query", "key", "value", "bias")]

    @jit
    def gradients(*operands):
        def call(*operands):
            return dot_product_attention(*operands, **arguments, implementation=implementation, return_lse=True)

        results, pullback = jax.vjp(call, *operands)
        return pullback(jax.tree.map(jnp.zeros_like, results))

    for gradient in gradients(*operands):
        np.testing.assert_array_equal(gradient, np.zeros_like(gradient))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_masked_rows_trip_neither_debug_nans_nor_x64(implementation):
    arguments = Case(T=20, S=12, is_causal=True, causal_alignment="bottom_right", kv_lengths=(5, 0)).arguments()
    arguments = {name: x for name, x in arguments.items() if x is not None}
    with jax.debug_nans(True), jax.enable_x64(True):
        out, _, gradients, _ = run(arguments, implementation)
    assert np.isfinite(out).all() and all(np.isfinite(gradient).all() for gradient in gradients.values())

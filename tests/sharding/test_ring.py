"""Plans of the ring: every pair of chunks that holds anything is computed once, under a mask that is right for it."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.blocks import overlaps
from pallas_kernels.attention.spec import AttentionSpec
from sharding.ring import Cut, Step, plan, unzigzag, zigzag

WAYS = [1, 2, 3, 4, 8]
BOUNDS = {"none": {}, "causal": {"is_causal": True}, "window": {"window": (9, 2)}, "far": {"window": (30, 0)}}


def tables(count: int, size: int = 4, **bounds):
    """(live, full) of each pair of chunks of `size` positions."""
    length = count * size
    spec = AttentionSpec(B=1, T=length, S=length, N=1, K=1, H=1, H_v=1, dtype="float32", **bounds)
    return tuple(table[0] for table in overlaps(spec, size, size))


def pairs_of(cut: Cut, step: Step, device: int) -> list[tuple[int, int]]:
    """The (query chunk, key chunk) pairs that a device computes in a step."""
    keys = cut.chunks[(device - step.hop) % cut.ways]
    if step.pairs is None:
        return [(q, k) for q in cut.chunks[device] for k in keys]
    found = [(cut.chunks[device][q], keys[k]) for q, k in step.pairs[device]]
    assert np.array_equal(found, step.chunks[device])
    return found


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("in_zigzag", [False, True])
@pytest.mark.parametrize("ways", WAYS)
def test_every_live_pair_is_computed_once_and_by_its_owner(ways, in_zigzag, bounds):
    cut = Cut(axes=("x",), ways=ways, zigzag=in_zigzag)
    live, full = tables(cut.chunks.size, **BOUNDS[bounds])
    steps = plan(cut, live, full, level=bounds in ("none", "causal") or not in_zigzag)
    computed = np.zeros(live.shape, int)
    for step in steps:
        for device in range(ways):
            for pair in pairs_of(cut, step, device):
                computed[pair] += 1
                assert step.mask != "none" or full[pair]
                assert step.mask != "level" or step.hop == 0
    assert computed.max() == 1 and (computed[live] == 1).all()
    assert [step.hop for step in steps] == sorted({step.hop for step in steps})


@pytest.mark.parametrize("ways", [2, 4, 8])
def test_causal_zigzag_is_balanced_and_nothing_hidden_is_computed(ways):
    cut = Cut(axes=("x",), ways=ways, zigzag=True)
    own, *others = plan(cut, *tables(2 * ways, is_causal=True), level=True)
    assert (own.hop, own.mask, own.pairs) == (0, "level", None)
    assert [step.hop for step in others] == list(range(1, ways))
    for step in others:  # two pairs a device that are seen whole, of four
        assert step.mask == "none" and step.pairs.shape == (ways, 2, 2)


def test_a_window_ends_the_ring():
    """Keys that no device sees are not sent for: in order, a window of less than a chunk reaches one device back."""
    live, full = tables(8, window=(3, 0))
    assert [step.hop for step in plan(Cut(axes=("x",), ways=8), live, full, level=True)] == [0, 1]
    steps = plan(Cut(axes=("x",), ways=4, zigzag=True), live, full, level=False)
    assert [step.hop for step in steps] == [0, 1, 3]


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("array", [np.arange, jnp.arange])
def test_zigzag_and_back(array, ways):
    x = array(6 * 2 * ways * 3).reshape(2, 3, 6 * ways)
    for axis in (-1, 2):
        assert np.array_equal(unzigzag(zigzag(x, ways, axis), ways, axis), x)
    places = np.asarray(zigzag(array(4 * ways), ways, axis=0)).reshape(ways, 2, 2)
    chunk = np.arange(ways)
    assert np.array_equal(places[:, 0, 0], 2 * chunk) and np.array_equal(places[:, 1, 0], 2 * (2 * ways - 1 - chunk))


def test_one_device_has_one_order():
    assert np.array_equal(zigzag(np.arange(7), 1, axis=0), np.arange(7))

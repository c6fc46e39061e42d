"""Schedules as tables: every piece of work is done once, after what it needs and before that is written over."""

import pytest

from sharding.schedule import make_schedule

CASES = [
    (name, stages, microbatches, chunks)
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3))
    for stages in (1, 2, 3, 8)
    for microbatches in (1, 2, 5, 9)
]


def table(schedule, slot):
    """{(microbatch, chunk of all S v): (tick, stage, entry)} of one direction, by asking every stage in every tick."""
    work = {}
    for tick in range(schedule.ticks):
        for stage in range(schedule.stages):
            asked = slot(tick, stage)
            assert 0 <= asked.microbatch < schedule.microbatches and 0 <= asked.chunk < schedule.chunks
            if asked.valid:
                key = (asked.microbatch, asked.chunk * schedule.stages + stage)
                assert key not in work, "done twice"
                work[key] = (tick, stage, asked.entry)
    return work


@pytest.mark.parametrize(("name", "stages", "microbatches", "chunks"), CASES)
def test_every_piece_of_work_follows_what_it_needs(name, stages, microbatches, chunks):
    s = make_schedule(name, stages=stages, microbatches=microbatches, chunks=chunks)
    forward, backward = table(s, s.forward_slot), table(s, s.backward_slot)
    last = stages * chunks - 1
    everything = {(m, c) for m in range(microbatches) for c in range(last + 1)}
    assert forward.keys() == everything and backward.keys() == everything
    for m, c in everything:
        tick, stage, entry = forward[m, c]
        back_tick, back_stage, back_entry = backward[m, c]
        assert stage == back_stage == c % stages and entry == back_entry and 0 <= entry < s.stash
        assert tick < s.forward_ticks and s.delay <= back_tick < s.ticks
        assert tick <= back_tick  # the forward half of a tick comes first
        if c > 0:  # what a stage sends is there in the next tick, and only then
            assert forward[m, c - 1][0] == tick - 1
            assert backward[m, c - 1][0] == back_tick + 1
    # The input of a chunk stays where it was put. Every stage writes one in every forward tick, work or not.
    for (m, c), (tick, stage, entry) in forward.items():
        until = min(backward[m, c][0] + 1, s.forward_ticks)
        assert all(s.forward_slot(t, stage).entry != entry for t in range(tick + 1, until))


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize(("stages", "groups"), [(2, 4), (3, 1), (8, 2)])
def test_bubble_is_that_of_the_literature(stages, groups, chunks):
    microbatches = stages * groups
    s = make_schedule("interleaved" if chunks > 1 else "1f1b", stages=stages, microbatches=microbatches, chunks=chunks)
    want = (stages - 1) / (chunks * microbatches + stages - 1)
    assert s.bubble(3 * stages * chunks) == pytest.approx(want)
    assert s.bubble(3 * stages * chunks - 1) > want  # a layer that does nothing is idle time


def test_under_way_are_few():
    few, many = (make_schedule("1f1b", stages=4, microbatches=m) for m in (32, 128))
    assert few.stash == many.stash == 7
    assert make_schedule("interleaved", stages=4, microbatches=128, chunks=2).stash == 15
    assert make_schedule("gpipe", stages=4, microbatches=128).stash >= 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "1f1"}, "unknown name='1f1'. Did you mean '1f1b'"),
        ({"stages": 0}, "stages=0 - must be at least 1"),
        ({"microbatches": 0}, "microbatches=0"),
        ({"chunks": 2}, "name='1f1b' with chunks=2"),
        ({"name": "interleaved"}, "name='interleaved' with chunks=1"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(**({"name": "1f1b", "stages": 2, "microbatches": 4} | changes))

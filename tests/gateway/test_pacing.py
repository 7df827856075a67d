from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pdrelay.gateway.base import Tier, TokenBatch
from pdrelay.gateway.pacing import Pacer


def batch(index: int, count: int = 1) -> TokenBatch:
    return TokenBatch(index, list(range(index, index + count)), Tier.RELAY)


def shown_at(pacer: Pacer, until: float) -> list[float]:
    """Times at which tokens are shown up to `until`, by a caller that wakes exactly when they are due."""
    times = []
    while pacer.due is not None and pacer.due <= until:
        now = pacer.due
        times += [now] * len(pacer.take(now).ids)
    return times


def test_tokens_go_through_as_they_come_unless_told_otherwise():
    pacer = Pacer()
    pacer.put(batch(0, 5))
    assert pacer.take(0.0).ids == [0, 1, 2, 3, 4]
    assert (pacer.take(0.0), pacer.due, pacer.held) == (None, None, 0)


def test_the_reserve_grows_while_tokens_come_faster_than_they_are_shown():
    pacer, times = Pacer(), []
    for index in range(30):
        now = float(index)
        times += shown_at(pacer, now)
        if index == 1:
            pacer.hold_back(3, 1.25)
        pacer.put(batch(index))
        if pacer.due <= now:
            pacer.take(now)
            times.append(now)
    assert pacer.held == 3
    gaps = [b - a for a, b in pairwise(times)]
    assert max(gaps) <= 1.25
    assert all(gap == 1.0 for gap in gaps[-10:]), "the reserve is full: tokens are shown as they are made"


def with_a_reserve():
    """Three of 20 tokens, made one a second, are held back."""
    pacer = Pacer()
    pacer.hold_back(3, 1.25)
    for index in range(20):
        pacer.put(batch(index))
        pacer.take(float(index))
    return pacer


def test_what_is_held_fills_the_pause_and_the_stream_catches_up():
    pacer = with_a_reserve()
    held = pacer.held
    assert held == 3
    pacer.spread(4.0, 0.5)
    times = shown_at(pacer, 23.0)
    assert times == [20.0, 21.0, 22.0]
    pacer.put(batch(20))
    assert pacer.take(23.0).ids == [20]


def test_what_is_held_is_shown_no_faster_than_it_was_made():
    """A switch that takes longer than expected then finds some of it left."""
    pacer = with_a_reserve()
    pacer.spread(0.4, 1.0)
    assert shown_at(pacer, 23.0) == [20.0, 21.0, 22.0]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(1, 4)),
            st.tuples(st.just("hold"), st.integers(0, 5)),
            st.tuples(st.sampled_from(["spread", "catch_up", "release", "take"]), st.integers(0, 3)),
        )
    )
)
def test_nothing_is_lost_doubled_or_reordered_and_all_comes_out(steps):
    pacer, now, put, shown = Pacer(), 0.0, 0, []
    for step, value in steps:
        now += 0.5
        if step == "put":
            pacer.put(batch(put, value))
            put += value
        elif step == "hold":
            pacer.hold_back(value, float(value))
        elif step == "spread":
            pacer.spread(float(value), now % 2)
        elif step == "catch_up":
            pacer.catch_up(float(value))
        elif step == "release":
            pacer.release()
        elif (taken := pacer.take(now)) is not None:
            shown += taken.ids
    pacer.release()
    while (taken := pacer.take(now)) is not None:
        shown += taken.ids
    assert shown == list(range(put))

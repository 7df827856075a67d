"""Cache parity by the hour."""

from __future__ import annotations

import pytest

from pdrelay.gateway.parity import HOUR_SECONDS, CacheParity


def test_hours_are_weighed_by_tokens_and_follow_each_other() -> None:
    now = 10.5 * HOUR_SECONDS
    parity = CacheParity(lambda: now)
    assert (parity.running(), parity.last()) == (0.0, 0.0)
    parity.observe(300, 1.0, 0.5)
    parity.observe(100, 0.0, 0.0)
    assert parity.running() == pytest.approx(150 / 400)
    now += HOUR_SECONDS
    assert (parity.running(), parity.last()) == (0.0, pytest.approx(150 / 400))
    parity.observe(50, 0.2, 1.0)
    assert parity.running() == pytest.approx(-0.8)
    now += 2 * HOUR_SECONDS
    assert (parity.running(), parity.last()) == (0.0, 0.0), "the hour between had no requests"

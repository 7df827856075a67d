"""How long k decode steps take, and how many fit into a time: the batch is the same, every context grows by one a step.

A step of b sequences with c tokens in all their contexts takes f + s b + x c. The k-th one after that has c + b k
tokens, so k steps take k (f + s b + x c) + x b k (k - 1) / 2: no step needs to be simulated by itself.
"""

from __future__ import annotations

from math import sqrt


def steps_seconds(first: float, growth: float, count: int) -> float:
    """Time of `count` steps of which the first takes `first` and each next one `growth` more."""
    return count * first + growth * count * (count - 1) / 2


def steps_within(first: float, growth: float, seconds: float) -> int:
    """Steps that have ended after `seconds`."""
    if growth > 0:
        linear = first - growth / 2
        count = int((-linear + sqrt(linear * linear + 2 * growth * seconds)) / growth)
    else:
        count = int(seconds / first)
    # A few units in the last place must not make a step that has just ended look unfinished.
    slack = seconds + 1e-9 + 1e-12 * seconds
    while steps_seconds(first, growth, count + 1) <= slack:
        count += 1
    while count and steps_seconds(first, growth, count) > slack:
        count -= 1
    return count

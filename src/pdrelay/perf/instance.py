"""Instance profiles: how long one model replica takes for a piece of work, what it holds and what it costs.

A profile comes from a measured file (`perf/profile.py`), from published tables, from a roofline (`perf/roofline.py`) or
from aiconfigurator (`perf/aiconfigurator.py`); the simulator and the planner see only this.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from math import exp, log
from typing import TypeVar

import msgspec

from pdrelay.cluster.units import parse_size
from pdrelay.errors import ConfigError
from pdrelay.perf.equations import extend_seconds, prefill_seconds
from pdrelay.perf.profile import DecodeCost, ForwardCost, Profile


class PrefillTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured prefill seconds by uncached length, log-log interpolated; the outer slopes go on beyond the ends.

    A cached prefix adds `per_pair` seconds for each pair of an uncached token and a cached one.
    """

    tokens: tuple[float, ...]  # rising
    seconds: tuple[float, ...]
    per_pair: float = 0.0

    def __post_init__(self) -> None:
        if len(self.tokens) < 2 or len(self.tokens) != len(self.seconds):
            raise ConfigError("prefill table: found unequal or short lists, expected two points at least")
        if min(self.tokens) <= 0 or min(self.seconds) <= 0 or list(self.tokens) != sorted(set(self.tokens)):
            raise ConfigError(f"prefill table: found {list(self.tokens)}, expected rising lengths and times above 0")

    def seconds_for(self, uncached: float) -> float:
        """Seconds of a prompt of `uncached` tokens without a cached prefix; 0 for none."""
        if uncached <= 0:
            return 0.0
        right = min(max(bisect_right(self.tokens, uncached), 1), len(self.tokens) - 1)
        (x0, x1), (y0, y1) = self.tokens[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        slope = log(y1 / y0) / log(x1 / x0)
        return y0 * exp(slope * log(uncached / x0))


@dataclass(frozen=True, slots=True)
class InstanceProfile:
    """One model replica. Times are in seconds, sizes in bytes."""

    name: str
    prefill: ForwardCost | PrefillTable
    decode: DecodeCost
    extend: ForwardCost
    kv_per_token: float
    kv_fixed: float  # of each request, whatever its length
    kv_capacity: float
    max_num_seqs: int
    prefill_chunk: int  # tokens
    price: float = 0.0  # for an hour
    page_tokens: int = 1  # KV travels in pages of so many tokens, a prompt's last one whole
    notes: tuple[str, ...] = ()  # origin of each number that is not measured

    def prefill_seconds(self, uncached: float, cached: float = 0) -> float:
        """Time to prefill `uncached` tokens behind `cached` ones; 0 for no token."""
        if isinstance(self.prefill, ForwardCost):
            return prefill_seconds(self.prefill, uncached, cached)
        return self.prefill.seconds_for(uncached) + self.prefill.per_pair * uncached * cached

    def extend_seconds(self, tokens: int, context: int) -> float:
        """Time of one Extend-Decode forward over `tokens` known tokens behind `context` computed ones."""
        return extend_seconds(self.extend, tokens, context)

    def decode_step_seconds(self, batch: int, context: float) -> float:
        """Time of a step of `batch` sequences with `context` tokens in all their contexts together."""
        cost = self.decode
        return cost.fixed + cost.per_sequence * batch + cost.per_context_token * context if batch else 0.0

    def kv_bytes(self, tokens: float) -> float:
        """KV of one request of `tokens` tokens; 0 for none."""
        return self.kv_fixed + self.kv_per_token * tokens if tokens > 0 else 0.0

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the KV memory holds, when one request had it alone."""
        return int(max(0.0, self.kv_capacity - self.kv_fixed) / self.kv_per_token)

    def scaled(self, name: str, prefill: float = 1.0, decode: float = 1.0) -> InstanceProfile:
        """The same model on a chip with `prefill` and `decode` times the rates (PDD, Table 1)."""
        forward, step = 1 / prefill, 1 / decode
        prefill_cost: ForwardCost | PrefillTable
        if isinstance(self.prefill, ForwardCost):
            prefill_cost = _times(self.prefill, forward)
        else:
            seconds = tuple(value * forward for value in self.prefill.seconds)
            prefill_cost = PrefillTable(
                tokens=self.prefill.tokens, seconds=seconds, per_pair=self.prefill.per_pair * forward
            )
        return replace(
            self, name=name, prefill=prefill_cost, decode=_times(self.decode, step), extend=_times(self.extend, step)
        )


def from_profile(profile: Profile, price: float = 0.0) -> InstanceProfile:
    """The instance that a measured profile file describes."""
    kv = profile.kv
    return InstanceProfile(
        name=profile.description,
        prefill=profile.prefill,
        decode=profile.decode,
        extend=profile.extend,
        kv_per_token=kv.bytes_per_token,
        kv_fixed=0.0,
        kv_capacity=parse_size(kv.capacity),
        max_num_seqs=profile.limits.max_num_seqs,
        prefill_chunk=profile.limits.prefill_chunk,
        price=price,
        page_tokens=kv.page_tokens,
    )


Cost = TypeVar("Cost", ForwardCost, DecodeCost)


def _times(cost: Cost, factor: float) -> Cost:
    values = {name: getattr(cost, name) * factor for name in cost.__struct_fields__}
    return type(cost)(**values)

"""Writes what was measured as a profile file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from pdrelay.bench.profiling import Measured
from pdrelay.errors import ConfigError
from pdrelay.perf.fit import Sample, fit_decode, fit_forward
from pdrelay.perf.profile import DecodeCost, ForwardCost

VOCABULARY = "first = 1000\nlast = 40000\neos = 2\n"
"""Emulated engines need one; it has nothing to do with times."""


class Fitted(NamedTuple):
    """Costs, and the largest relative error of each over the samples that it was fitted to."""

    prefill: ForwardCost
    extend: ForwardCost
    decode: DecodeCost
    errors: dict[str, float]


def fit(measured: Measured) -> Fitted:
    """Fits all costs. Raises ConfigError."""
    prefill, prefill_error = fit_forward(measured.prefill)
    extend, extend_error = fit_forward(measured.extend)
    decode, decode_error = fit_decode(measured.decode)
    errors = {"prefill": prefill_error, "extend": extend_error, "decode": decode_error}
    return Fitted(prefill, extend, decode, errors)


def text(measured: Measured, fitted: Fitted, capacity: str, prefill_chunk: int) -> str:
    """The file. Raises ConfigError for a model with several KV groups, which a profile file has no form for."""
    contract = measured.hello.contract
    if len(contract.groups) != 1 or contract.groups[0].kind != "full_attention":
        raise ConfigError("profile: found a model whose KV is not that of heads in all layers, expected one that is")
    group = contract.groups[0]
    lines = [
        f'description = "{contract.model}, measured on {measured.hello.instance}"',
        "", "[kv]", f"layers = {group.layers}", f"heads = {group.heads}", f"head_size = {group.head_size}",
        f'dtype = "{group.dtype}"', f"page_tokens = {contract.page_tokens}", f'capacity = "{capacity}"',
    ]  # fmt: skip
    for name, samples in (("prefill", measured.prefill), ("decode", measured.decode), ("extend", measured.extend)):
        cost: msgspec.Struct = getattr(fitted, name)
        lines += ["", f"[{name}] # {_evidence(samples, fitted.errors[name])}"]
        lines += [f"{field} = {getattr(cost, field)!r}" for field in cost.__struct_fields__]
    lines += ["", "[limits]", f"max_num_seqs = {measured.hello.max_num_seqs}", f"prefill_chunk = {prefill_chunk}"]
    return "\n".join([*lines, "", "[vocabulary]", VOCABULARY])


def _evidence(samples: Sequence[Sample], error: float) -> str:
    spread = sorted(sample.spread for sample in samples)[len(samples) // 2]
    return f"{len(samples)} points of {len(samples[0].seconds)} runs, spread {spread:.1%}, fitted within {error:.1%}"

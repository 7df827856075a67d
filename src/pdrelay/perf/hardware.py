"""Chips, and numbers that say where they come from."""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["published", "derived", "assumed", "calibrated", "measured"]


class Number(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value with its origin.

    published: printed in the source. derived: computed from what the source prints. assumed: the source says nothing.
    calibrated: fitted to rows of a table that are then no predictions. measured: by `pdrelay profile`.
    """

    value: float
    kind: Kind
    source: str


class Chip(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accelerator.

    Peak rates are dense. A chip that is only known relative to another one (PDD, Table 1) names it in `relative_to`;
    its prefill and decode rates are then those of the other chip times `prefill` and `decode`.
    """

    name: str
    price: Number  # of one chip for one hour, with an H100 at 1
    flops_bf16: Number | None = None  # FLOP/s
    flops_fp8: Number | None = None
    bandwidth: Number | None = None  # bytes/s of device memory
    memory: Number | None = None  # bytes
    relative_to: str = ""
    prefill: Number | None = None  # share of the other chip's rate
    decode: Number | None = None

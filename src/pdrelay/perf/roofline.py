"""Instance profiles from peak rates alone, for hardware that nobody has measured.

Prefill is compute bound: 2 FLOP for each active parameter and token, and for attention 4 * heads * head size FLOP for
each (token, attended token) pair and full layer. A decode step is memory bound: it reads all weights, since the batches
of a serving engine touch every expert, and the KV of every context. Both reach a share of the peak (MFU, MBU), which is
the only thing assumed.
"""

from __future__ import annotations

from typing import NamedTuple

from pdrelay.errors import ConfigError
from pdrelay.perf.hardware import Chip, Number
from pdrelay.perf.instance import InstanceProfile
from pdrelay.perf.model import ModelKv
from pdrelay.perf.profile import DecodeCost, ForwardCost


class Weights(NamedTuple):
    """What a forward computes and reads."""

    total: float  # parameters
    active: float  # parameters that one token uses
    bytes_per_parameter: float
    pair_flops: float  # FLOP for each pair of a token and one that it attends to, over all full layers


class Efficiency(NamedTuple):
    """Shares of the peak that are reached, and what a step costs beside compute and memory."""

    mfu: float = 0.4
    mbu: float = 0.6
    step_overhead: float = 2e-3  # seconds: launches, sampling, communication
    kv_memory: float = 0.9  # share of the memory that weights and KV may use


def roofline(
    name: str,
    kv: ModelKv,
    weights: Weights,
    chip: Chip,
    chips: int,
    efficiency: Efficiency | None = None,
    *,
    max_num_seqs: int = 256,
    prefill_chunk: int = 8192,
) -> InstanceProfile:
    """A replica on `chips` chips. Raises ConfigError when the weights do not fit, or the chip's rates are unknown."""
    reached = efficiency or Efficiency()
    flops = _known(chip, "flops_fp8" if weights.bytes_per_parameter <= 1 else "flops_bf16") * chips * reached.mfu
    bandwidth = _known(chip, "bandwidth") * chips * reached.mbu
    memory = _known(chip, "memory") * chips * reached.kv_memory
    size = weights.total * weights.bytes_per_parameter
    if size >= memory:
        raise ConfigError(
            f"{name}: {size / 1e9:.0f} GB of weights do not fit into {memory / 1e9:.0f} GB of {chips} {chip.name}; "
            "use more chips or a smaller dtype"
        )
    read = size / bandwidth
    compute = 2 * weights.active / flops
    forward = ForwardCost(fixed=reached.step_overhead + read, per_token=compute, per_pair=weights.pair_flops / flops)
    return InstanceProfile(
        name=name,
        prefill=forward,
        decode=DecodeCost(
            fixed=reached.step_overhead + read,
            per_sequence=compute + kv.fixed / bandwidth,
            per_context_token=kv.per_token / bandwidth,
        ),
        extend=forward,
        kv_per_token=kv.per_token,
        kv_fixed=kv.fixed,
        kv_capacity=memory - size,
        max_num_seqs=max_num_seqs,
        prefill_chunk=prefill_chunk,
        price=chip.price.value * chips,
        notes=(f"roofline of {chips} {chip.name}, MFU {reached.mfu}, MBU {reached.mbu} (assumed)",),
    )


def _known(chip: Chip, field: str) -> float:
    number = getattr(chip, field)
    if not isinstance(number, Number):
        raise ConfigError(
            f"chip {chip.name}: {field}: found nothing, expected a rate (it is known relative to "
            f"{chip.relative_to or 'no other chip'} only; scale that chip's profile instead)"
        )
    return number.value

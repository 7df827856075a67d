"""What the engines that have been reached say together of the model that they serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pdrelay.engine.messages import Hello
from pdrelay.kv.contract import KVContract
from pdrelay.kv.demand import most_prompt_tokens


class Fleet(NamedTuple):
    """Facts that every request is checked against."""

    contract: KVContract  # the same of all, or they would not exchange pages
    max_model_len: int  # tokens of prompt and output together, the least of all
    max_prompt_tokens: int  # longest prompt whose pages fit into every depot's arena
    kv_bytes_per_token: float


def fleet_of(hellos: Sequence[Hello], smallest_arena: int) -> Fleet:
    """Of at least one engine."""
    contract = hellos[0].contract
    return Fleet(
        contract,
        min(hello.max_model_len for hello in hellos),
        min(most_prompt_tokens(smallest_arena, hello.contract) for hello in hellos),
        contract.bytes_per_token,
    )

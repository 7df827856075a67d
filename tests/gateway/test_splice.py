from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay.engine.logprobs import Row, pack
from pdrelay.errors import EngineError
from pdrelay.gateway.base import Tier
from pdrelay.gateway.splice import Splice

TRUTH = list(range(1000, 1050))


@given(st.lists(st.tuples(st.integers(0, 49), st.integers(1, 10), st.sampled_from(Tier)), max_size=60))
def test_each_index_is_emitted_once_and_in_order(deliveries):
    """Engines that agree may deliver any overlapping runs; the user sees every token once."""
    splice, seen, made, makers = Splice(), [], Counter(), []
    for index, count, tier in deliveries:
        if index > len(splice.tokens):
            with pytest.raises(EngineError, match="is next"):
                splice.accept(index, TRUTH[index : index + count], tier, f"{tier.value}-0")
            continue
        batch = splice.accept(index, TRUTH[index : index + count], tier, f"{tier.value}-0")
        if batch:
            assert batch.index == len(seen)
            made[tier] += len(batch.ids)
            makers += [f"{tier.value}-0"] * len(batch.ids)
            seen += batch.ids
    assert seen == TRUTH[: len(seen)] == splice.tokens
    assert sum(map(splice.made_by, Tier)) == len(seen) == sum(made.values())
    assert all(splice.made_by(tier) == made[tier] for tier in Tier)
    assert [splice.maker_of(index) for index in range(len(seen))] == makers


def test_a_limit_cuts_what_lies_beyond():
    splice = Splice()
    assert splice.accept(0, [1, 2, 3], Tier.RELAY, "rld-0", limit=2).ids == [1, 2]
    assert splice.accept(2, [9], Tier.RELAY, "rld-0", limit=2) is None
    assert splice.accept(2, [4], Tier.MAIN, "md-0").ids == [4]
    assert splice.tokens == [1, 2, 4]


def test_log_probabilities_are_cut_with_their_tokens():
    def rows(*tokens):
        return pack(Row([token], [-token], 1) for token in tokens)

    splice = Splice()
    splice.accept(0, [1, 2], Tier.PREFILL, "p-0", logprobs=rows(1, 2))
    batch = splice.accept(1, [2, 3, 4, 5], Tier.RELAY, "rld-0", limit=4, logprobs=rows(2, 3, 4, 5))
    assert [row.ids[0] for row in batch.logprobs.rows()] == batch.ids == [3, 4]
    assert [(part.index, part.logprobs.rows()[0].ids[0]) for part in batch.split()] == [(2, 3), (3, 4)]

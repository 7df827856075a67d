from hypothesis import given
from hypothesis import strategies as st

from pdrelay.kv.contract import KVContract, KVGroup
from pdrelay.kv.demand import demand, most_prompt_tokens, published_tokens, usable_prefix
from pdrelay.kv.names import Scope, in_group, prompt_pages, root

KEY = b"k" * 32


def group(kind, window=0, size=64):
    return KVGroup(kind=kind, window=window, layers=1, heads=1, head_size=1, dtype="int8", part_bytes=size, codec="c")


FULL, WINDOW, STATE = group("full_attention"), group("sliding_window", 20), group("linear_state")


def pages_of(length, page=16):
    return prompt_pages(list(range(length)), page, root(Scope("m"), KEY), KEY)


def test_a_window_needs_only_the_pages_it_reaches_into():
    pages = pages_of(40)  # pages 0-15, 16-31 and a tail; token 40 sees tokens 21 to 39
    needed = demand(pages, (FULL, WINDOW))
    (a, b), tail = pages.full, pages.tail
    assert needed.names == (a, b, in_group(b, 1), tail, in_group(tail, 1))
    assert needed.tails == 2


def test_a_window_reaches_one_token_further_for_the_last_token_is_computed_again():
    a = pages_of(35).full[0]  # token 34 sees tokens 15 to 34
    assert in_group(a, 1) in demand(pages_of(35), (FULL, WINDOW)).names
    assert in_group(a, 1) not in demand(pages_of(36), (FULL, WINDOW)).names


def test_a_state_is_one_page_at_the_exact_length():
    pages = pages_of(32)
    needed = demand(pages, (FULL, STATE))
    assert needed.names == (*pages.full, in_group(pages.full[-1], 1))
    assert needed.tails == 0, "a state at a page's edge can serve other prompts"
    assert published_tokens(33, (FULL, STATE)) == 32
    assert published_tokens(33, (FULL, WINDOW)) == 33


def test_a_prefix_needs_its_window_and_its_state():
    pages = pages_of(64)
    have = set(pages.full)
    assert usable_prefix(pages, (FULL, WINDOW), have.__contains__) == 0
    have |= {in_group(pages.full[0], 1), in_group(pages.full[1], 1)}
    assert usable_prefix(pages, (FULL, WINDOW), have.__contains__) == 32
    assert usable_prefix(pages, (FULL, STATE), have.__contains__) == 32
    have.remove(in_group(pages.full[0], 1))
    assert usable_prefix(pages, (FULL, WINDOW), have.__contains__) == 0, "token 32 sees tokens 13 to 31"
    assert usable_prefix(pages, (FULL, STATE), have.__contains__) == 32


GROUPS = st.lists(
    st.one_of(st.just(FULL), st.just(STATE), st.builds(group, st.just("sliding_window"), st.integers(1, 200))),
    min_size=1,
    max_size=4,
)


@given(GROUPS, st.integers(1, 200), st.sampled_from([16, 32, 48]))
def test_what_is_demanded_is_enough_and_nothing_of_it_can_be_left_out(groups, length, page):
    pages = pages_of(length, page)
    needed = demand(pages, groups)
    assert len(set(needed.names)) == len(needed.names)
    assert usable_prefix(pages, groups, set(needed.names).__contains__) == length
    for missing in needed.names:
        rest = set(needed.names) - {missing}
        assert usable_prefix(pages, groups, rest.__contains__) < length


@given(GROUPS, st.integers(1, 100_000))
def test_the_longest_prompt_fits(groups, capacity):
    contract = KVContract(model="m", revision="", page_tokens=16, block_tokens=16, groups=tuple(groups))
    length = min(most_prompt_tokens(capacity, contract), 500)
    if length:
        names = demand(pages_of(length), groups).names
        assert sum(contract.layout_of(name).page_bytes for name in names) <= capacity

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay.kv.names import UNIT_TOKENS, Item, Scope, extend_pages, prompt_pages, root

KEY = b"k" * 32
ROOT = root(Scope("model"), KEY)
token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=200)
page_sizes = st.sampled_from([UNIT_TOKENS, 2 * UNIT_TOKENS, 3 * UNIT_TOKENS])


@given(token_ids, page_sizes)
def test_pages_cover_the_prompt(tokens, page):
    pages = prompt_pages(tokens, page, ROOT, KEY)
    assert len(pages.full) == len(tokens) // page
    assert (pages.tail is None) == (len(tokens) % page == 0)
    assert pages.tokens_in(len(pages.names)) == len(tokens)


@given(token_ids, token_ids, page_sizes)
def test_equal_names_mean_equal_prefixes(a, b, page):
    left, right = prompt_pages(a, page, ROOT, KEY), prompt_pages(b, page, ROOT, KEY)
    for index, (x, y) in enumerate(zip(left.full, right.full, strict=False)):
        assert (x == y) == (a[: (index + 1) * page] == b[: (index + 1) * page])


@given(token_ids, st.integers(0, 200), page_sizes)
def test_extending_equals_naming_at_once(tokens, cut, page):
    known = prompt_pages(tokens[:cut], page, ROOT, KEY).full
    assert [*known, *extend_pages(known, tokens, page, ROOT, KEY)] == list(prompt_pages(tokens, page, ROOT, KEY).full)


@given(token_ids.filter(bool))
def test_unlike_page_sizes_share_names_where_pages_end_together(tokens):
    small, large = prompt_pages(tokens, UNIT_TOKENS, ROOT, KEY), prompt_pages(tokens, 2 * UNIT_TOKENS, ROOT, KEY)
    assert list(large.full) == list(small.full[1::2])


items = st.lists(st.builds(Item, st.integers(0, 199), st.sampled_from(["cat", "dog"])), max_size=4).map(sorted)


@given(token_ids, items, items, page_sizes)
def test_an_item_changes_the_page_that_it_starts_in_and_all_later_ones(tokens, a, b, page):
    left, right = (prompt_pages(tokens, page, ROOT, KEY, found) for found in (a, b))
    for index, (x, y) in enumerate(zip(left.full, right.full, strict=True)):
        end = (index + 1) * page
        assert (x == y) == ([i for i in a if i.position < end] == [i for i in b if i.position < end])
    if left.tail is not None:
        inside = [[i for i in found if i.position < len(tokens)] for found in (a, b)]
        assert (left.tail == right.tail) == (inside[0] == inside[1])


@given(token_ids, items, st.integers(0, 200), page_sizes)
def test_extending_and_unlike_pages_name_items_alike(tokens, found, cut, page):
    known = prompt_pages(tokens[:cut], page, ROOT, KEY, [item for item in found if item.position < cut]).full
    whole = prompt_pages(tokens, page, ROOT, KEY, found).full
    assert [*known, *extend_pages(known, tokens, page, ROOT, KEY, items=found)] == list(whole)
    small = prompt_pages(tokens, UNIT_TOKENS, ROOT, KEY, found).full
    assert list(whole) == list(small[page // UNIT_TOKENS - 1 :: page // UNIT_TOKENS][: len(whole)])


def test_a_tail_is_never_taken_for_a_page():
    tokens = list(range(UNIT_TOKENS))
    tail = prompt_pages(tokens, 2 * UNIT_TOKENS, ROOT, KEY).tail
    assert tail not in prompt_pages(tokens, UNIT_TOKENS, ROOT, KEY).full


@pytest.mark.parametrize(
    "other",
    [
        Scope("other"),
        Scope("model", revision="r"),
        Scope("model", lora="l"),
        Scope("model", cache_salt="s"),
        Scope("mode", revision="l"),
    ],
)
def test_every_part_of_the_scope_changes_the_root(other):
    assert root(other, KEY) != ROOT


def test_without_the_key_nobody_can_name_a_page():
    assert root(Scope("model"), b"other") != ROOT
    assert prompt_pages([1] * 16, 16, ROOT, b"other").full != prompt_pages([1] * 16, 16, ROOT, KEY).full


def test_a_page_must_be_whole_units():
    with pytest.raises(ValueError, match="not a multiple of the unit"):
        prompt_pages([1], UNIT_TOKENS + 1, ROOT, KEY)

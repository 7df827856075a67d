from hypothesis import given
from hypothesis import strategies as st

from pdrelay.gateway.stop import StopMatcher

LETTERS = st.text("ab\n", max_size=12)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=4)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The definition: the stop string that is complete first, then the first in the list."""
    found = [(text.find(stop) + len(stop), order, stop) for order, stop in enumerate(stops) if stop in text]
    if not found:
        return None
    end, _, stop = min(found)
    return end, stop


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS, include=st.booleans())
def test_pieces_join_to_the_text_up_to_the_first_stop_string(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    matcher, shown = StopMatcher(stops, include=include), ""
    for piece in pieces:
        shown += matcher.push(piece)
        if matcher.matched is not None:
            break
    else:
        shown += matcher.flush()
    text, expected = "".join(pieces), first_stop("".join(pieces), stops)
    if expected is None:
        assert (shown, matcher.matched) == (text, None)
    else:
        end, stop = expected
        assert matcher.matched == stop
        assert shown == text[: end if include else end - len(stop)]


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS)
def test_no_more_is_held_back_than_may_begin_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    matcher, shown, text = StopMatcher(stops), "", ""
    for piece in pieces:
        shown += matcher.push(piece)
        text += piece
        if matcher.matched is not None:
            return
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_match_inside_the_unarmed_part_does_not_count() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("an END ", armed=False) == "an END "
    assert matcher.push("and E", armed=True) == "and "
    assert matcher.push("ND", armed=True) == ""
    assert matcher.matched == "END"


def test_a_match_that_begins_unarmed_and_ends_armed_counts() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("xEN", armed=False) == "x"
    assert matcher.push("D!", armed=True) == ""
    assert matcher.matched == "END"

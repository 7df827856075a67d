import pytest

from pdrelay.gateway.base import Finish
from pdrelay.gateway.detokenise import Detokeniser
from pdrelay.gateway.output import Ending, Output
from pdrelay.gateway.text import Text

EOS = 2


def encode(text: Text, words: str) -> list[int]:
    return text.encode(words, add_special_tokens=False)


def output(text: Text, **options: object) -> Output:
    return Output(Detokeniser(text.backend, []), **options)  # type: ignore[arg-type]  # the test's own options


def run(out: Output, ids: list[int], finish: Finish, size: int = 1) -> tuple[str, Ending]:
    shown = ""
    for at in range(0, len(ids), size):
        shown += out.push(ids[at : at + size])
        if out.stopped:
            return shown, out.ending(None)
    return shown + out.finish(finish), out.ending(finish)


def test_the_stop_token_is_counted_but_not_shown(text: Text) -> None:
    stop = encode(text, "!")
    out = output(text, stop_ids=frozenset(stop))
    assert run(out, [*encode(text, "Hello"), *stop], Finish("stop", stop[0])) == ("Hello", Ending("stop", stop[0]))
    assert out.tokens == len(encode(text, "Hello")) + 1


def test_a_stop_token_that_did_not_stop_is_shown(text: Text) -> None:
    """As in vLLM, where min_tokens keeps them from stopping, or the length limit came first."""
    stop = encode(text, "!")
    out = output(text, stop_ids=frozenset(stop))
    ids = [*stop, *encode(text, "Hello"), *stop]
    assert run(out, ids, Finish("length", None)) == ("!Hello!", Ending("length", None))


def test_the_stop_token_is_shown_when_asked_for(text: Text) -> None:
    stop = encode(text, "!")
    out = output(text, stop_ids=frozenset(stop), include_stop=True)
    assert run(out, [*encode(text, "Hello"), *stop], Finish("stop", stop[0]))[0] == "Hello!"


@pytest.mark.parametrize("size", [1, 3, 50])
@pytest.mark.parametrize(("include", "shown"), [(False, "the quick "), (True, "the quick brown fox")])
def test_a_stop_string_across_tokens(text: Text, size: int, include: bool, shown: str) -> None:
    ids = encode(text, "the quick brown fox jumps")
    out = output(text, stop=["brown fox"], include_stop=include)
    assert run(out, ids, Finish("length", None), size) == (shown, Ending("stop", "brown fox"))
    assert out.tokens == next(n for n in range(len(ids)) if "brown fox" in text.backend.decode(ids[:n]))


def test_a_stop_string_within_min_tokens_does_not_count(text: Text) -> None:
    ids = encode(text, "fox and fox")
    first = next(n for n in range(len(ids)) if "fox" in text.backend.decode(ids[:n]))
    out = output(text, stop=["fox"], min_tokens=first)
    assert run(out, ids, Finish("length", None)) == ("fox and ", Ending("stop", "fox"))


def test_text_that_only_began_a_stop_string_comes_at_the_end(text: Text) -> None:
    out = output(text, stop=["foxes"], stop_ids=frozenset({EOS}))
    assert run(out, [*encode(text, "the fox"), EOS], Finish("stop", None)) == ("the fox", Ending("stop", None))


def test_a_stop_string_wins_over_tokens_of_the_same_batch(text: Text) -> None:
    ids = [*encode(text, "the fox jumps"), EOS]
    out = output(text, stop=["fox"], stop_ids=frozenset({EOS}))
    assert out.push(ids) == "the "
    assert out.stopped
    assert out.tokens < len(ids)

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from pdrelay.gateway.detokenise import MAX_PENDING, Detokeniser
from pdrelay.gateway.text import Text

IDS = st.lists(st.integers(0, 319), max_size=40)


def write(detokeniser: Detokeniser, ids: list[int], sizes: list[int]) -> str:
    """Feeds `ids` in groups of `sizes`, then one by one."""
    shown, at = "", 0
    while at < len(ids):
        size = sizes.pop() if sizes else 1
        shown += detokeniser.push(ids[at : at + size])
        at += size
    return shown + detokeniser.flush()


@settings(max_examples=200)
@given(ids=IDS, prompt=IDS, sizes=st.lists(st.integers(1, 5), max_size=10), skip=st.booleans())
def test_pieces_of_any_tokens_join_to_the_whole(
    text: Text, ids: list[int], prompt: list[int], sizes: list[int], skip: bool
) -> None:
    written = write(Detokeniser(text.backend, prompt, skip_special_tokens=skip), ids, sizes)
    assert written == text.backend.decode(ids, skip_special_tokens=skip)


@given(words=st.text(max_size=60))
def test_pieces_of_any_text_join_to_the_text(text: Text, words: str) -> None:
    ids = text.encode(words, add_special_tokens=False)
    assert write(Detokeniser(text.backend, []), ids, []) == words


def test_a_character_is_shown_when_its_last_byte_came(text: Text) -> None:
    ids = text.encode("🦊", add_special_tokens=False)
    assert len(ids) > 1
    detokeniser = Detokeniser(text.backend, [])
    assert [detokeniser.push([token]) for token in ids] == [""] * (len(ids) - 1) + ["🦊"]


def test_an_endless_run_of_broken_bytes_is_given_out(text: Text) -> None:
    broken = text.backend.token_to_id("Ģ")  # byte 0x80, which begins no character
    detokeniser = Detokeniser(text.backend, [])
    assert detokeniser.push([broken] * MAX_PENDING) == "\ufffd" * MAX_PENDING


@pytest.fixture
def byte_fallback() -> Tokenizer:
    """A tokenizer in the manner of SentencePiece: words with a leading mark, bytes for the rest."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁the": 256, "▁fox": 257, "ox": 258}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def test_the_space_before_the_first_word_is_kept_behind_a_prompt(byte_fallback: Tokenizer) -> None:
    assert write(Detokeniser(byte_fallback, [256]), [257, 256], []) == " fox the"
    assert write(Detokeniser(byte_fallback, []), [257, 256], []) == "fox the"


def test_byte_fallback_goes_on_behind_broken_bytes(byte_fallback: Tokenizer) -> None:
    euro = list("€".encode())
    written = write(Detokeniser(byte_fallback, [256]), [*euro, 0xE2, 257], [])
    assert written.startswith("€")
    assert written.endswith("fox")

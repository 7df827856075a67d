"""What is handed back of a tokenizer, beside the tokenizer itself, and readers that fail."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from pdrelay.errors import ConfigError
from pdrelay.gateway import tokenizer_data
from pdrelay.gateway.defaults import Defaults
from pdrelay.gateway.read_tokenizer import INSISTS, data_of
from pdrelay.gateway.text import Text
from pdrelay.gateway.tokenizer_data import TokenizerData, read_tokenizer

WORDS = ["[UNK]", "<s>", "</s>", *".?!,'", "n't", "'m", "'s", "'ve", "'re", "we", "do", "##ing", "n"]


def word_piece(**options: object) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordPiece({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 1), ("</s>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", **options)


def byte_pairs(**options: object) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE({"a": 0, "▁": 1, "▁.": 2, ".": 3, "ab": 4, "b": 5}, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace("▁")])
    backend.decoder = decoders.Replace("▁", " ")
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


TOKENIZERS = [
    word_piece(),
    word_piece(clean_up_tokenization_spaces=True),
    word_piece(split_special_tokens=True),
    byte_pairs(clean_up_tokenization_spaces=True),
    byte_pairs(clean_up_tokenization_spaces=True, **{INSISTS: True}),
]


@settings(max_examples=100, deadline=None)
@given(
    number=st.integers(0, len(TOKENIZERS) - 1), ids=st.lists(st.integers(0, 18)), words=st.lists(st.sampled_from(WORDS))
)
def test_text_is_decoded_and_encoded_as_by_transformers(number: int, ids: list[int], words: list[str]) -> None:
    theirs = TOKENIZERS[number]
    ours = Text(data_of(theirs), Defaults(), 19)
    assert ours.decode(ids) == theirs.decode(ids)
    for special in (True, False):
        encoded = theirs(" ".join(words), add_special_tokens=special)["input_ids"]
        assert ours.encode(" ".join(words), add_special_tokens=special) == encoded


def test_what_else_is_handed_back() -> None:
    named = {"default": "plain", "tool_use": "with tools"}
    data = data_of(word_piece(chat_template=named, extra_special_tokens=["<x>"]))
    assert (data.chat_template, data.eos, data.leading_space) == ("plain", 2, None)
    assert data.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert data_of(byte_pairs(chat_template={"tool_use": "with tools"})).chat_template is None
    assert (data_of(byte_pairs()).leading_space, data_of(byte_pairs()).max_token_chars) == ("▁", 2)


@pytest.mark.parametrize(
    ("program", "complaint"),
    [
        (
            "echo warning >&2; echo out of memory >&2; echo >&2; kill -9 $$",
            "exit code -9; it printed last: out of memory",
        ),
        ("echo deep in thought >&2; exec tail -f /dev/null", "took over 2 s; it printed last: deep in thought"),
        ("exit 3", "exit code 3; it printed last: nothing"),
    ],
)
def test_a_reader_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, complaint: str) -> None:
    monkeypatch.setattr(tokenizer_data, "READER", ("sh", "-c", program))
    monkeypatch.setattr(tokenizer_data, "READ_SECONDS", 2.0)
    with pytest.raises(ConfigError) as error:
        read_tokenizer(tmp_path)
    assert str(error.value).startswith(f"{tmp_path}: ")
    assert complaint in str(error.value)


def test_processes_that_share_a_directory_read_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokenizer: TokenizerData
) -> None:
    (tmp_path / "answer").write_bytes(msgspec.msgpack.encode(tokenizer))
    program = f"cd {tmp_path}; echo >> runs; cat answer"
    monkeypatch.setattr(tokenizer_data, "READER", ("sh", "-c", program))
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(read_tokenizer, tmp_path, tmp_path) for _ in range(4)]
    assert [each.result() for each in found] == [tokenizer] * 4
    assert (tmp_path / "runs").read_text() == "\n"

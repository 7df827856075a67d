"""Fixtures of the front end: a small model directory, its Text, an application over a fake Generator."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fake_generator import FakeGenerator
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pdrelay.gateway.app import build_app
from pdrelay.gateway.text import Text, load_text
from pdrelay.gateway.tokenizer_data import TokenizerData, read_tokenizer

CORPUS = ["the quick brown fox jumps over the lazy dog", "Hello world, hello there!", "naïve café — 你好 😀 👩‍🚀"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ '' + message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with a byte-level tokenizer, a ChatML template and no weights."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(name, special=True) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", bos_token="<|im_start|>")
    fast.chat_template = TEMPLATE
    directory = tmp_path_factory.mktemp("model")
    fast.save_pretrained(directory)
    (directory / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": tokenizer.get_vocab_size()})
    )
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], "temperature": 0.6}))
    return directory


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> TokenizerData:
    return read_tokenizer(model_dir)


@pytest.fixture(scope="session")
def text(model_dir: Path, tokenizer: TokenizerData) -> Text:
    return load_text(model_dir, tokenizer=tokenizer)


@pytest.fixture
def generator() -> FakeGenerator:
    return FakeGenerator()


@pytest.fixture
async def client(generator: FakeGenerator, text: Text) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(generator, text, "tiny")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
        yield http


@pytest.fixture
async def debug_client(generator: FakeGenerator, text: Text) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(generator, text, "tiny", debug=True)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
        yield http

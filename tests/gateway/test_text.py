import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer

from pdrelay.errors import ConfigError, RequestError
from pdrelay.gateway.protocol import ChatRequest, Message, TextPart
from pdrelay.gateway.text import Text, load_text
from pdrelay.gateway.tokenizer_data import TokenizerData

LOAD = """
import sys
from pathlib import Path
from pdrelay.gateway.text import load_text
print(load_text(Path(sys.argv[1])).encode("hi", add_special_tokens=True))
assert not {"torch", "transformers", "numpy"} & sys.modules.keys()
"""


def test_loads_quietly_and_keeps_no_large_library(model_dir: Path, text: Text) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(model_dir)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == (f"{text.encode('hi', add_special_tokens=True)}\n", "")


def test_the_tokenizer_file_cannot_make_prompts_shorter(text: Text, tokenizer: TokenizerData) -> None:
    cutting = Tokenizer.from_buffer(tokenizer.backend)
    cutting.enable_truncation(3)
    data = msgspec.structs.replace(tokenizer, backend=cutting.to_str().encode())
    cut = Text(data, text.defaults, text.vocab_size)
    assert len(cut.encode("x y z " * 10, add_special_tokens=True)) > 10


@pytest.fixture
def with_template(text: Text, tokenizer: TokenizerData):
    def make(template: str | None) -> Text:
        return Text(msgspec.structs.replace(tokenizer, chat_template=template), text.defaults, text.vocab_size)

    return make


def ask(*parts: str) -> ChatRequest:
    return ChatRequest(messages=[Message(role="user", content=[TextPart(part) for part in parts])])


def test_a_template_that_walks_through_parts_gets_parts(with_template) -> None:
    template = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
    assert with_template(template).render(ask("a", "b")) == "[a][b]"


def test_a_template_that_prints_content_gets_text(with_template) -> None:
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    assert with_template(template).render(ask("a", "b")) == "[a\nb]"


def test_template_variables_of_the_request(with_template) -> None:
    request = ChatRequest(messages=[Message(role="user", content="x")], chat_template_kwargs={"think": False})
    assert with_template("{{ think }}").render(request) == "False"


@pytest.mark.parametrize("template", ["{{ raise_exception('no system here') }}", "{{ 'a' + 1 }}"])
def test_a_template_that_refuses(with_template, template: str) -> None:
    with pytest.raises(RequestError, match="chat template refuses these messages"):
        with_template(template).render(ask("a"))


def test_a_model_without_a_template(with_template) -> None:
    with pytest.raises(RequestError, match="use /v1/completions"):
        with_template(None).render(ask("a"))


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no usable tokenizer"):
        load_text(tmp_path)


def test_a_broken_generation_config(model_dir: Path, tokenizer: TokenizerData, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(ConfigError, match=r"generation_config\.json: .*temperature"):
        load_text(tmp_path, tokenizer=tokenizer)


def test_a_template_from_a_file(model_dir: Path, tokenizer: TokenizerData, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ eos_token }}{{ messages[0].content }}")
    assert load_text(model_dir, str(tmp_path / "own.jinja"), tokenizer).render(ask("a")) == "<|im_end|>a"
    with pytest.raises(ConfigError, match=r"none\.jinja: cannot be read: No such file"):
        load_text(model_dir, str(tmp_path / "none.jinja"), tokenizer)

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pdrelay.errors import ConfigError, RequestError
from pdrelay.gateway.protocol import ChatRequest, Message, TextPart
from pdrelay.gateway.text import Text, load_text

WITHOUT_TORCH = """
import sys
from pathlib import Path
from pdrelay.gateway.text import load_text
print(load_text(Path(sys.argv[1])).encode("hi", add_special_tokens=True))
assert "torch" not in sys.modules
"""
NOT_INSTALLED = WITHOUT_TORCH.replace("import sys", 'import sys; sys.modules["torch"] = None', 1).rpartition("assert")[
    0
]


@pytest.mark.parametrize("program", [WITHOUT_TORCH, NOT_INSTALLED])
def test_loads_quietly_and_without_torch(model_dir: Path, text: Text, program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program, str(model_dir)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == (f"{text.encode('hi', add_special_tokens=True)}\n", "")


def test_the_tokenizer_file_cannot_make_prompts_shorter(model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    cutting = load_text(tmp_path).backend
    cutting.enable_truncation(3)
    cutting.save(str(tmp_path / "tokenizer.json"))
    assert len(load_text(tmp_path).encode("x y z " * 10, add_special_tokens=True)) > 10


def with_template(text: Text, template: str | None) -> Text:
    tokenizer = text._tokenizer.__class__(tokenizer_object=text.backend, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return Text(tokenizer, text.defaults, text.vocab_size)


def ask(*parts: str) -> ChatRequest:
    return ChatRequest(messages=[Message(role="user", content=[TextPart(part) for part in parts])])


def test_a_template_that_walks_through_parts_gets_parts(text: Text) -> None:
    template = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
    assert with_template(text, template).render(ask("a", "b")) == "[a][b]"


def test_a_template_that_prints_content_gets_text(text: Text) -> None:
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    assert with_template(text, template).render(ask("a", "b")) == "[a\nb]"


def test_template_variables_of_the_request(text: Text) -> None:
    request = ChatRequest(messages=[Message(role="user", content="x")], chat_template_kwargs={"think": False})
    assert with_template(text, "{{ think }}").render(request) == "False"


@pytest.mark.parametrize("template", ["{{ raise_exception('no system here') }}", "{{ 'a' + 1 }}"])
def test_a_template_that_refuses(text: Text, template: str) -> None:
    with pytest.raises(RequestError, match="chat template refuses these messages"):
        with_template(text, template).render(ask("a"))


def test_a_model_without_a_template(text: Text) -> None:
    with pytest.raises(RequestError, match="use /v1/completions"):
        with_template(text, None).render(ask("a"))


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no usable tokenizer"):
        load_text(tmp_path)


def test_a_broken_generation_config(model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(ConfigError, match=r"generation_config\.json: .*temperature"):
        load_text(tmp_path)

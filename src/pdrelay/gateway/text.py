"""The model's tokenizer and chat template, through transformers without torch."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import msgspec
from tokenizers import Tokenizer, decoders

from pdrelay.errors import ConfigError, RequestError
from pdrelay.gateway.defaults import Defaults, load_defaults, load_vocab_size
from pdrelay.gateway.protocol import ChatRequest, Message

REPLACEMENT = "\ufffd"
"""Stands for bytes that are no whole character."""

PIECES = 1 << 16
"""Spelled tokens that are remembered."""

RESERVED = frozenset({"conversation", "messages", "chat_template", "tools", "documents", "add_generation_prompt",
                      "continue_final_message", "tokenize", "return_dict", "return_tensors", "padding", "truncation",
                      "max_length", "tokenizer_kwargs", "return_assistant_tokens_mask"})  # fmt: skip


class WholeToken(NamedTuple):
    """A token of whole characters, which reads the same whatever stands before it."""

    text: str
    quoted: bytes  # as JSON


class Text:
    """All that the front end knows of the model: text to token ids, the chat template, sampling defaults."""

    def __init__(self, tokenizer: Any, defaults: Defaults, vocab_size: int) -> None:
        """`tokenizer` is a fast tokenizer of transformers."""
        self._tokenizer, self.defaults, self.vocab_size = tokenizer, defaults, vocab_size
        self.backend: Tokenizer = tokenizer.backend_tokenizer
        # Settings stored in tokenizer.json would cut or pad prompts.
        self.backend.no_truncation()
        self.backend.no_padding()
        template = tokenizer.chat_template
        self._template = template if isinstance(template, str) else None
        self._takes_parts = self._template is not None and self._renders_parts()
        self._space = _leading_space(self.backend)
        self.piece = functools.lru_cache(PIECES)(self._piece)
        self._special = frozenset(self.backend.get_added_tokens_decoder())
        # Byte-level decoders only join bytes: a token of whole characters has one text wherever it stands.
        byte_level = isinstance(self.backend.decoder, decoders.ByteLevel)
        self.whole: Callable[[int], WholeToken | None] = (
            functools.lru_cache(None)(self._whole) if byte_level else lambda _: None
        )
        self.max_token_chars = max(map(len, self.backend.get_vocab()), default=1)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. Safe in any thread: unlike transformers' call it does not change the tokenizer."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`, special tokens included."""
        text: str = self._tokenizer.decode(ids)
        return text

    def _whole(self, token: int) -> WholeToken | None:
        """What a token of whole characters reads; None for all others and for added ones."""
        if token in self._special:
            return None
        text: str = self.backend.decode([token], skip_special_tokens=False)
        return WholeToken(text, msgspec.json.encode(text)) if text and REPLACEMENT not in text else None

    def _piece(self, token: int) -> str:
        """The text of one token by itself."""
        text, marker = self.decode([token]), self._space
        if marker is None:
            return text
        # Such a tokenizer drops the space before the first word of what it decodes.
        raw = self.backend.id_to_token(token) or ""
        spaces = len(raw) - len(raw.lstrip(marker))
        return " " * (spaces - (len(text) - len(text.lstrip(" ")))) + text

    def render(self, request: ChatRequest) -> str:
        """The prompt that the chat template makes of a conversation. Raises RequestError when it refuses."""
        if self._template is None:
            raise RequestError("This model has no chat template: use /v1/completions.", code="no_chat_template")
        if clash := sorted(RESERVED & request.chat_template_kwargs.keys()):
            raise RequestError(f"chat_template_kwargs must not contain {clash[0]!r}.", param="chat_template_kwargs")
        try:
            return self._apply(
                [self._turn(message) for message in request.messages],
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                **request.chat_template_kwargs,
            )
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
            raise RequestError(
                f"The model's chat template refuses these messages: {error}", param="messages"
            ) from error

    def _apply(self, conversation: list[dict[str, object]], **options: object) -> str:
        rendered = self._tokenizer.apply_chat_template(conversation, tokenize=False, **options)
        assert isinstance(rendered, str)
        return rendered

    def _turn(self, message: Message) -> dict[str, object]:
        texts = [part.text for part in message.content or []] if isinstance(message.content, list) else [message.text]
        parts = [{"type": "text", "text": text} for text in texts]
        turn: dict[str, object] = {
            "role": self._role(message.role),
            "content": parts if self._takes_parts else message.text,
        }
        return turn if message.name is None else {**turn, "name": message.name}

    def _role(self, role: str) -> str:
        """Templates that do not know the newer name of the system role would invent a role of that name."""
        assert self._template is not None
        return "system" if role == "developer" and "developer" not in self._template else role

    def _renders_parts(self) -> bool:
        """Whether the template walks through lists of content parts, rather than taking only strings."""
        probe = "pdrelay-probe"
        try:
            rendered = self._apply([{"role": "user", "content": [{"type": "text", "text": probe}]}])
        except Exception:  # whatever a template does with what it does not expect
            return False
        return probe in rendered and "'type'" not in rendered and '"type"' not in rendered


def _leading_space(backend: Tokenizer) -> str | None:
    """The character that stands for a space in the vocabulary of tokenizers of the SentencePiece kind."""
    steps = json.loads(backend.to_str()).get("pre_tokenizer") or {}
    for step in steps.get("pretokenizers", [steps]):
        if step.get("type") == "Metaspace":
            return str(step.get("replacement", "\u2581"))
    return None


def load_text(directory: Path, chat_template: str = "") -> Text:
    """Loads tokenizer, chat template and defaults of the model in `directory`. Raises ConfigError.

    `chat_template` is a file to take the template from instead.

    Takes seconds and blocks. Not for a process that also runs models with transformers (see `_without_torch`).
    """
    with _without_torch():
        from transformers import AutoTokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{directory}: no usable tokenizer: {str(error).splitlines()[0]}") from error
    if chat_template:
        try:
            tokenizer.chat_template = Path(chat_template).read_text()
        except OSError as error:
            raise ConfigError(f"{chat_template}: cannot be read: {error.strerror}") from error
    if not tokenizer.is_fast:
        raise ConfigError(f"{directory}: found a tokenizer without tokenizer.json, expected a fast tokenizer")
    return Text(tokenizer, load_defaults(directory, tokenizer.eos_token_id), load_vocab_size(directory))


@contextmanager
def _without_torch() -> Iterator[None]:
    """Hides torch while transformers is first imported, and its advice to install torch.

    Where torch is installed it would be loaded for nothing: seconds of start-up and hundreds of megabytes. The process
    that loads its tokenizer here runs no models; one that imported transformers before is left as it is.
    """
    if "transformers" in sys.modules or sys.modules.get("torch") is not None:
        yield
        return
    advice = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(advice)
    os.environ[advice] = "1"
    sys.modules["torch"] = None  # type: ignore[assignment]  # import's documented way to say: not there
    try:
        yield
    finally:
        sys.modules.pop("torch", None)
        if before is None:
            del os.environ[advice]
        else:
            os.environ[advice] = before

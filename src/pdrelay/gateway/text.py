"""The model's tokenizer and chat template."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import jinja2
import msgspec
from tokenizers import Tokenizer, decoders

from pdrelay.errors import ConfigError, RequestError
from pdrelay.gateway.chat_template import ChatTemplate, Turn
from pdrelay.gateway.defaults import Defaults, load_defaults, load_vocab_size
from pdrelay.gateway.protocol import ChatRequest, Message
from pdrelay.gateway.tokenizer_data import TokenizerData, read_tokenizer

REPLACEMENT = "\ufffd"
"""Stands for bytes that are no whole character."""

PIECES = 1 << 16
"""Spelled tokens that are remembered."""

CLEAN_UP = {" .": ".", " ?": "?", " !": "!", " ,": ",", " ' ": "'", " n't": "n't", " 'm": "'m", " 's": "'s",
            " 've": "'ve", " 're": "'re"}  # fmt: skip
"""What tokenizers that split off punctuation put where, in this order, as in transformers."""

RESERVED = frozenset({"conversation", "conversations", "messages", "chat_template", "tools", "documents",
                      "add_generation_prompt", "continue_final_message", "tokenize", "return_dict", "return_tensors",
                      "padding", "truncation", "max_length", "tokenizer_kwargs",
                      "return_assistant_tokens_mask"})  # fmt: skip


class Text:
    """All that the front end knows of the model: text to token ids, the chat template, sampling defaults."""

    def __init__(self, tokenizer: TokenizerData, defaults: Defaults, vocab_size: int) -> None:
        self.defaults, self.vocab_size, self.max_token_chars = defaults, vocab_size, tokenizer.max_token_chars
        self.backend: Tokenizer = Tokenizer.from_buffer(tokenizer.backend)
        self.backend.encode_special_tokens = tokenizer.encode_special_tokens
        # Settings stored in tokenizer.json would cut or pad prompts.
        self.backend.no_truncation()
        self.backend.no_padding()
        source = tokenizer.chat_template
        self._template = None if source is None else ChatTemplate(source, tokenizer.special_tokens)
        self._takes_parts = self._template is not None and _renders_parts(self._template)
        self._space, self._cleans_up = tokenizer.leading_space, tokenizer.cleans_up
        self.piece = functools.lru_cache(PIECES)(self._piece)
        self._special = frozenset(self.backend.get_added_tokens_decoder())
        # Byte-level decoders only join bytes: a token of whole characters has one text wherever it stands.
        byte_level = isinstance(self.backend.decoder, decoders.ByteLevel)
        self.whole: Callable[[int], bytes | None] = (
            functools.lru_cache(None)(self._whole) if byte_level else lambda _: None
        )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. Safe in any thread: unlike transformers' call it does not change the tokenizer."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`, special tokens included."""
        text: str = self.backend.decode(ids, skip_special_tokens=False)
        for found, clean in CLEAN_UP.items() if self._cleans_up else ():
            text = text.replace(found, clean)
        return text

    def _whole(self, token: int) -> bytes | None:
        """What a token of whole characters reads, as JSON; None for all others and for added ones."""
        if token in self._special:
            return None
        text: str = self.backend.decode([token], skip_special_tokens=False)
        return msgspec.json.encode(text) if text and REPLACEMENT not in text else None

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
            return self._template.render(
                [self._turn(message) for message in request.messages],
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                **request.chat_template_kwargs,
            )
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
            raise RequestError(
                f"The model's chat template refuses these messages: {error}", param="messages"
            ) from error

    def _turn(self, message: Message) -> Turn:
        texts = [part.text for part in message.content or []] if isinstance(message.content, list) else [message.text]
        parts = [{"type": "text", "text": text} for text in texts]
        turn: Turn = {
            "role": self._role(message.role),
            "content": parts if self._takes_parts else message.text,
        }
        return turn if message.name is None else {**turn, "name": message.name}

    def _role(self, role: str) -> str:
        """Templates that do not know the newer name of the system role would invent a role of that name."""
        assert self._template is not None
        return "system" if role == "developer" and "developer" not in self._template.source else role


def _renders_parts(template: ChatTemplate) -> bool:
    """Whether `template` walks through lists of content parts, rather than taking only strings."""
    probe = "pdrelay-probe"
    try:
        rendered = template.render([{"role": "user", "content": [{"type": "text", "text": probe}]}])
    except Exception:  # whatever a template does with what it does not expect
        return False
    return probe in rendered and "'type'" not in rendered and '"type"' not in rendered


def load_text(directory: Path, chat_template: str = "", tokenizer: TokenizerData | None = None) -> Text:
    """Loads tokenizer, chat template and defaults of the model in `directory`. Raises ConfigError.

    `chat_template` is a file to take the template from instead, `tokenizer` what was read of the directory already.
    """
    if tokenizer is None:
        tokenizer = read_tokenizer(directory)
    if chat_template:
        try:
            tokenizer = msgspec.structs.replace(tokenizer, chat_template=Path(chat_template).read_text())
        except OSError as error:
            raise ConfigError(f"{chat_template}: cannot be read: {error.strerror}") from error
    return Text(tokenizer, load_defaults(directory, tokenizer.eos), load_vocab_size(directory))

"""Chat templates beside transformers, which is the oracle."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from pdrelay.gateway.chat_template import MARK, ChatTemplate

CHATML = """{% if messages[0].role != 'system' %}{{ bos_token + 'system\nBe brief.' + eos_token }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

ALTERNATE = """{{ bos_token }}
{% set rest = messages[1:] if messages[0]['role'] == 'system' else messages %}
{% for message in rest %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate, not ' ~ message['role']) }}
    {% endif %}
    [{{ message['role'] | upper }}] {{ message['content'] | trim }} {{ eos_token }}
{% endfor %}"""

TOOLS = """{%- if tools is not none %}{{ tools | tojson }}{% endif %}
{%- if documents %}{{ documents }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<result>{{ message.content | tojson(indent=2, sort_keys=true) }}</result>
{%- elif message.tool_calls %}
{%- for call in message.tool_calls %}<call>{{ call.function | tojson(True, separators=(',', ':')) }}</call>{% endfor %}
{%- else %}{{ message | tojson }}
{%- endif %}
{%- endfor %}"""

LOOPS = """{% set seen = namespace(count=0) %}
{% for message in messages -%}
  {% if message.role == 'system' %}{% continue %}{% endif %}
  {% if seen.count >= 2 %}{% break %}{% endif %}
  {% set seen.count = seen.count + 1 %}
  {{ loop.index }}: {{ message.content }}
{% else %}nobody{% endfor %}{{ seen.count }}"""

GENERATION = """{% set who = 'nobody' %}{% for message in messages %}
{% generation %}
{% set who = message.role %}<{{ who }}>{{ message.content }}
{%- endgeneration %}
{{ who }};{% endfor %}"""

PARTS = """{% for message in messages %}{{ message.role }}:
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content if part.type == 'text' %}{{ part.text | trim }}|{% endfor %}
{%- endif %}{{ eos_token }}{% endfor %}"""

REASONING = """{% macro block(name, text) %}<{{ name }}>{{ text }}</{{ name }}>{% endmacro %}
{% for m in messages %}
{% if m.reasoning_content is defined %}{{ block('think', m.reasoning_content) }}{% endif %}
{{ m.content.split('</think>')[-1].strip() }}{{ eos_token }}{% if not loop.last %}, {% endif %}
{% endfor %}"""

SHORT = {
    "drops": "{{ messages[0].content }}",
    "changes": "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
    "fixed field": "{% for m in messages %}{{ m.values() | list | last }}{% endfor %}",
    "variables": "{{ think }}{{ eos_token }}{{ add_generation_prompt }}{{ unheard_of }}{{ tools }}{{ documents }}",
    "not JSON": "{{ unheard_of | tojson }}",
    "missing": "{{ messages[0].unheard_of.deeper }}",
    "wrong type": "{{ messages[0].role + 1 }}",
    "missing key": "{{ {}.pop('x') }}",
    "sandbox": "{{ ''.__class__.__mro__ }}",
    "immutable": "{{ messages.append(1) }}",
    "syntax": "{% for %}",
    "own tag": "{% nothing %}",
    "markup": "{{ messages[0].content | e }}{{ '<b>' }}{{ {'a': '<é>'} | tojson }}",
    "spaces": "  {% if true %}\n  x\n  {% endif %}\n\n{{ messages[0].content }}\n\n",
}
TEMPLATES = {
    "ChatML": CHATML, "alternate": ALTERNATE, "tools": TOOLS, "loops": LOOPS, "generation": GENERATION, "parts": PARTS,
    "reasoning": REASONING, **SHORT,
}  # fmt: skip

USER, SYSTEM = {"role": "user", "content": "Hi  <there> & 'you'\n"}, {"role": "system", "content": "é"}
ASSISTANT = {"role": "assistant", "content": " Well, so \n"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "f", "arguments": {"b": "ü", "a": 1}}}],
}
RESULT = {"role": "tool", "content": {"b": [1, 2.5, None], "a": "<ü>"}}
THOUGHT = {"role": "assistant", "content": "a</think>b", "reasoning_content": "because "}
SPLIT = {"role": "assistant", "content": [
    {"type": "text", "text": "one "}, {"type": "text", "text": "two "}, {"type": "image"},
]}  # fmt: skip
CONVERSATIONS = {
    "none": [], "user": [USER], "system": [SYSTEM, USER], "long": [SYSTEM, USER, ASSISTANT, USER, {**ASSISTANT}],
    "tools": [USER, CALL, RESULT], "thought": [USER, THOUGHT], "parts": [USER, SPLIT],
    "two systems": [SYSTEM, {**SYSTEM}], "blank": [{"role": "user", "content": " "}],
    "no text": [USER, {"role": "assistant", "content": [{"type": "image"}]}],
    "without content": [USER, {"role": "assistant"}], "nothing": [USER, {"role": "assistant", "content": None}],
}  # fmt: skip
OPTIONS = [
    {}, {"add_generation_prompt": True}, {"continue_final_message": True},
    {"continue_final_message": "reasoning_content"}, {"continue_final_message": "role"},
    {"continue_final_message": True, "add_generation_prompt": True},
    {"think": False, "eos_token": "<own>"},
]  # fmt: skip


@pytest.fixture(scope="module")
def oracle(model_dir: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(model_dir)


def outcome(render: Callable[[], str]) -> tuple[type[Exception] | None, str]:
    """The text; or what kind of refusal, and its words where they are not for each side to choose."""
    try:
        return None, render()
    except Exception as error:
        words = str(error).replace("CONTINUE_FINAL_MESSAGE_TAG ", MARK)
        return type(error), "" if isinstance(error, ValueError) else words


def agree(oracle: PreTrainedTokenizerFast, source: str, conversation: list[dict], **options: object) -> None:
    ours, before = ChatTemplate(source, oracle.special_tokens_map), deepcopy(conversation)
    expected = outcome(
        lambda: oracle.apply_chat_template(conversation, chat_template=source, tokenize=False, **options)
    )
    assert outcome(lambda: ours.render(conversation, **options)) == expected
    assert conversation == before


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_renders_as_transformers_does(oracle: PreTrainedTokenizerFast, template: str, conversation: str) -> None:
    for options in OPTIONS:
        agree(oracle, TEMPLATES[template], CONVERSATIONS[conversation], **options)


TEXTS = st.text(max_size=12) | st.sampled_from(["{{ x }}", "<|im_end|>", " \n", "a</think> b"])
PIECES = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), max_size=3)
TURNS = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": TEXTS | PIECES},
    optional={"reasoning_content": TEXTS, "name": TEXTS},
)


@settings(max_examples=200, deadline=None)
@given(
    source=st.sampled_from(sorted(TEMPLATES.values())),
    conversation=st.lists(TURNS, min_size=1, max_size=4),
    options=st.sampled_from(OPTIONS),
)
def test_any_messages_render_as_with_transformers(
    oracle: PreTrainedTokenizerFast, source: str, conversation: list[dict], options: dict[str, object]
) -> None:
    agree(oracle, source, conversation, **options)


def test_the_time_is_the_machines(oracle: PreTrainedTokenizerFast) -> None:
    agree(oracle, "{{ strftime_now('%Y-%m-%d %Z') }}", [USER])


@pytest.mark.parametrize(
    ("source", "conversation", "field", "complaint"),
    [
        ("{{ messages[0].content }}", [USER, ASSISTANT], True, "changes or drops the last message's 'content'"),
        ("{{ messages }}", [USER], "reasoning_content", "the last message has no 'reasoning_content'"),
        ("{{ messages }}", [THOUGHT], "reasoning_content", "the chat template does not know 'reasoning_content'"),
        (PARTS, CONVERSATIONS["no text"], True, "no part of the last message's 'content' is text"),
    ],
)
def test_why_a_message_cannot_be_continued(
    source: str, conversation: list[dict], field: bool | str, complaint: str
) -> None:
    with pytest.raises(ValueError, match=f"continue_final_message: .*{complaint}"):
        ChatTemplate(source, {}).render(conversation, continue_final_message=field)

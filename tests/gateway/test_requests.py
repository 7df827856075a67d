"""What reaches the Generator."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_generator import FakeGenerator

from pdrelay.engine.messages import Sampling
from pdrelay.gateway.base import DebugControls, GenerationRequest
from pdrelay.gateway.defaults import Defaults, load_defaults
from pdrelay.gateway.text import Text
from pdrelay.policy.base import Pipeline

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


async def request_of(client: httpx.AsyncClient, generator: FakeGenerator, path: str, **body: Any) -> GenerationRequest:
    generator.play([10], [2])
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return generator.requests[-1]


async def test_every_parameter_reaches_the_engines(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    request = await request_of(
        client, generator, COMPLETION, model="tiny", prompt="hi", max_tokens=9, min_tokens=1, temperature=0.5,
        top_p=0.9, top_k=7, min_p=0.1, seed=4, presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.2,
        logit_bias={"5": 3}, stop_token_ids=[9, 9], cache_salt="salt",
    )  # fmt: skip
    assert request.cache_salt == "salt"
    assert request.sampling == Sampling(
        max_tokens=9, min_tokens=1, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=4, presence_penalty=1,
        frequency_penalty=-1, repetition_penalty=1.2, logit_bias={5: 3}, stop_token_ids=[9, 0],
    )  # fmt: skip


async def test_defaults_come_from_the_model(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    chat = await request_of(client, generator, CHAT, messages=[{"role": "user", "content": "hi"}])
    rest = generator.max_model_len - len(chat.prompt)
    assert chat.sampling == Sampling(max_tokens=rest, temperature=0.6, stop_token_ids=[0])
    completion = await request_of(client, generator, COMPLETION, prompt="hi", ignore_eos=True, top_k=-1, seed=-1)
    assert completion.sampling == Sampling(max_tokens=16, temperature=0.6, ignore_eos=True)


async def test_max_completion_tokens_is_the_newer_name(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    messages = [{"role": "user", "content": "hi"}]
    request = await request_of(client, generator, CHAT, messages=messages, max_tokens=5, max_completion_tokens=6)
    assert request.sampling.max_tokens == 6


async def test_harmless_parameters_are_left_aside(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    extra = {"user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True,
             "n": 1, "best_of": 1, "logprobs": None, "echo": False, "suffix": None, "tools": [], "tool_choice": "none",
             "response_format": {"type": "text"}, "stop": None, "stream_options": None}  # fmt: skip
    await request_of(client, generator, COMPLETION, prompt="hi", **extra)


@pytest.mark.parametrize("wrap", [lambda p: p, lambda p: [p]])
async def test_prompts_as_text_ids_and_lists_of_one(
    client: httpx.AsyncClient, generator: FakeGenerator, text: Text, wrap: Any
) -> None:
    ids = text.encode("Hello 你好", add_special_tokens=True)
    for prompt in ("Hello 你好", ids):
        assert (await request_of(client, generator, COMPLETION, prompt=wrap(prompt))).prompt == ids


async def test_a_conversation_goes_through_the_template(
    client: httpx.AsyncClient, generator: FakeGenerator, text: Text
) -> None:
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "three", "refusal": None, "annotations": [], "tool_calls": None},
        {"role": "user", "content": "four"},
    ]
    rendered = (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n"
        "<|im_start|>assistant\nthree<|im_end|>\n<|im_start|>user\nfour<|im_end|>\n<|im_start|>assistant\n"
    )
    request = await request_of(client, generator, CHAT, messages=messages)
    assert text.backend.decode(request.prompt, skip_special_tokens=False) == rendered


async def test_the_last_message_can_be_continued(
    client: httpx.AsyncClient, generator: FakeGenerator, text: Text
) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Sure, "}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    request = await request_of(client, generator, CHAT, messages=messages, **options)
    assert text.backend.decode(request.prompt, skip_special_tokens=False).endswith("assistant\nSure, ")


async def test_debug_controls(debug_client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    controls = {"pipeline": "p_rld_md", "handoff_mode": "one_shot", "handoff_at": 3}
    request = await request_of(debug_client, generator, COMPLETION, prompt="hi", pdrelay=controls)
    assert request.debug == DebugControls(Pipeline.P_RLD_MD, "one_shot", 3)


async def test_a_long_prompt_is_tokenised_all_the_same(
    client: httpx.AsyncClient, generator: FakeGenerator, text: Text
) -> None:
    generator.max_model_len = generator.max_prompt_tokens = 1 << 20
    prompt = "the quick brown fox " * 1000
    request = await request_of(client, generator, COMPLETION, prompt=prompt)
    assert request.prompt == text.encode(prompt, add_special_tokens=True)


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [
        ({"eos_token_id": 2}, {}, Defaults(eos=2)),
        ({"eos_token_id": [7, 2, 8]}, {"eos_token_id": 5}, Defaults(eos=2, extra_stop_ids=(7, 8))),
        ({"temperature": 0.7, "top_p": 0.8, "top_k": 20, "max_new_tokens": 99, "do_sample": True}, {},
         Defaults(temperature=0.7, top_p=0.8, top_k=20, max_tokens=99, eos=2)),
        (None, {"eos_token_id": [2, 3]}, Defaults(eos=2, extra_stop_ids=(3,))),
        (None, {"text_config": {"eos_token_id": 4}}, Defaults(eos=2, extra_stop_ids=(4,))),
    ],
)  # fmt: skip
def test_defaults_of_a_model(tmp_path: Path, generation: Any, model: Any, expected: Defaults) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_defaults(tmp_path, eos=2) == expected

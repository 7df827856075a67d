"""`pdrelay chat` against a small server: text, tiers, closing line, errors, history."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from click.testing import CliRunner

from pdrelay.cli.conversation import summary
from pdrelay.cli.main import main

TRACE = {
    "pipeline": "p_rld_md", "prefill_done": 0.05, "first_token": 0.051, "second_token": 0.09, "handoff_index": 2,
    "handoff_mode": "one_shot", "handoff_start": 0.5, "handoff_done": 0.54, "finished": 1.2, "prefill_tokens": 1,
    "relay_tokens": 1, "main_tokens": 2, "wan_bytes": 1_500_000, "wan_bytes_saved": 200,
}  # fmt: skip


class Gateway(BaseHTTPRequestHandler):
    """Answers with four tokens; remembers what it was asked."""

    asked: ClassVar[list[dict]] = []
    refuse: ClassVar[bool] = False

    def do_GET(self):
        self._reply(200, {"data": [{"id": "a-model"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if self.refuse:
            self._reply(400, {"error": {"message": "This prompt is too long."}})
            return
        self.send_response(200)
        self.end_headers()
        for index, (text, tier) in enumerate(
            [("One", "prefill"), (" two", "relay"), (" three", "main"), (".", "main")]
        ):
            self._event({"choices": [{"delta": {"content": text}}], "pdrelay": {"tier": tier, "index": index}})
        self._event({"choices": [{"delta": {}, "finish_reason": "stop"}], "pdrelay": TRACE})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value):
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _reply(self, status, value):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def gateway():
    handler = type("Handler", (Gateway,), {"asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        handler.url = f"http://127.0.0.1:{server.server_port}/v1"
        yield handler
        server.shutdown()
        thread.join()


def chat(gateway, *arguments, **options):
    return CliRunner().invoke(main, ["chat", "--url", gateway.url, *arguments], **options)


def test_once_prints_the_answer_without_colour_and_the_times(gateway):
    result = chat(gateway, "--once", "Count.", "--max-tokens", "9")
    assert result.exit_code == 0
    legend, answer, closing = result.stdout.splitlines()
    assert legend.split() == ["tokens", "by", "prefill", "relay", "main"]
    assert answer == "One two three."
    assert "handoff at 2 (one_shot, gap 40 ms)" in closing
    assert "line 1.5 MB sent, 200 B saved" in closing
    assert gateway.asked[0]["max_tokens"] == 9
    assert gateway.asked[0]["pdrelay"] == {"trace": True}


def test_a_web_proxy_is_not_asked_for_this_machine(gateway, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert chat(gateway, "--once", "Count.").exit_code == 0


def test_json_has_tiers_and_trace(gateway):
    result = chat(gateway, "--once", "Count.", "--json")
    answer = json.loads(result.stdout)
    assert answer["text"] == "One two three."
    assert [piece["tier"] for piece in answer["pieces"]] == ["prefill", "relay", "main", "main"]
    assert answer["pdrelay"] == TRACE


def test_a_conversation_carries_its_history_and_ends_with_exit(gateway):
    result = chat(gateway, input="Count.\n\nAgain.\n/exit\nNever asked.\n")
    assert result.exit_code == 0
    assert [message["role"] for message in gateway.asked[1]["messages"]] == ["user", "assistant", "user"]
    assert gateway.asked[1]["messages"][1]["content"] == "One two three."
    assert len(gateway.asked) == 2


def test_a_refusal_is_one_line_and_ends_only_the_answer(gateway):
    gateway.refuse = True
    result = chat(gateway, input="Count.\nAgain.\n")
    assert result.exit_code == 0
    assert result.stderr == "pdrelay: This prompt is too long.\n" * 2
    assert len(gateway.asked[1]["messages"]) == 1
    assert chat(gateway, "--once", "Count.").exit_code == 1


def test_nothing_there_is_one_line():
    result = CliRunner().invoke(main, ["chat", "--url", "http://127.0.0.1:9/v1", "--once", "x"])
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "is it started?" in result.stderr
    result = CliRunner().invoke(main, ["chat", "--url", "nowhere", "--once", "x"])
    assert "expected such as http://" in result.stderr


def test_a_request_without_relay_says_so():
    assert "no handoff" in summary({"pipeline": "p_md"})

"""Programs that were written for other servers of OpenAI's API are served."""

import json

import pytest

from tests.kvq_tools.serving.running import CHAT, NAME, Running

SEPARATED = "one\x85two\u2028three\u2029four é 😀"


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_stream_may_be_split_as_unicode_text_or_into_packets(server: Running, path: str):
    asked = {"model": NAME, "stream": True, "max_tokens": 1}
    asked |= {"prompt": SEPARATED, "echo": True} if path == "completions" else {"messages": CHAT}
    status, headers, answer = server.raw("POST", f"/v1/{path}", json.dumps(asked).encode())
    assert status == 200, answer
    assert headers["x-accel-buffering"] == "no"  # nginx would keep what it can
    assert answer.isascii()
    events = [line.removeprefix("data: ") for line in answer.decode().splitlines() if line]
    assert events.pop() == "[DONE]"
    texts = [json.loads(event)["choices"][0].get("text", "") for event in events]
    assert "".join(texts).startswith(SEPARATED if path == "completions" else "")


@pytest.mark.parametrize(
    "nulls",
    [
        {"repetition_penalty": None},
        {"messages": [CHAT[0] | {"reasoning_content": None}, CHAT[1]]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "index": None}]}]},
        {"stream": True, "stream_options": {"continuous_usage_stats": None}},
        {"top_logprobs": 0},
    ],
    ids=lambda nulls: min(nulls),
)
def test_a_field_that_asks_for_nothing_is_accepted_though_unknown(server: Running, nulls: dict):
    asked = {"model": NAME, "messages": CHAT, "max_tokens": 1} | nulls
    status, _, answer = server.raw("POST", "/v1/chat/completions", json.dumps(asked).encode())
    assert status == 200, answer

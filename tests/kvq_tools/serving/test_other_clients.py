"""What programs send and read that were written for other servers of OpenAI's API."""

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

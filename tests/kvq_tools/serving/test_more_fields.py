"""Fields and paths beside the plain ones: special tokens as stops, penalties and biases, messages
with names and without content."""

import json
import queue
import threading
from collections import Counter
from collections.abc import Iterator
from typing import get_args

import pytest

from kvq_models.inference.engine.requests import Reason, Request
from kvq_models.inference.sampling import Sampling
from kvq_tools.serving.answer import Answer, AnswerPiece
from kvq_tools.serving.fields import CompletionFields, Message
from kvq_tools.serving.wire import _json
from tests.kvq_tools.serving.running import CHAT, NAME, PROMPT, Running

ASKED = {"model": NAME, "prompt": PROMPT, "max_tokens": 6, "temperature": 0}


def choice(server: Running, **fields: object) -> dict:
    status, answer = server.post("/v1/completions", ASKED | fields)
    assert status == 200, answer
    return answer["choices"][0] | {"drawn": answer["usage"]["completion_tokens"]}


def test_a_special_token_is_a_stop(server: Running, monkeypatch: pytest.MonkeyPatch):
    assert set(server.service._special) >= set(server.tokenizer.all_special_tokens)
    token = server.tokenizer(" river", add_special_tokens=False)["input_ids"][0]
    forced = {"logit_bias": {str(token): 100}, "stop": ["no such text", "<|end_of_turn|>"]}
    assert choice(server, **forced)["finish_reason"] == "length"
    monkeypatch.setitem(server.service._special, "<|end_of_turn|>", token)
    ended = choice(server, **forced)
    assert (ended["finish_reason"], ended["text"], ended["drawn"]) == ("stop", "", 1)


def test_an_answer_that_a_stop_text_ends_counts_as_ended(server: Running):
    server.until_idle()
    ended = server.service.worker.ended
    before, text = ended.copy(), choice(server, max_tokens=40)["text"]
    stopped = choice(server, max_tokens=200, stop=text[17:24])
    at_its_limit = choice(server, max_tokens=stopped["drawn"], stop=text[17:24])
    assert stopped["finish_reason"] == at_its_limit["finish_reason"] == "stop"
    server.until_idle()
    assert ended == before + Counter(length=1, ended=2)


def test_an_answer_is_counted_and_makes_room_before_its_client_hears_of_its_end(server: Running):
    server.until_idle()
    worker, registry = server.service.worker, server.service.metrics.registry
    stop = choice(server, max_tokens=40)["text"][17:24]
    limit = choice(server, max_tokens=40, stop=stop)["drawn"]  # its last token completes the stop
    told: queue.Queue[tuple[dict, int]] = queue.Queue()

    def ended() -> dict[str, float | None]:
        return {
            reason: registry.get_sample_value("kvq_requests_ended_total", {"reason": reason})
            for reason in get_args(Reason)
        }

    def send(piece: AnswerPiece) -> None:
        if piece.finish:
            told.put((ended(), worker._unended))

    before = ended()
    request = Request(tuple(server.tokenizer(PROMPT)["input_ids"]), limit)
    worker.submit([Answer(0, request, server.tokenizer, [stop], None, send)])
    counted, unended = told.get(timeout=20)
    assert counted == before | {"ended": before["ended"] + 1}
    assert unended == 0
    server.until_idle()
    assert ended() == counted


def test_biases_and_penalties_change_what_is_drawn(server: Running):
    plain = choice(server, max_tokens=24)["text"]
    token = server.tokenizer(" river", add_special_tokens=False)["input_ids"][0]
    assert choice(server, logit_bias={str(token): 100}, max_tokens=3)["text"] != plain[:3]
    first = server.tokenizer(plain, add_special_tokens=False)["input_ids"][0]
    assert not choice(server, logit_bias={str(first): -100})["text"].startswith(plain[:2])
    assert choice(server, logit_bias={}, frequency_penalty=0, max_tokens=24)["text"] == plain
    assert choice(server, frequency_penalty=2, presence_penalty=2, max_tokens=24)["text"] != plain
    status, answer = server.post("/v1/completions", ASKED | {"logit_bias": {"999999": 1}})
    assert (status, "outside the model's vocabulary" in answer["error"]["message"]) == (400, True)


def test_an_assistant_may_have_said_nothing_and_others_may_not(server: Running):
    asked = {"model": NAME, "max_tokens": 4, "temperature": 0}

    def answer(content: str | None, role: str = "assistant") -> tuple[int, dict]:
        said = {"role": role, "content": content}
        return server.post("/v1/chat/completions", asked | {"messages": [*CHAT, said, CHAT[1]]})

    status, silent = answer(None)
    assert status == 200, silent
    assert silent["choices"] == answer("")[1]["choices"]
    status, refused = answer(None, "user")
    assert (status, refused["error"]["param"]) == (400, "messages[2].content")


def test_names_of_messages_reach_the_template():
    message = Message(role="user", content="x", name="Ann")
    assert message.plain == {"role": "user", "content": "x", "name": "Ann"}
    assert Message(role="user", content="x").plain == {"role": "user", "content": "x"}


@pytest.mark.parametrize("path", ["/health", "/", "/metrics", "/v1/models", f"/v1/models/{NAME}"])
def test_head_is_get_without_its_body(server: Running, path: str):
    status, headers, body = server.raw("HEAD", path)
    assert (status, body) == (200, b"")
    assert headers["content-type"] == server.raw("GET", path)[1]["content-type"]


@pytest.mark.parametrize(
    ("asked", "defaults", "expected"),
    [
        ({}, Sampling(), Sampling()),
        ({}, Sampling(0.6, 20, 0.95, 0.1), Sampling(0.6, 20, 0.95, 0.1)),
        ({"temperature": 0}, Sampling(0.6, 20, 0.95), Sampling(0.0, 20, 0.95)),
        ({"top_k": 0, "top_p": 1}, Sampling(0.6, 20, 0.95), Sampling(0.6)),
        ({"top_p": 0.5}, Sampling(), Sampling(1.0, 0, 0.5)),
        ({"temperature": 0, "top_p": 0.5}, Sampling(), Sampling(0.0, 0, 0.5)),
    ],
)
def test_requests_without_sampling_get_the_models(
    asked: dict, defaults: Sampling, expected: Sampling
):
    fields = CompletionFields.model_validate({"model": "m", "prompt": "x"} | asked)
    assert fields.sampling(defaults) == expected


def test_a_whole_answer_has_a_limited_number_of_log_probabilities(
    server: Running, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("kvq_tools.serving.service.MAX_ENTRIES", 2 * 6 * 4)
    assert choice(server, n=2, logprobs=3)["logprobs"]
    for more in ({"logprobs": 4}, {"n": 3}, {"max_tokens": 7}, {"echo": True}):
        asked = ASKED | {"n": 2, "logprobs": 3} | more
        status, answer = server.post("/v1/completions", asked)
        assert (status, answer["error"]["param"]) == (400, "logprobs")
        assert server.post("/v1/completions", asked | {"logprobs": None})[0] == 200
    asked = ASKED | {"n": 3, "logprobs": 3, "stream": True}
    assert server.raw("POST", "/v1/completions", json.dumps(asked).encode())[0] == 200
    chat = {"model": NAME, "messages": CHAT, "max_tokens": 6, "logprobs": True}
    assert server.post("/v1/chat/completions", chat | {"top_logprobs": 8})[0] == 400
    assert server.post("/v1/chat/completions", chat | {"top_logprobs": 7})[0] == 200


def test_a_long_answer_is_made_beside_the_event_loop(
    server: Running, monkeypatch: pytest.MonkeyPatch
):
    threads, made = [], _json

    def watched(value: object) -> Iterator[str]:
        threads.append(threading.current_thread())
        return made(value)

    monkeypatch.setattr("kvq_tools.serving.wire._json", watched)
    choice(server, logprobs=3)
    assert threads
    assert server.thread not in threads

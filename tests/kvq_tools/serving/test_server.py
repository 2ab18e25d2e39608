"""The server as its clients see it: OpenAI's own client, raw requests, and clients that misbehave."""

from __future__ import annotations

import http.client
import json
import pathlib
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator

import openai
import pytest

from kvq_models.inference.engine.requests import Request, Token
from kvq_models.inference.sampling import Sampling
from kvq_tools.serving.fields import NEUTRAL
from tests.kvq_tools.serving.running import BODY, CAPACITY, KEY, NAME, QUEUE, SLOTS, Running, running
from tests.kvq_tools.serving.test_page import PAGE, SCRIPT

PROMPT = "It is a truth universally acknowledged, that"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a river."}]


@pytest.fixture(scope="module")
def server(shallow: pathlib.Path) -> Iterator[Running]:
    with running(shallow) as serving:
        yield serving


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client as client:
        yield client
    server.until_idle()


def alone(server: Running, text: str, new: int, **asked) -> list[int]:
    """The tokens that an engine of our own draws for a prompt."""
    engine = server.engine()
    ids = tuple(server.tokenizer(text).input_ids)
    engine.submit(Request(ids, new, end_ids=tuple(server.llama.config.eos_token_ids), **asked))
    tokens = []
    while not engine.idle:
        tokens += [event.token for event in engine.advance() if isinstance(event, Token)]
    return tokens


def text_of(server: Running, text: str, tokens: list[int]) -> str:
    ids = server.tokenizer(text).input_ids
    whole = server.tokenizer.decode([*ids, *tokens], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return whole.removeprefix(server.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def test_models(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "kvq"
    with pytest.raises(openai.NotFoundError, match="The model 'other' does not exist"):
        client.models.retrieve("other")


def test_a_completion_is_what_the_engine_draws_alone(server: Running, client: openai.OpenAI):
    tokens = alone(server, PROMPT, 40)
    found = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=40, temperature=0)
    assert found.choices[0].text == text_of(server, PROMPT, tokens)
    assert found.choices[0].finish_reason == "length"
    prompt = len(server.tokenizer(PROMPT).input_ids)
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (prompt, 40, prompt + 40)
    ids = server.tokenizer(PROMPT).input_ids
    assert client.completions.create(model=NAME, prompt=ids, max_tokens=40, temperature=0).choices[0].text == found.choices[0].text


def test_a_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI):
    asked = dict(model=NAME, prompt=PROMPT, max_tokens=30, temperature=0.8, seed=5, n=2)
    whole = client.completions.create(**asked)
    texts, ends, usage, chunks = ["", ""], [None, None], None, 0
    for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        chunks += 1
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage
    assert texts[0] != texts[1], "choices of one seed are the same"
    assert chunks > 20, "the answer came at once"


def test_a_seed_repeats_an_answer_and_its_absence_does_not(client: openai.OpenAI):
    def text(**asked) -> str:
        return client.completions.create(model=NAME, prompt=PROMPT, max_tokens=24, **asked).choices[0].text

    assert text(seed=7) == text(seed=7)
    assert len({text(seed=7), text(seed=8), text(), text()}) > 2
    assert text(temperature=0) == text(temperature=1, extra_body={"top_k": 1})
    assert text(temperature=0) == text(top_p=1e-6, seed=3)


def test_several_prompts_are_answered_in_their_order(server: Running, client: openai.OpenAI):
    prompts = ["The sea", "A dog", PROMPT]
    found = client.completions.create(model=NAME, prompt=prompts, max_tokens=8, temperature=0, n=2)
    assert [choice.index for choice in found.choices] == list(range(6))
    expected = [text_of(server, prompt, alone(server, prompt, 8)) for prompt in prompts for _ in range(2)]
    assert [choice.text for choice in found.choices] == expected


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_ends_the_answer_before_it_and_is_never_shown(server: Running, client: openai.OpenAI, stream: bool):
    text = text_of(server, PROMPT, alone(server, PROMPT, 40))
    stop = text[17:24]  # across several tokens
    asked = dict(model=NAME, prompt=PROMPT, max_tokens=40, temperature=0, stop=["no such text", stop], stream=stream)
    if stream:
        pieces = [chunk.choices[0] for chunk in client.completions.create(**asked)]
        found, reason = "".join(piece.text for piece in pieces), pieces[-1].finish_reason
    else:
        choice = client.completions.create(**asked).choices[0]
        found, reason = choice.text, choice.finish_reason
    assert (found, reason) == (text[: text.index(stop)], "stop")
    beyond = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=40, temperature=0, stop=text[-3:] + "never").choices[0]
    assert (beyond.text, beyond.finish_reason) == (text, "length"), "text that only might have been a stop is lost"


def test_log_probabilities_of_a_completion(server: Running, client: openai.OpenAI):
    found = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=12, temperature=0, logprobs=3).choices[0]
    told = found.logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.token_logprobs is not None
    assert told.top_logprobs is not None
    assert "".join(told.tokens) == found.text
    assert told.text_offset == [len("".join(told.tokens[:i])) for i in range(12)]
    for token, logprob, likely in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
        assert 1 <= len(likely) <= 3
        assert likely[token] == logprob == max(likely.values()), "a greedy token is the most probable"
    none = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=2, temperature=0, logprobs=0).choices[0].logprobs
    assert none is not None
    assert none.top_logprobs is None
    assert none.token_logprobs == told.token_logprobs[:2]


def test_echo_with_log_probabilities_scores_a_prompt(server: Running, client: openai.OpenAI):
    """What lm-evaluation-harness asks of a server: the log-probability of a continuation, and whether it is the greedy one."""
    text = text_of(server, PROMPT, alone(server, PROMPT, 10))
    ids = server.tokenizer(PROMPT).input_ids + server.tokenizer(text, add_special_tokens=False).input_ids
    ours = client.completions.create(model=NAME, prompt=[ids], max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1234).choices[0]
    told = ours.logprobs
    assert told is not None
    assert ours.text.startswith(PROMPT + text)
    assert len(told.tokens) == len(ids) + 1
    assert told.token_logprobs[0] is None
    new = slice(len(server.tokenizer(PROMPT).input_ids), -1)
    assert [max(likely.values()) for likely in told.top_logprobs[new]] == told.token_logprobs[new], "greedy tokens"
    drawn = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=10, temperature=0, logprobs=1).choices[0].logprobs
    assert sum(told.token_logprobs[new]) == pytest.approx(sum(drawn.token_logprobs), abs=0.5)
    other = [*ids[:-1], (ids[-1] + 1) % 2048]
    worse = client.completions.create(model=NAME, prompt=[other], max_tokens=0, temperature=0, logprobs=1, echo=True).choices[0].logprobs
    assert len(worse.tokens) == len(ids)
    assert worse.token_logprobs[-1] < told.token_logprobs[-2]
    plain = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=10, temperature=0, echo=True).choices[0].text
    assert plain == PROMPT + text


def test_a_chat_goes_through_the_template(server: Running, client: openai.OpenAI):
    rendered = "<system>Be brief.\n<user>Name a river.\n<assistant>"
    tokens = alone_rendered(server, rendered, 12)
    expected = server.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    found = client.chat.completions.create(model=NAME, messages=CHAT, max_tokens=12, temperature=0)
    assert found.choices[0].message.content == expected
    assert found.choices[0].message.role == "assistant"
    parts = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": t} for t in ("Name ", "a river.")]},
    ]
    again = client.chat.completions.create(model=NAME, messages=parts, max_completion_tokens=12, temperature=0)
    assert again.choices[0].message.content == expected
    assert again.usage == found.usage


def alone_rendered(server: Running, rendered: str, new: int) -> list[int]:
    engine = server.engine()
    engine.submit(Request(tuple(server.tokenizer(rendered, add_special_tokens=False).input_ids), new))
    events = []
    while not engine.idle:
        events += engine.advance()
    return [event.token for event in events if isinstance(event, Token)]


def test_a_streamed_chat_with_log_probabilities(client: openai.OpenAI):
    asked = dict(model=NAME, messages=CHAT, max_tokens=16, temperature=0, logprobs=True, top_logprobs=2)
    whole = client.chat.completions.create(**asked).choices[0]
    roles, text, content, reasons = [], "", [], []
    for chunk in client.chat.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        roles.append(choice.delta.role)
        text += choice.delta.content or ""
        content += choice.logprobs.content if choice.logprobs else []
        reasons.append(choice.finish_reason)
    assert roles[0] == "assistant"
    assert set(roles[1:]) == {None}
    assert text == whole.message.content
    assert reasons[-1] == whole.finish_reason == "length"
    assert set(reasons[:-1]) == {None}
    assert content == whole.logprobs.content
    assert len(content) == 16
    assert all(one.top_logprobs[0].logprob == one.logprob and len(one.top_logprobs) == 2 for one in content)
    assert b"".join(bytes(one.bytes) for one in content if one.bytes).decode() == text


def test_a_chat_without_a_limit_fills_its_slot(server: Running, client: openai.OpenAI):
    found = client.chat.completions.create(model=NAME, messages=CHAT, temperature=0, logprobs=False)
    assert found.choices[0].finish_reason == "length" or found.usage.completion_tokens < CAPACITY
    if found.choices[0].finish_reason == "length":
        assert found.usage.total_tokens == CAPACITY


ASKING = {  # a value of each refused field that asks for something
    "audio": {"voice": "alloy", "format": "wav"},
    "best_of": 2,
    "frequency_penalty": 0.5,
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "logit_bias": {"50256": -100},
    "metadata": {"a": "b"},
    "modalities": ["text", "audio"],
    "moderation": {},
    "parallel_tool_calls": 3,
    "prediction": {"type": "content", "content": "x"},
    "presence_penalty": -1,
    "prompt_cache_key": "k",
    "prompt_cache_options": {},
    "prompt_cache_retention": "24h",
    "reasoning_effort": "high",
    "response_format": {"type": "json_object"},
    "safety_identifier": "x",
    "service_tier": "flex",
    "store": True,
    "suffix": "x",
    "tool_choice": "required",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "verbosity": "low",
    "web_search_options": {},
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_field_that_is_not_served_is_refused_where_it_asks_for_something(server: Running, name: str):
    for path, needed in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": CHAT})):
        status, body = server.post(path, {"model": NAME, "max_tokens": 1, **needed, name: ASKING[name]})
        assert (status, body["error"]["param"], body["error"]["type"]) == (400, name, "invalid_request_error"), body


def test_values_that_ask_for_nothing_are_accepted(server: Running):
    nothing = {name: values[-1] for name, values in NEUTRAL.items()}
    status, body = server.post("/v1/chat/completions", {"model": NAME, "messages": CHAT, "max_tokens": 1, "user": "me", **nothing})
    assert status == 200, body


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        ("completions", {}, "prompt", "Missing required parameter: 'prompt'."),
        ("completions", {"prompt": "x", "colour": 1}, "colour", "Unrecognized request argument supplied: colour"),
        ("completions", {"prompt": "x", "temperature": 2.5}, "temperature", "less than or equal to 2"),
        ("completions", {"prompt": "x", "temperature": "hot"}, "temperature", "valid number"),
        ("completions", {"prompt": "x", "n": 0}, "n", "greater than or equal to 1"),
        ("completions", {"prompt": ["x"] * 3, "n": QUEUE}, "n", f"this server queues {QUEUE}"),
        ("completions", {"prompt": "x", "logprobs": 6}, "logprobs", "less than or equal to 5"),
        ("completions", {"prompt": "x", "stop": ["a"] * 5}, "stop", "up to 4 texts"),
        ("completions", {"prompt": "x", "stop": ""}, "stop", "none of them empty"),
        ("completions", {"prompt": "x", "top_p": 0}, "top_p", "greater than 0"),
        ("completions", {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "'stream' is true"),
        ("completions", {"prompt": []}, "prompt", "at least one"),
        ("completions", {"prompt": [[]]}, None, "prompt is empty"),
        ("completions", {"prompt": [1, 5000]}, None, "token id 5000 is outside"),
        ("completions", {"prompt": "\ud800"}, "prompt", "surrogate"),
        ("completions", {"prompt": "x", "max_tokens": CAPACITY}, None, f"maximum context length is {CAPACITY} tokens"),
        ("chat/completions", {"messages": []}, "messages", "at least 1 item"),
        ("chat/completions", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'assistant'"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content", "Missing required parameter"),
        ("chat/completions", {"messages": CHAT, "top_logprobs": 2}, "top_logprobs", "'logprobs' is true"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x " * 4 * CAPACITY}]}, None, "maximum context length"),
    ],
)
def test_bad_fields_are_told_by_name(server: Running, path: str, fields: dict, param: str | None, message: str):
    status, body = server.post(f"/v1/{path}", {"model": NAME, **fields})
    assert status == 400, body
    assert body["error"]["param"] == param, body
    assert message in body["error"]["message"]
    assert "\n" not in body["error"]["message"]


def test_errors_are_the_clients_exceptions(server: Running, client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-5", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=NAME, prompt="x", max_tokens=CAPACITY)
    assert long.value.code == "context_length_exceeded"
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="another", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError, match="Incorrect API key"):
        stranger.completions.create(model=NAME, prompt="x")


def test_every_path_but_health_asks_for_the_key(server: Running):
    for path in ("/v1/models", "/metrics", f"/v1/models/{NAME}"):
        assert server.raw("GET", path, headers={"authorization": ""})[0] == 401, path
        assert server.raw("GET", path, headers={"authorization": f"Basic {KEY}"})[0] == 401, path
        assert server.raw("GET", path)[0] == 200, path
    assert server.raw("GET", "/health", headers={"authorization": ""})[0] == 200


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b'{"model": "\xff"}', 400, "invalid_json"),
        (b"{", 400, "invalid_json"),
        (b"[" * 50_000, 400, "invalid_json"),
        (b"[]", 400, None),
        (b'{"prompt": "' + b"x" * BODY + b'"}', 413, "request_too_large"),
    ],
)
def test_bodies_that_are_no_request(server: Running, body: bytes, status: int, code: str | None):
    found, _, answer = server.raw("POST", "/v1/completions", body)
    assert (found, json.loads(answer)["error"]["code"]) == (status, code)


def test_a_body_without_a_length_is_cut_at_the_limit(server: Running):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request(
            "POST", "/v1/completions", (b"x" * 10_000 for _ in range(50)), {"authorization": f"Bearer {KEY}"}, encode_chunked=True
        )
        assert connection.getresponse().status == 413
    except (BrokenPipeError, ConnectionResetError):
        pass  # the server had answered, and left, while we still sent
    finally:
        connection.close()


def test_unknown_paths(server: Running):
    status, _, body = server.raw("GET", "/v1/embeddings")
    assert (status, json.loads(body)["error"]["message"]) == (404, "Invalid URL (GET /v1/embeddings)")
    assert server.raw("GET", "/v1/completions")[0] == 405


def start(server: Running, fields: dict) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    body = json.dumps({"model": NAME, "prompt": PROMPT, "temperature": 0, "max_tokens": 200} | fields)
    connection.request("POST", "/v1/completions", body, {"authorization": f"Bearer {KEY}"})
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_vanishes_frees_its_slot(server: Running, stream: bool):
    counts = server.service.worker.engine.counts
    before = counts.ended.get("cancelled", 0)
    connections = [start(server, {"stream": stream}) for _ in range(SLOTS + 2)]
    if stream:
        assert connections[0].getresponse().readline().startswith(b"data: ")
    else:
        end = time.monotonic() + 20
        while server.service.worker.engine.busy < SLOTS and time.monotonic() < end:
            time.sleep(0.002)
    for connection in connections:
        if connection.sock:
            connection.sock.close()
        connection.close()
    server.until_idle()
    assert counts.ended.get("cancelled", 0) > before, "all of them ran to their end"


def test_a_full_queue_refuses_at_once_and_loses_nothing(server: Running, client: openai.OpenAI):
    expected = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=200, temperature=0).choices[0].text
    found, refused = [], []

    def ask() -> None:
        with server.client as own:
            try:
                found.append(own.completions.create(model=NAME, prompt=PROMPT, max_tokens=200, temperature=0).choices[0].text)
            except openai.RateLimitError as error:
                refused.append(error)

    threads = [threading.Thread(target=ask) for _ in range(SLOTS + QUEUE + 12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) + len(refused) == len(threads)
    assert len(found) >= QUEUE
    assert refused, "more were accepted than slots and queue hold"
    assert set(found) == {expected}
    assert refused[0].code == "rate_limit_exceeded"
    assert int(refused[0].response.headers["retry-after"]) >= 1


def test_many_clients_at_once_get_what_each_gets_alone(server: Running):
    prompts = [PROMPT[: 5 + 3 * i] for i in range(10)]
    asked = [dict(prompt=prompt, max_tokens=10 + 2 * i, temperature=(i % 3) * 0.5, seed=i) for i, prompt in enumerate(prompts)]
    expected = [
        text_of(
            server, one["prompt"], alone(server, one["prompt"], one["max_tokens"], sampling=Sampling(one["temperature"]), seed=one["seed"])
        )
        for one in asked
    ]
    found: dict[int, str] = {}

    def ask(i: int) -> None:
        with server.client as own:
            found[i] = own.completions.create(model=NAME, **asked[i]).choices[0].text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(len(asked))] == expected


def metric_of(server: Running, name: str) -> float:
    return float(re.findall(rf"^{re.escape(name)} (\S+)$", server.raw("GET", "/metrics")[2].decode(), re.MULTILINE)[0])


def test_choices_and_conversations_share_what_was_read(server: Running, client: openai.OpenAI):
    names = ("kvq_prefix_lookups_total", "kvq_prefix_hits_total", "kvq_prefix_tokens_total", "kvq_prompt_tokens_total")
    ids = [7, *range(100, 170)]  # a chunk of 64, and 7 more

    def counted(prompt: list[int], n: int) -> tuple[float, ...]:
        before = [metric_of(server, name) for name in names]
        client.completions.create(model=NAME, prompt=prompt, max_tokens=2, n=n)
        return tuple(metric_of(server, name) - was for name, was in zip(names, before, strict=True))

    assert counted(ids, 3) == (3, 2, 2 * 71, 71)
    assert counted([*ids, 5, 6], 1) == (1, 1, 64, 9)
    assert 0 < metric_of(server, "kvq_prefix_bytes") <= metric_of(server, "kvq_prefix_limit_bytes") == 64 << 20


def test_metrics_and_health(server: Running, client: openai.OpenAI):
    def metric(name: str) -> float:
        return metric_of(server, name)

    before = (
        metric("kvq_new_tokens_total"),
        metric("kvq_time_to_first_token_seconds_count"),
        metric('kvq_requests_ended_total{reason="length"}'),
    )
    client.completions.create(model=NAME, prompt=PROMPT, max_tokens=7, temperature=0)
    after = (
        metric("kvq_new_tokens_total"),
        metric("kvq_time_to_first_token_seconds_count"),
        metric('kvq_requests_ended_total{reason="length"}'),
    )
    assert [b - a for a, b in zip(before, after, strict=True)] == [7, 1, 1]
    assert metric("kvq_cache_bytes") == server.service.worker.engine.nbytes
    server.until_idle()
    assert (metric("kvq_slots"), metric("kvq_slots_busy"), metric("kvq_cache_live_tokens")) == (SLOTS, 0, 0)
    assert json.loads(server.raw("GET", "/health")[2]) == {"status": "ok", "slots": SLOTS, "busy": 0, "waiting": 0}


def test_the_page_needs_no_key_and_what_it_reads_is_there(server: Running):
    status, headers, body = server.raw("GET", "/", headers={"authorization": ""})
    assert (status, body.decode()) == (200, PAGE)
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in headers["content-security-policy"]
    metrics = server.raw("GET", "/metrics")[2].decode()
    told = set(re.findall(r"^(kvq_\w+)", metrics, re.MULTILINE))
    read = set(re.findall(r"\bkvq_\w+", SCRIPT))
    assert read <= told, read - told
    assert len(read) > 12
    assert re.search(r'^kvq_cache_info\{.*spec="kivi:recent=16"', metrics, re.MULTILINE)
    for path in re.findall(r'fetch\("([^"]+)"', SCRIPT):
        assert server.raw("GET", f"/{path}")[0] == 200, path
    assert server.raw("GET", "/metrics", headers={"authorization": ""})[0] == 401, "what the page reads asks for the key"


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's script")
def test_the_page_talks_with_the_model_and_watches_the_server(server: Running, client: openai.OpenAI):
    def driven(key: str) -> dict:
        driver = pathlib.Path(__file__).with_name("page_driver.mjs")
        done = subprocess.run(["node", driver, server.url, key], input=SCRIPT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    found, said, turns = driven(KEY), [], []
    asked = dict(model=NAME, temperature=0, max_tokens=12)
    for text in ("Name a river.", "And another."):
        said.append({"role": "user", "content": text})
        answer = client.chat.completions.create(messages=said, **asked).choices[0].message.content
        said.append({"role": "assistant", "content": answer})
        turns += [("turn user", text), ("turn assistant", answer)]
    continued = client.completions.create(prompt="It is a truth", **asked).choices[0].text
    turns += [("turn user", "It is a truth"), ("turn assistant", continued)]
    assert [(role, text) for role, text, *_ in found["log"]] == turns
    assert found["log"][1][2].startswith("length, first text after ")
    told = found["told"]
    assert (told["model"], told["cache"], told["state"]) == (NAME, "kivi:recent=16", "")
    assert (told["capacity"], told["waiting"]) == (str(SLOTS * CAPACITY), f"0 of {QUEUE}")
    assert found["slots"].endswith(f"of {SLOTS} slots are taken")
    assert float(told["new"]) >= 0
    assert min(float(point.partition(",")[2]) for point in found["curve"].split()) < 19, "no tokens were seen"
    assert "API key" in driven("")["told"]["state"], "nobody is told that a key is missing"


def test_requests_that_were_accepted_end_after_the_server_was_told_to(server: Running, client: openai.OpenAI):
    """The last test of the file: the server does not come back."""
    whole = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=150, temperature=0).choices[0].text
    with server.client as own:
        stream = own.completions.create(model=NAME, prompt=PROMPT, max_tokens=150, temperature=0, stream=True)
        text = next(stream).choices[0].text
        server.server.should_exit = True
        for chunk in stream:
            text += chunk.choices[0].text
    assert text == whole
    with pytest.raises(OSError, match="refused"):
        http.client.HTTPConnection("127.0.0.1", server.port, timeout=5).connect()

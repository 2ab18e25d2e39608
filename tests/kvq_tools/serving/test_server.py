"""The server as its clients see it: the answers to OpenAI's client, alone and among others."""

import json
import re
from typing import Any

import openai
import pytest

from tests.kvq_tools.serving.engine_answers import alone, first_choice, text_of
from tests.kvq_tools.serving.running import CAPACITY, CHAT, NAME, PROMPT, SLOTS, WIDTHS, Running


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
    ids, used = server.tokenizer(PROMPT).input_ids, found.usage
    assert used is not None
    assert (used.prompt_tokens, used.completion_tokens) == (len(ids), 40)
    assert used.total_tokens == len(ids) + 40
    assert first_choice(client, prompt=ids, max_tokens=40).text == found.choices[0].text


def counted(usage: Any) -> tuple[int, int, int]:
    """Return the counts of a usage that do not depend on what was asked before."""
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def test_the_usage_tells_how_much_of_a_prompt_was_read_before(
    server: Running, client: openai.OpenAI
):
    chunk, prompt = max(WIDTHS), [7 + i % 90 for i in range(max(WIDTHS) + 5)]

    def cached(ids: list[int], **asked: Any) -> int:
        asked |= {"model": NAME, "prompt": ids, "max_tokens": 1}
        details = client.completions.create(**asked).usage.prompt_tokens_details
        return details.cached_tokens

    assert cached(prompt) == 0
    assert cached(prompt) == len(prompt)
    assert cached([*prompt[:chunk], *range(100, 120)]) == chunk, "the beginning is the same"
    assert cached(prompt, n=2) == len(prompt), "a prompt of two choices counts once"
    assert cached([8, *prompt[1:]]) == 0, "the first token differs"


def test_a_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI):
    asked = dict(model=NAME, prompt=PROMPT, max_tokens=30, temperature=0.8, seed=5, n=2)
    whole = client.completions.create(**asked)
    texts, ends, usage, chunks = ["", ""], [None, None], None, 0
    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in client.completions.create(**asked):
        chunks += 1
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert counted(usage) == counted(whole.usage)
    assert texts[0] != texts[1], "choices of one seed are the same"
    assert chunks > 20, "the answer came at once"


def test_responses_name_their_kind_and_the_chunks_of_one_their_id(client: openai.OpenAI):
    text = dict(model=NAME, prompt=PROMPT, max_tokens=2)
    chat = dict(model=NAME, messages=CHAT, max_tokens=2)
    for create, asked, whole, part in (
        (client.completions.create, text, "text_completion", "text_completion"),
        (client.chat.completions.create, chat, "chat.completion", "chat.completion.chunk"),
    ):
        assert create(**asked).object == whole
        chunks = list(create(**asked, stream=True))
        assert {chunk.object for chunk in chunks} == {part}
        assert len({chunk.id for chunk in chunks}) == 1 < len(chunks)
        assert chunks[0].id != create(**asked).id


def test_a_seed_repeats_an_answer_and_its_absence_does_not(client: openai.OpenAI):
    def text(**asked) -> str:
        found = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=24, **asked)
        return found.choices[0].text

    assert text(seed=7) == text(seed=7) == text(seed=7 + 2**32) == text(seed=7 - 2**32)
    assert len({text(seed=7), text(seed=8), text(), text()}) > 2
    assert text(temperature=0) == text(temperature=1, extra_body={"top_k": 1})
    assert text(temperature=0) == text(top_p=1e-6, seed=3)


def test_several_prompts_are_answered_in_their_order(server: Running, client: openai.OpenAI):
    prompts = ["The sea", "A dog", PROMPT]
    found = client.completions.create(model=NAME, prompt=prompts, max_tokens=8, temperature=0, n=2)
    assert [choice.index for choice in found.choices] == list(range(6))
    expected = [
        text_of(server, prompt, alone(server, prompt, 8)) for prompt in prompts for _ in range(2)
    ]
    assert [choice.text for choice in found.choices] == expected


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_ends_the_answer_before_it_and_is_never_shown(
    server: Running, client: openai.OpenAI, stream: bool
):
    text = text_of(server, PROMPT, alone(server, PROMPT, 40))
    stop = text[17:24]  # across several tokens
    asked = dict(model=NAME, prompt=PROMPT, max_tokens=40, temperature=0)
    asked["stop"] = ["no such text", stop]
    answer = client.completions.create(**asked, stream=stream)
    pieces = [chunk.choices[0] for chunk in (answer if stream else [answer])]
    assert "".join(piece.text for piece in pieces) == text[: text.index(stop)]
    assert pieces[-1].finish_reason == "stop"
    beyond = first_choice(client, max_tokens=40, stop=text[-3:] + "never")
    assert beyond.text == text, "text that only might have been a stop is lost"
    assert beyond.finish_reason == "length"


def test_log_probabilities_of_a_completion(server: Running, client: openai.OpenAI):
    found = first_choice(client, max_tokens=12, logprobs=3)
    told = found.logprobs
    assert "".join(told.tokens) == found.text
    assert told.text_offset == [len("".join(told.tokens[:i])) for i in range(12)]
    drawn = zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True)
    for token, logprob, likely in drawn:
        assert 1 <= len(likely) <= 3
        assert likely[token] == logprob == max(likely.values()), "it is not the most probable"
    none = first_choice(client, max_tokens=2, logprobs=0).logprobs
    assert none.top_logprobs is None
    assert none.token_logprobs == told.token_logprobs[:2]


def test_echo_with_log_probabilities_scores_a_prompt(server: Running, client: openai.OpenAI):
    """lm-evaluation-harness asks a server for the log-probability of a continuation, and whether it
    is the greedy one."""
    text = text_of(server, PROMPT, alone(server, PROMPT, 10))
    prompt = server.tokenizer(PROMPT).input_ids
    ids = prompt + server.tokenizer(text, add_special_tokens=False).input_ids
    ours = first_choice(client, prompt=[ids], max_tokens=1, logprobs=1, echo=True, seed=1234)
    told = ours.logprobs
    assert ours.text.startswith(PROMPT + text)
    assert len(told.tokens) == len(ids) + 1
    assert told.token_logprobs[0] is None
    new = slice(len(prompt), -1)
    likeliest = [max(likely.values()) for likely in told.top_logprobs[new]]
    assert likeliest == told.token_logprobs[new], "greedy tokens"
    drawn = first_choice(client, max_tokens=10, logprobs=1).logprobs
    assert sum(told.token_logprobs[new]) == pytest.approx(sum(drawn.token_logprobs), abs=0.5)
    other = [*ids[:-1], (ids[-1] + 1) % 2048]
    worse = first_choice(client, prompt=[other], max_tokens=0, logprobs=1, echo=True).logprobs
    assert len(worse.tokens) == len(ids)
    assert worse.token_logprobs[-1] < told.token_logprobs[-2]
    assert first_choice(client, max_tokens=10, echo=True).text == PROMPT + text


def test_a_chat_goes_through_the_template(server: Running, client: openai.OpenAI):
    rendered = "<system>Be brief.\n<user>Name a river.\n<assistant>"
    tokens = alone(server, rendered, 12, special=False)
    expected = server.tokenizer.decode(
        tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    found = client.chat.completions.create(model=NAME, messages=CHAT, max_tokens=12, temperature=0)
    assert found.choices[0].message.content == expected
    assert found.choices[0].message.role == "assistant"
    parts = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": t} for t in ("Name ", "a river.")]},
    ]
    asked = dict(model=NAME, messages=parts, max_completion_tokens=12, temperature=0)
    again = client.chat.completions.create(**asked, max_tokens=400)  # the old name of the limit
    assert again.choices[0].message.content == expected
    assert counted(again.usage) == counted(found.usage)


def test_a_conversation_goes_on_with_the_message_that_was_answered(client: openai.OpenAI):
    def answer(*messages):
        asked = dict(model=NAME, messages=[*messages], max_tokens=6, temperature=0)
        return client.chat.completions.create(**asked).choices[0].message

    first, then = answer(*CHAT), {"role": "user", "content": "And another."}
    plain = {"role": "assistant", "content": first.content}
    # the client sends a refusal: null with its own message
    assert answer(*CHAT, first, then) == answer(*CHAT, plain, then)


def test_a_streamed_chat_with_log_probabilities(client: openai.OpenAI):
    asked = dict(model=NAME, messages=CHAT, max_tokens=16, temperature=0)
    asked |= dict(logprobs=True, top_logprobs=2)
    whole = client.chat.completions.create(**asked).choices[0]
    roles, text, content, reasons = [], "", [], []
    for chunk in client.chat.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        assert choice.logprobs is None or choice.logprobs.content, "null, as OpenAI's"
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
    assert all(
        one.top_logprobs[0].logprob == one.logprob and len(one.top_logprobs) == 2 for one in content
    )
    assert b"".join(bytes(one.bytes) for one in content if one.bytes).decode() == text


def test_a_chat_without_a_limit_fills_its_slot(server: Running, client: openai.OpenAI):
    found = client.chat.completions.create(model=NAME, messages=CHAT, temperature=0, logprobs=False)
    assert found.choices[0].finish_reason == "length" or found.usage.completion_tokens < CAPACITY
    if found.choices[0].finish_reason == "length":
        assert found.usage.total_tokens == CAPACITY


def test_metrics_and_health(server: Running, client: openai.OpenAI):
    def metric(name: str) -> float:
        text = server.raw("GET", "/metrics")[2].decode()
        return float(re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)[0])

    counts = {
        "kvq_new_tokens_total": 7,
        "kvq_time_to_first_token_seconds_count": 1,
        'kvq_requests_ended_total{reason="length"}': 1,
    }
    before = {name: metric(name) for name in counts}
    first_choice(client, max_tokens=7)
    assert {name: metric(name) - before[name] for name in counts} == counts
    engine = server.service.worker.engine
    assert metric("kvq_prefix_tokens_total") == engine.counts.prefix_tokens
    assert metric("kvq_cache_bytes") == engine.nbytes
    server.until_idle()
    assert metric("kvq_slots") == SLOTS
    assert metric("kvq_slots_busy") == metric("kvq_cache_live_tokens") == 0
    health = {"status": "ok", "slots": SLOTS, "busy": 0, "waiting": 0}
    assert json.loads(server.raw("GET", "/health")[2]) == health

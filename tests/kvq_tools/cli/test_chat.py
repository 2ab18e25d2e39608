"""`kvq chat`: one cache always holds the conversation token for token, however turns end."""

import io
import json
import re
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_models import Sampling, decode_step, load_llama, prefill
from kvq_tools.cli import text_input
from kvq_tools.cli.continuation import Continuation
from kvq_tools.cli.conversation import AnswerSettings, Conversation
from tests.exhaustive import some

CACHES = ("kivi:bits=2,recent=8,block=8", "innerq:bits=2,sink=4,recent=8,block=8")
CACHE = CACHES[0]
NEW = 12  # tokens of an answer: one segment, and a part of another
CAPACITY = 256
WIDTH = 128  # tokens of every prefill of a replay; `kvq chat` pads no further than it must
STEP, TRIM = jax.jit(decode_step), jax.jit(kvq.rows.trim)
SAID = ("the cat is", "the dog", "the key of the key is seven")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}END{% else"
    " %}|{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
REWRITING = TEMPLATE.replace(
    "{{ m.content }}", "{% if m.role == 'assistant' %}gone{% else %}{{ m.content }}{% endif %}"
)


@pytest.fixture(scope="module")
def endless(model, tmp_path_factory):
    """The model without an end-of-sequence token. Tests decide where its answers end."""
    directory = tmp_path_factory.mktemp("endless") / "model"
    shutil.copytree(model, directory)
    fields = json.loads((model / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(fields | {"eos_token_id": None}))
    return directory


@pytest.fixture(scope="module")
def loaded(endless):
    return load_llama(endless, dtype="float32")


def conversation(loaded, spec=CACHE, *, template=TEMPLATE, end="|", new=NEW, llama=None):
    model, tokenizer = loaded
    model = llama or model
    tokenizer.chat_template = template.replace("END", end)

    def new_cache() -> kvq.cache.Cache:
        return kvq.init_cache(spec, model.config, 1, CAPACITY, "float32")

    return Conversation(model, tokenizer, new_cache, AnswerSettings(new, Sampling(), 0, None), None)


def said(talk, message, **options):
    """Say something; return (the turn, the tokens of the answer)."""
    turn = talk.turn(message)
    answers = list(talk.answer(turn, **options))
    return turn, (answers[-1] if answers else [])


def replayed(llama, spec, steps):
    """Return a fresh cache fed with the same steps: the tokens that a turn keeps, its new tokens in
    one prefill, the answer token by token."""
    cache = kvq.init_cache(spec, llama.config, 1, CAPACITY, "float32")
    for turn, answer in steps:
        if turn.kept < int(cache.lengths[0]):
            cache = TRIM(cache, jnp.asarray([turn.kept]))
        row = np.zeros((1, WIDTH), np.int32)
        row[0, : len(turn.tokens)] = turn.tokens
        _, cache = prefill(llama, cache, row, np.asarray([len(turn.tokens)]))
        for token in answer:
            _, cache = STEP(llama, cache, jnp.asarray([token]))
    return cache


def next_logits(llama, cache):
    return np.asarray(STEP(llama, cache, jnp.asarray([5]))[0])


def assert_holds(talk, llama, spec, steps):
    """The cache holds the tokens of the conversation and reads like a fresh one fed with them."""
    assert int(talk.cache.lengths[0]) == len(talk.ids)
    kept = []
    for turn, answer in steps:
        kept = [*kept[: turn.kept], *turn.tokens, *answer]
    assert talk.ids == kept
    want = next_logits(llama, replayed(llama, spec, steps))
    np.testing.assert_allclose(next_logits(llama, talk.cache), want, rtol=1e-4, atol=1e-4)
    turn, answer = steps[-1]
    other = [*steps[:-1], (turn, [*answer[:-1], (answer[-1] + 1) % 300])]
    assert np.abs(next_logits(llama, replayed(llama, spec, other)) - want).max() > 1e-2, (
        "one other token must show"
    )


@pytest.mark.parametrize("spec", some(CACHES, [CACHE]))
def test_turns_add_their_own_tokens_to_one_cache(loaded, spec):
    llama, tokenizer = loaded
    talk = conversation(loaded, spec)
    steps = [said(talk, message) for message in SAID]
    held = [sum(len(t.tokens) + len(a) for t, a in steps[:n]) for n in range(3)]
    assert [turn.kept for turn, _ in steps] == held
    assert all(len(answer) == NEW for _, answer in steps)
    assert_holds(talk, llama, spec, steps)
    rendered = text_input.render_chat(tokenizer, list(talk.messages))
    assert rendered.startswith(tokenizer.decode(talk.ids)), (
        "the template goes on from what is in the cache"
    )
    for message in SAID:
        assert rendered.count(f"<user>{message}|") == 1


def test_the_token_that_ends_an_answer_stays_in_the_cache_and_is_not_written_again(
    loaded, model, tmp_path
):
    _, tokenizer = loaded
    _, free = said(conversation(loaded), SAID[0])
    end = next(
        token for token in free[2:] if re.fullmatch(r" ?\w+", tokenizer.decode([token]), re.ASCII)
    )
    shutil.copytree(model, tmp_path / "ending")
    (tmp_path / "ending" / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    llama, _ = load_llama(tmp_path / "ending", dtype="float32")
    talk = conversation(loaded, end=tokenizer.decode([end]), llama=llama)
    steps = [said(talk, SAID[0])]
    answer = steps[0][1]
    assert answer == free[: free.index(end) + 1]
    assert talk.finish == "ended"
    assert talk.messages[-1]["content"] == tokenizer.decode(answer[:-1])
    steps.append(said(talk, SAID[1]))
    assert steps[1][0].kept == len(steps[0][0].tokens) + len(answer), (
        "nothing is dropped, the ending token included"
    )
    assert not tokenizer.decode(steps[1][0].tokens).startswith(tokenizer.decode([end])), (
        "the template's own end is there already"
    )
    assert_holds(talk, llama, CACHE, steps)


def test_a_template_that_rewrites_what_was_said_keeps_what_is_left_of_it(loaded):
    llama, tokenizer = loaded
    talk = conversation(loaded, template=REWRITING)
    steps = [said(talk, SAID[0]), said(talk, SAID[1])]
    first = len(steps[0][0].tokens)
    assert 0 < steps[1][0].kept <= first, "the answer went, what came before it stayed"
    assert tokenizer.decode(talk.ids).startswith(
        f"<user>{SAID[0]}|<assistant>gone|<user>{SAID[1]}|<assistant>"
    )
    assert_holds(talk, llama, CACHE, steps)


def test_an_answer_can_be_stopped_and_the_conversation_goes_on_from_what_was_shown(loaded):
    llama, tokenizer = loaded
    talk, segments = conversation(loaded, new=40), iter([False, True])
    turn = talk.turn(SAID[0])
    (shown,) = talk.answer(turn, stopped=lambda: next(segments))
    assert talk.finish == "stopped"
    assert 0 < len(shown) < 40
    assert talk.ids == [*turn.tokens, *shown]
    assert talk.messages[-1]["content"] == tokenizer.decode(shown)
    silent = said(talk, SAID[1], stopped=lambda: True)
    assert silent[1] == [], "stopped before the first token"
    assert talk.messages[-1] == {"role": "assistant", "content": ""}
    steps = [(turn, shown), silent, said(talk, SAID[2], stopped=lambda: False)]
    assert tokenizer.decode(steps[2][0].tokens) == f"|<user>{SAID[2]}|<assistant>", (
        "the answer that never came gets its end"
    )
    assert_holds(talk, llama, CACHE, steps)


# --- the command


class Typed(io.StringIO):
    """Input typed in a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def talking(endless, tmp_path, run, monkeypatch):
    """talk(text, *arguments): run `kvq chat` with that text on stdin, from a pipe or, for Typed, a
    terminal."""
    directory = tmp_path / "talking"
    shutil.copytree(endless, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE.replace("END", "|"))

    def talk(typed, *arguments):
        monkeypatch.setattr("sys.stdin", io.StringIO(typed) if isinstance(typed, str) else typed)
        command = f"chat {directory} --cache={CACHE} --dtype=float32 --max-new-tokens={NEW}"
        return run(command, *arguments)

    return talk


def test_a_piped_message_is_utf_8_whatever_the_locale(talking):
    """As on Windows, where a pipe has the encoding of the region and editors write a mark."""
    said = "Gr\u00fc\u00dfe, \u65e5\u672c"
    piped = io.BytesIO(f"{said}\r\n".encode("utf-8-sig"))
    code, found, err = talking(io.TextIOWrapper(piped, encoding="latin-1"), "--json")
    assert code == 0, err
    assert [turn["user"] for turn in json.loads(found)["turns"]] == [said]
    bad = io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8", errors="surrogateescape")
    code, _, err = talking(bad)
    assert (code, "the input is not UTF-8 text; convert it to UTF-8" in err) == (2, True)


def test_a_stdin_that_cannot_be_read_is_one_line(talking, tmp_path):
    with (tmp_path / "written").open("w") as stdin:
        code, out, err = talking(stdin)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("kvq: error: stdin cannot be read: ")


def test_a_piped_conversation_prints_each_answer_and_what_the_cache_holds(talking, loaded):
    code, out, err = talking(f"{SAID[0]}\n\n{SAID[1]}\n")
    assert code == 0, err
    code, found, _ = talking(f"{SAID[0]}\n\n{SAID[1]}\n", "--json")
    turns = json.loads(found)["turns"]
    assert [turn["user"] for turn in turns] == list(SAID[:2]), "an empty line says nothing"
    lines = re.findall(
        r"^\[cache .*?: (\d+) of 256 tokens, (\d+) in full precision, (\d+) quantized; .*, ratio"
        r" ([\d.]+)\].*$",
        out,
        re.MULTILINE,
    )
    assert len(lines) == 2
    llama, _ = loaded
    before = 0
    for turn, (tokens, exact, quantized, ratio) in zip(turns, lines, strict=True):
        contents = turn["holds"]
        assert contents["tokens"] == before + turn["prefilled_tokens"] + turn["new_tokens"]
        parts = contents["full_precision_tokens"], contents["quantized_tokens"]
        assert (contents["tokens"], *parts) == (int(tokens), int(exact), int(quantized))
        assert sum(parts) == contents["tokens"]
        layout = kvq.cache.layout(CACHE, llama.config, 1, contents["tokens"], "float32")
        assert contents["bytes"] == kvq.size.nbytes(layout)
        assert contents["bf16_bytes"] == kvq.size.dense_nbytes(llama.config, 1, contents["tokens"])
        assert float(ratio) == pytest.approx(contents["bf16_bytes"] / contents["bytes"], abs=0.01)
        assert turn["finish"] == "max-new-tokens"
        before = contents["tokens"]
    assert before > 16, "windows are small: some tokens are quantized"
    assert turns[1]["holds"]["quantized_tokens"] > 0


def test_in_a_terminal_mistakes_are_lines_and_the_conversation_goes_on(talking):
    code, out, err = talking(
        Typed(f"/what\n/help\n{SAID[0]}\n/reset\n{SAID[0]}\n/quit\n{SAID[1]}\n")
    )
    assert code == 0
    assert "kvq: /what is not a command; /help lists them" in err
    assert "Ctrl-C" in err
    first, second = re.findall(r"^\[cache .*$", out, re.MULTILINE)
    assert first == second, (
        "after /reset the same words find the same cache; after /quit nothing is read"
    )
    assert out.count(first) == 2


def test_a_line_that_begins_with_a_slash_can_be_said(talking):
    lines = ("/etc/fstab is a file", "/what", "//help", "/help")
    code, found, _ = talking("".join(f"{line}\n" for line in lines), "--json")
    said = [turn["user"] for turn in json.loads(found)["turns"]]
    assert (code, said) == (0, ["/etc/fstab is a file", "/what", "/help"])
    assert "is not a command" not in talking(Typed(f"{lines[0]}\n/quit\n"))[2]


@pytest.mark.usefixtures("sigint")
def test_ctrl_c_stops_an_answer_and_the_next_turn_works(talking, monkeypatch):
    push, presses = Continuation.push, iter([True])

    def pressing(self, ids, **options):
        if next(presses, False):
            signal.raise_signal(signal.SIGINT)
        return push(self, ids, **options)

    monkeypatch.setattr(Continuation, "push", pressing)
    handler = signal.getsignal(signal.SIGINT)
    code, out, _ = talking(Typed(f"{SAID[0]}\n{SAID[1]}\n"), "--max-new-tokens", 24)
    assert code == 0
    first, second = re.findall(r"^\[cache .*$", out, re.MULTILINE)
    assert first.endswith("(stopped)")
    assert second.endswith("(the answer stopped at --max-new-tokens)")
    assert signal.getsignal(signal.SIGINT) == handler


def test_a_full_cache_is_one_line_in_a_terminal_and_an_error_in_a_pipe(talking):
    text = f"{SAID[0]}\n{SAID[1]}\n"
    code, out, err = talking(Typed(text), "--capacity", 40, "--max-new-tokens", 40)
    assert code == 0
    assert "(the cache is full: /reset starts a new conversation)" in out
    assert "kvq: the cache has 40 tokens, of which 40 are in use" in err
    code, out, err = talking(text, "--capacity", 40, "--max-new-tokens", 40, "--json")
    assert code == 2
    assert "kvq: error: the cache has 40 tokens" in err
    found = json.loads(out)
    assert found["format"] == "kvq.chat", "the answered message is lost"
    assert [turn["user"] for turn in found["turns"]] == [SAID[0]]


def test_control_characters_of_a_model_do_not_reach_the_terminal(model):
    tokenizer = text_input.load_tokenizer(str(model))
    evil = "a\x1b]0;title\x07b\x9b31m\rc\n\td\x00\x7f"
    ids = tokenizer(evil, add_special_tokens=False).input_ids
    stream = Continuation(tokenizer, [1])
    shown = "".join(stream.push(ids[:n]) for n in range(1, len(ids) + 1)) + stream.push(
        ids, last=True
    )
    assert shown == r"a\x1b]0;title\x07b\x9b31m\rc" + "\n\td" + r"\x00\x7f"
    assert stream.text(ids) == evil, "what is not shown keeps them"

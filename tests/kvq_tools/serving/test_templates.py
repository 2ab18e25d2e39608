"""Chat templates are programs from a checkpoint: none stops the server, whatever it computes."""

import asyncio
import pathlib
import time
from collections.abc import Iterator

import pytest

from kvq_models import EMBEDDED
from kvq_models.llama.checkpoint import open_checkpoint
from kvq_tools import chat_template
from kvq_tools.serving.errors import ApiError
from kvq_tools.serving.prompts import PromptEncoder
from kvq_tools.template_process import TemplateError, TemplateProcess

TOKENIZER = open_checkpoint(EMBEDDED, "tokenizer").tokenizer()
MESSAGES = [{"role": "user", "content": "Name a river: é\n"}]
PLAIN = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
THINKS = PLAIN + "{% if enable_thinking is false %}<no thoughts>{% endif %}{{ bos_token }}"


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess(seconds=1)
    yield process
    process.close()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 10 ** (10 ** 8) }}", "more than 1 s or 2 GiB"),
        ("{{ 'a' * 10 ** 10 }}", "MemoryError"),
        ("{{ '%10000000000d' % 1 }}", "Error"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ raise_exception('no\n river') }}", "fails: no river"),
        ("{{ 'x' * 1001 }}", "more than 1000 characters"),
        ("{% if", "template fails"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_template_is_stopped_and_the_next_one_is_rendered(
    process: TemplateProcess, template: str, message: str
):
    process.render(PLAIN, MESSAGES, {}, 1000)  # the process runs
    started = time.monotonic()
    with pytest.raises(TemplateError, match=message) as refused:
        process.render(template, MESSAGES, {}, 1000)
    assert time.monotonic() - started < 10
    assert "\n" not in str(refused.value)
    assert process.render(PLAIN, MESSAGES, {}, 1000) == "<user>Name a river: é\n"


def test_a_template_gets_what_transformers_gives_it(process: TemplateProcess):
    tokenizer = open_checkpoint(EMBEDDED, "tokenizer").tokenizer()
    tokenizer.chat_template = THINKS + "{% if add_generation_prompt %}<assistant>{% endif %}"
    options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
    names = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    names |= {"enable_thinking": False}
    text = process.render(tokenizer.chat_template, MESSAGES, names, 1000)
    assert text == tokenizer.apply_chat_template(MESSAGES, **options)
    assert "<no thoughts>" in text
    assert text.endswith("<assistant>")


def test_clients_set_names_of_the_template_and_nothing_else():
    encoder = PromptEncoder(TOKENIZER, THINKS, capacity=256)

    def text(names: dict[str, object]) -> str:
        return TOKENIZER.decode(asyncio.run(encoder.of_chat(MESSAGES, names)))

    try:
        assert "<no thoughts>" not in text({})
        assert "<no thoughts>" in text({"enable_thinking": False})
        for name in ("messages", "chat_template", "tools", "add_generation_prompt", "self"):
            with pytest.raises(ApiError, match=f"the server sets '{name}'") as refused:
                text({name: []})
            assert refused.value.param == "chat_template_kwargs"
    finally:
        encoder.close()


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([[]] * 340_000, "more than 1000 values"),
        ([[0] * 40] * 40, "more than 1000 values"),
        ({str(i): 0 for i in range(2000)}, "more than 1000 values"),
        ("x" * 100_000, "more than 65536 characters of JSON"),
        ([10**1000] * 100, "more than 65536 characters of JSON"),
        (float("inf"), "a number in it is not finite"),
    ],
    ids=["lists", "numbers", "names", "text", "digits", "infinite"],
)
def test_a_large_value_for_the_template_is_refused_before_anything_is_made_of_it(
    value: object, problem: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(chat_template, "marked_names", None)
    monkeypatch.setattr(TemplateProcess, "render", None)
    encoder, started = PromptEncoder(TOKENIZER, THINKS, capacity=256), time.process_time()
    try:
        with pytest.raises(ApiError, match=problem) as refused:
            asyncio.run(encoder.of_chat(MESSAGES, {"enable_thinking": value}))
    finally:
        encoder.close()
    assert refused.value.param == "chat_template_kwargs"
    assert time.process_time() - started < 1


@pytest.mark.parametrize("trusted", [True, False])
def test_values_that_are_nested_too_deeply_are_the_clients_error(trusted: bool):
    encoder, nested = PromptEncoder(TOKENIZER, THINKS, capacity=256, trusted=trusted), []
    for _ in range(5000):
        nested = [nested]
    try:
        with pytest.raises(ApiError, match="it is nested too deeply") as refused:
            asyncio.run(encoder.of_chat(MESSAGES, {"enable_thinking": nested}))
        assert refused.value.param == "chat_template_kwargs"
    finally:
        encoder.close()


def test_a_process_that_something_else_has_ended_starts_again(
    process: TemplateProcess, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """In a folder with files that are named as modules of Python, which it does not import."""
    (tmp_path / "http.py").write_text("raise ImportError")
    monkeypatch.chdir(tmp_path)
    process.render(PLAIN, MESSAGES, {}, 1000)
    ended = process._process
    assert ended is not None
    assert ended.stdin is not None
    ended.kill()
    ended.wait()
    ended.stdin.write(b"which nobody reads")
    assert process.render(PLAIN, MESSAGES, {}, 1000) == "<user>Name a river: é\n"


def test_a_conversation_that_goes_on_begins_no_answer(process: TemplateProcess):
    template = PLAIN + "{% if add_generation_prompt %}<assistant>{% endif %}"
    asked = [*MESSAGES, {"role": "assistant", "content": "The"}]
    assert process.render(template, asked, {}, 1000, continues=True).endswith("<assistant>The")

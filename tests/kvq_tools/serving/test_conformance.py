"""The list of fields: every one of OpenAI's is served or refused, and docs/serving.md says
which."""

import json
import pathlib
import re

import pytest
from openai.types import chat as chat_types
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat

from kvq_tools.serving.fields import (
    NEUTRAL,
    NEUTRAL_IN_MESSAGES,
    ChatFields,
    CompletionFields,
    Message,
)
from tests.kvq_tools.serving.running import CHAT, NAME, Running

SERVED = {  # values of each served field; the first asks for something
    "model": [NAME],
    "prompt": ["x", [5, 6], ["x", "y"], [[5], [6]]],
    "messages": [CHAT],
    "max_tokens": [2, None],
    "max_completion_tokens": [2, None],
    "temperature": [0.5, 0, 2, None],
    "top_p": [0.5, 1, None],
    "top_k": [3, 0, None],
    "min_p": [0.1, 0, None],
    "seed": [7, -1, 2**40, None],
    "n": [2, None],
    "stop": ["x", ["x", "y"], None],
    "stream": [True, False, None],
    "stream_options": [{"include_usage": True, "include_obfuscation": False}, {}, None],
    "echo": [True, False, None],
    "top_logprobs": [2, 0, None],
    "user": ["me", None],
    "frequency_penalty": [0.5, 0, -2, None],
    "presence_penalty": [0.5, 0, -2, None],
    "logit_bias": [{"5": -100, "6": 1.5}, {}, None],
    "chat_template_kwargs": [{"enable_thinking": False}, {}, None],
}
LOGPROBS = {"/v1/completions": [3, 0, None], "/v1/chat/completions": [True, False, None]}
PATHS: dict[str, tuple[type[CompletionFields] | type[ChatFields], dict]] = {
    "/v1/completions": (CompletionFields, {"prompt": "x", "max_tokens": 1}),
    "/v1/chat/completions": (ChatFields, {"messages": CHAT, "max_completion_tokens": 1}),
}
# the fields that another field requires
BESIDE = {"stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}}

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "serving.md"


def rows(heading: str) -> set[str]:
    """Return the fields that the table under a heading names."""
    section = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    (own,) = (part for part in section if part.startswith(f"{heading}\n"))
    cells = re.findall(r"^\| (.*?) \|", own, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        (completions.CompletionCreateParamsBase, CompletionFields),
        (chat.CompletionCreateParamsBase, ChatFields),
    ],
)
def test_every_field_of_openai_is_served_or_refused(
    params: type, kind: type[CompletionFields] | type[ChatFields]
):
    fields = set(params.__annotations__) | {"stream"}
    unknown = fields - set(kind.model_fields) - set(NEUTRAL)
    assert not unknown, f"clients may send {unknown}, and are told that nobody knows them"
    ours = {"top_k", "min_p", "max_tokens", "chat_template_kwargs"}
    assert set(kind.model_fields) - fields <= ours
    assert not set(kind.model_fields) & set(NEUTRAL)


@pytest.mark.parametrize("role", ["System", "Developer", "User", "Assistant"])
def test_every_field_of_a_message_is_served_or_refused(role: str):
    fields = getattr(chat_types, f"ChatCompletion{role}MessageParam").__annotations__
    assert set(fields) <= set(Message.model_fields) | set(NEUTRAL_IN_MESSAGES)
    assert not set(Message.model_fields) & set(NEUTRAL_IN_MESSAGES)


@pytest.mark.parametrize("path", PATHS)
def test_every_served_field_is_accepted(server: Running, path: str):
    kind, needed = PATHS[path]
    for name in kind.model_fields:
        for value in LOGPROBS[path] if name == "logprobs" else SERVED[name]:
            beside = BESIDE.get(name, {}) if value is not None else {}
            fields = {"model": NAME} | needed | beside | {name: value}
            status, _, body = server.raw("POST", path, json.dumps(fields).encode())
            assert status == 200, (name, value, body)


def test_the_page_lists_what_is_served_and_what_is_refused():
    served = set(CompletionFields.model_fields) | set(ChatFields.model_fields)
    assert rows("Fields that are served") == served
    assert rows("Fields that are refused") == set(NEUTRAL)
    assert rows("Fields of a message") == set(Message.model_fields) | set(NEUTRAL_IN_MESSAGES)

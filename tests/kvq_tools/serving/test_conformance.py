"""The list of fields: every one of OpenAI's is served or refused, and docs/serving.md says which."""

from __future__ import annotations

import pathlib
import re

import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat

from kvq_tools.serving.fields import NEUTRAL, ChatFields, CompletionFields

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "serving.md"


def rows(heading: str) -> set[str]:
    """Return the fields that the table under a heading names."""
    section = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    (own,) = (part for part in section if part.startswith(f"{heading}\n"))
    cells = re.findall(r"^\| (.*?) \|", own, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


@pytest.mark.parametrize(
    ("params", "kind"),
    [(completions.CompletionCreateParamsBase, CompletionFields), (chat.CompletionCreateParamsBase, ChatFields)],
)
def test_every_field_of_openai_is_served_or_refused(params: type, kind: type[CompletionFields] | type[ChatFields]):
    fields = set(params.__annotations__) | {"stream"}
    unknown = fields - set(kind.model_fields) - set(NEUTRAL)
    assert not unknown, f"clients may send {unknown}, and are told that nobody knows them"
    assert set(kind.model_fields) - fields <= {"top_k", "min_p"} | {"max_tokens"}
    assert not set(kind.model_fields) & set(NEUTRAL)


def test_the_page_lists_what_is_served_and_what_is_refused():
    assert rows("Fields that are served") == set(CompletionFields.model_fields) | set(ChatFields.model_fields)
    assert rows("Fields that are refused") == set(NEUTRAL)

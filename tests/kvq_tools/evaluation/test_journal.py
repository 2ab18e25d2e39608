"""Journals keep the rows of a run that was stopped."""

import pathlib

import pytest

from kvq_tools.evaluation.journal import Journal


def test_texts_keep_what_unicode_calls_the_end_of_a_line(tmp_path: pathlib.Path):
    file, row = tmp_path / "rows.jsonl", {"text": "one\u2028two\x85three"}
    for key in "ab":
        journal = Journal(file, {"run": "one"})
        journal.add(key, row)
    assert Journal(file, {"run": "one"}).rows == {"a": row, "b": row}
    with pytest.raises(ValueError, match="rows of another run"):
        Journal(file, {"run": "another"})

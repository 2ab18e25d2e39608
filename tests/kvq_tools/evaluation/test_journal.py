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


@pytest.mark.parametrize(
    "unreadable", [b"", b"[]", b'{"key": "a"}', b"\xff\xfe", b'{"key": "a", "r']
)
def test_a_line_that_cannot_be_read_costs_its_own_row_alone(
    unreadable: bytes, tmp_path: pathlib.Path
):
    file, run = tmp_path / "rows.jsonl", {"run": "one"}
    journal = Journal(file, run)
    for key in "abc":
        journal.add(key, {"kl": key})
    lines = file.read_bytes().split(b"\n")
    file.write_bytes(b"\n".join([*lines[:2], unreadable, *lines[3:]]))
    again = Journal(file, run)
    assert again.rows == {"a": {"kl": "a"}, "c": {"kl": "c"}}
    again.add("b", {"kl": "b"})
    assert Journal(file, run).rows.keys() == set("abc")


@pytest.mark.parametrize("first", [b"[]", b"null", b"no JSON"])
def test_a_file_of_something_else_is_refused_and_kept(first: bytes, tmp_path: pathlib.Path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(first + b"\n")
    with pytest.raises(ValueError, match="rows of another run"):
        Journal(file, {"run": "one"})
    assert file.read_bytes() == first + b"\n"


def test_rows_of_two_processes_of_one_run_are_kept(tmp_path: pathlib.Path):
    file, run = tmp_path / "rows.jsonl", {"run": "one"}
    first = Journal(file, run)
    before = file.stat().st_ino
    second = Journal(file, run)
    assert file.stat().st_ino == before, "what the first one appends would be lost"
    first.add("a", {})
    second.add("b", {})
    assert Journal(file, run).rows.keys() == {"a", "b"}

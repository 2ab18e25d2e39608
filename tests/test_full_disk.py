"""A full disk: every writer leaves what was there and nothing else, and commands say it in one
line."""

import contextlib
import errno
import importlib
import json
import os
import pathlib
import resource
import warnings
from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from kvq_jax.files.whole import UNFINISHED
from kvq_tools import json_lines
from tests.kvq_models.checkpoints import PROMPT
from tests.writers import WRITERS


@contextlib.contextmanager
def no_file_grows(size: int = 0) -> Iterator[None]:
    """Let no file grow beyond `size` bytes. The system then refuses to write, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(autouse=True)
def own_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep compiled programs elsewhere: one that the full disk cuts off would fail a later test."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("programs")))
    jax_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    jax_cache.reset_cache()


# not the folder of prefixes: a server goes on without one that it cannot keep
@pytest.mark.parametrize("name", [name for name in WRITERS if name != "prefixes"])
def test_a_writer_leaves_what_was_there(name: str, tmp_path: pathlib.Path):
    writer = WRITERS[name]
    writer.write(tmp_path, 0)
    before = writer.read(tmp_path)
    for size in (0, 20):
        with no_file_grows(size), pytest.raises(OSError, match=os.strerror(errno.EFBIG)) as error:
            writer.write(tmp_path, 1)
        assert UNFINISHED not in str(error.value), "nobody knows a temporary name"
        # before a fetch the test itself writes a wheel
        assert error.value.filename or name == "fetch", "the line would name no file"
        assert writer.read(tmp_path) == before, f"{size=}"
        assert not list(tmp_path.rglob(f"{UNFINISHED}*")), f"{size=}"
    writer.write(tmp_path, 1)
    assert writer.read(tmp_path) != before


def assert_one_line(result: tuple[int, str, str], message: str) -> None:
    code, _, errors = result
    *before, line = errors.splitlines()
    assert code == 1, errors
    assert not any("error" in one.lower() for one in before), errors
    assert line.startswith("kvq: error: "), errors
    assert message in line, errors


def test_prefill_leaves_no_file_and_warns_once_that_no_program_is_kept(
    run, model: pathlib.Path, tmp_path: pathlib.Path
):
    out = tmp_path / "f"
    with warnings.catch_warnings(), no_file_grows(1000):
        warnings.simplefilter("default")
        result = run("prefill", model, "--prompt", PROMPT, "--out", out)
    assert_one_line(result, f"{out} cannot be written: File too large")
    assert result[2].count("compiled programs are not kept: File too large") <= 1
    assert "Error writing persistent" not in result[2]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_every_command_says_in_one_line_that_a_disk_is_full(run, monkeypatch, options):
    """Wherever it happens, as while a journal grows."""

    def full(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "rows.jsonl")

    monkeypatch.setattr(importlib.import_module("kvq_tools.cli.commands.methods"), "run", full)
    code, out, errors = run("methods", *options)
    assert (code, errors) == (
        1,
        "kvq: error: rows.jsonl cannot be written: No space left on device\n",
    )
    assert bool(out) == bool(options)
    if options:
        assert json.loads(out)["status"] == 1


def test_a_line_is_appended_whole_or_not_at_all(tmp_path: pathlib.Path):
    path = tmp_path / "answers.jsonl"
    with path.open("ab") as file:
        json_lines.append(file, {"id": 1})
        first = path.read_bytes()
        with no_file_grows(len(first) + 5), pytest.raises(OSError, match=r"answers\.jsonl"):
            json_lines.append(file, {"id": 2, "text": "long"})
        assert path.read_bytes() == first
        json_lines.append(file, {"id": 3})
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == [1, 3]

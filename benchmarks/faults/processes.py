"""Kills, full disks and damaged compilation caches: faults that end or spoil a whole process. Each
process is a fork of one that has imported the writers and started no thread."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from benchmarks.faults.outcome import Inject, Kind, Outcome, damaged
from kvq_jax.files import checksum, whole
from kvq_models.inference.engine import prefix_folder
from kvq_models.inference.engine.pieces import RowPiece
from kvq_tools.evaluation.journal import Journal

SECONDS = 60  # of a process


class Writer(NamedTuple):
    """write(folder, content 0 or 1), and the files or folders that hold it, each whole or not at
    all. absent: a file may be missing."""

    write: Callable[[Path, int], object]
    names: tuple[str, ...]
    absent: bool = False


def write_tensors(folder: Path, content: int) -> None:
    """Write a file of tensors, as caches, calibrations and prefixes are."""
    tensors = {name: np.full(300, content, np.float32) for name in "ab"}
    checksum.save_tensors(folder / "file.safetensors", tensors, {"content": str(content)})


def write_text(folder: Path, content: int) -> None:
    whole.write(folder / "plan.json", json.dumps([content] * 5000))


def write_directory(folder: Path, content: int) -> None:
    with whole.replacing_directory(folder / "model") as unfinished:
        (unfinished / "inner").mkdir(exist_ok=True)
        for name in ("one", "inner/two"):
            (unfinished / name).write_text(f"{name} {content}" * 100)


def write_prefixes(folder: Path, content: int) -> None:
    piece = RowPiece(4, (0,), (np.full((1, 400), content, np.float32),), np.zeros((1, 8)))
    prefixes = prefix_folder.PrefixFolder(folder / "prefixes", 1 << 20)
    key = bytes([content])
    (folder / "prefixes" / f"{key.hex()}{prefix_folder.SUFFIX}").unlink(missing_ok=True)
    prefixes.put([key], piece)
    prefixes.close()


def write_journal(folder: Path, content: int) -> None:
    journal = Journal(folder / "rows.jsonl", {"run": "one"})
    for key in "abc":
        journal.add(key, {"row": key})
    whole.write(folder / "table.json", json.dumps([journal.rows, content] * 100))
    journal.delete()


WRITERS = {
    "tensors": Writer(write_tensors, ("file.safetensors",)),
    "text": Writer(write_text, ("plan.json",)),
    "directory": Writer(write_directory, ("model",)),
    "prefixes": Writer(
        write_prefixes, tuple(f"prefixes/0{i}{prefix_folder.SUFFIX}" for i in range(2)), True
    ),
    "journal": Writer(write_journal, ("table.json",)),
}


def content_of(folder: Path, name: str) -> bytes | None:
    """Return all bytes of a file or of a directory, with names. None if it is not there."""
    path = folder / name
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        return b"".join(str(file.relative_to(path)).encode() + file.read_bytes() for file in files)
    return path.read_bytes() if path.exists() else None


def forked(work: Callable[[], object]) -> int:
    """Run work in a fork. Return the fork's process id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def waited(child: int, seconds: float = SECONDS) -> int | None:
    """Return a fork's status, negative for a signal, or None, once it is killed, if it hangs."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _in_place() -> contextlib.AbstractContextManager[object]:
    """Let writers overwrite the file itself."""

    @contextlib.contextmanager
    def place(path: Any) -> Iterator[Path]:
        Path(path).mkdir(exist_ok=True) if Path(path).suffix == "" else None
        yield Path(path)

    stack = contextlib.ExitStack()
    for module in (whole, checksum, prefix_folder):
        stack.enter_context(mock.patch.object(module, "replacing", place))
    stack.enter_context(mock.patch.object(whole, "replacing_directory", place))
    return stack


def killed(folder: Path, *, every_call: bool) -> Iterator[Inject]:
    """Kill writers, before their n-th call of a C function or at a random moment, and read what
    they leave. Then the same writer runs to its end."""
    names = list(WRITERS)
    contents: dict[str, list[dict[str, bytes | None]]] = {}
    calls: dict[tuple[str, bool], int] = {}
    for name, writer in WRITERS.items():
        contents[name] = []
        for content in range(2):
            writer.write(folder, content)
            contents[name].append({file: content_of(folder, file) for file in writer.names})
    whole_listing = _listing(folder)

    def inject(number: int, checked: bool) -> Outcome:
        name = names[number % len(names)]
        writer, rng = WRITERS[name], np.random.default_rng(number)
        writer.write(folder, 0)

        def write() -> None:
            with contextlib.nullcontext() if checked else _in_place():
                if not every_call:
                    while True:
                        writer.write(folder, 1)
                        writer.write(folder, 0)
                _killed_at_call(1 + int(rng.integers(calls[name, checked])))
                writer.write(folder, 1)
            sys.setprofile(None)

        if every_call and (name, checked) not in calls:
            with contextlib.nullcontext() if checked else _in_place():
                calls[name, checked] = _calls(lambda: writer.write(folder, 1))
            writer.write(folder, 0)
        child = forked(write)
        if not every_call:
            time.sleep(rng.uniform(0, 0.03))
            os.kill(child, signal.SIGKILL)
        status = waited(child)
        if status is None:
            return Outcome(False, "hang", name)
        unfinished = any(whole.UNFINISHED in path for path in _listing(folder))
        for file in writer.names:
            allowed = [one[file] for one in contents[name]] + [None] * writer.absent
            if content_of(folder, file) not in allowed:
                writer.write(folder, 0)
                return Outcome(unfinished, "wrong", f"{file} is neither old nor new")
        if status == 1:
            return Outcome(unfinished, "crash", f"{name}: the writer fails")
        for content in (1, 0):
            writer.write(folder, content)
        if _listing(folder) != whole_listing:
            left = sorted(_listing(folder) ^ whole_listing)
            return Outcome(unfinished, "wrong", f"{name}: left {left}")
        return Outcome(unfinished, "right")

    yield inject


def kills(every_call: bool) -> Kind:
    """Return the kind that kills writers before any call of a C function, or at any moment. What a
    killed process wrote stays with the system, so that nothing has to wait for the disk."""

    @contextlib.contextmanager
    def kind(folder: Path) -> Iterator[Inject]:
        with mock.patch.object(os, "fsync"):
            yield from killed(folder, every_call=every_call)

    return kind


def _calls(work: Callable[[], object]) -> int:
    """Return the number of calls of C functions that work makes."""
    count = 0

    def counted(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "c_call"

    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def _killed_at_call(number: int) -> None:
    count = 0

    def counted(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "c_call"
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(counted)


def _listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[Inject]:
    """Let no file grow beyond a random size, at which the system refuses to write as on a full
    disk."""
    names = [name for name in WRITERS if name != "prefixes"]  # which a server goes on without
    contents = {}
    for name in names:
        for content in range(2):
            WRITERS[name].write(folder, content)
            contents[name, content] = content_of(folder, WRITERS[name].names[0])

    def inject(number: int, checked: bool) -> Outcome:
        name, rng = names[number % len(names)], np.random.default_rng(number)
        writer = WRITERS[name]
        writer.write(folder, 0)
        maximum = int(rng.integers(0, 1500))

        def write() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (maximum, maximum))
            try:
                with contextlib.nullcontext() if checked else _in_place():
                    writer.write(folder, 1)
            except OSError:
                os._exit(3)

        status = waited(forked(write))
        content = content_of(folder, writer.names[0])
        writer.write(folder, 1)
        again = content_of(folder, writer.names[0])
        if status is None:
            return Outcome(False, "hang", name)
        if content != contents[name, 1 if status == 0 else 0] or again != contents[name, 1]:
            return Outcome(status == 3, "wrong", f"{name}, at most {maximum} bytes")
        if status not in (0, 3):
            return Outcome(False, "crash", f"{name} ends with {status}")
        return Outcome(status == 3, "right")

    yield inject


@contextlib.contextmanager
def compilation_cache(folder: Path) -> Iterator[Inject]:
    """Damage a compiled program that JAX has kept. Without checks: another program takes its
    place, which nothing can see."""
    os.environ["KVQ_CACHE"] = str(folder)

    def run(out: Path) -> None:
        import jax
        import jax.numpy as jnp

        from kvq_tools.cli import compilation_cache as kept

        kept.MIN_SECONDS = 0.0
        kept.begin()
        values = [jax.jit(lambda x, n=n: jnp.cos(x) * n)(jnp.arange(7.0)) for n in (2.5, 3.5)]
        out.write_bytes(b"".join(np.asarray(value).tobytes() for value in values))

    def computed() -> tuple[int | None, bytes]:
        out = folder / "out"
        out.unlink(missing_ok=True)
        status = waited(forked(lambda: _silently(lambda: run(out), folder / "said")))
        return status, out.read_bytes() if out.exists() else b""

    status, expected = computed()
    assert status == 0
    kept_programs = {file: file.read_bytes() for file in folder.rglob("*-cache")}
    programs = [file for file in sorted(kept_programs) if "lambda" in file.name]
    assert len(programs) == 2, f"both programs are kept: {sorted(kept_programs)}"

    def inject(number: int, checked: bool) -> Outcome:
        rng = np.random.default_rng(number)
        if checked:
            file = programs[int(rng.integers(2))]
            file.write_bytes(damaged(kept_programs[file], rng))
        else:
            for file, other in zip(programs, reversed(programs), strict=True):
                file.write_bytes(kept_programs[other])
        status, result = computed()
        said = "is damaged" in (folder / "said").read_text(errors="replace")
        for file, content in kept_programs.items():
            file.write_bytes(content)
        if status is None:
            return Outcome(said, "hang")
        if status:
            return Outcome(said, "crash", f"the process ends with {status}")
        return Outcome(said, "right" if result == expected else "wrong")

    yield inject


def _silently(work: Callable[[], object], file: Path) -> None:
    """Run work with stderr in a file."""
    with file.open("w") as out:
        os.dup2(out.fileno(), 2)
        work()

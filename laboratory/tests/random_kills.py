"""Kill each of the project's writers at random moments, many times, and look at what is there then.

python -m laboratory.tests.random_kills FOLDER KILLS

A writer writes its two contents in turn, in a process of its own, until it is killed; the next
process goes on with the content that was being written, as a user would. This process never starts
JAX, whose threads a fork would leave behind: its children do.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import select
import signal
import sys
import time
from collections.abc import Callable

from kvq_jax.files.whole import UNFINISHED
from tests.crashes import listing
from tests.writers import WRITERS, Writer, files

MAX_SECONDS = 60  # that a child may take to begin
CARELESS = "careless"


def write_in_place(folder: pathlib.Path, content: int) -> None:
    with (folder / "file").open("w") as file:
        for _ in range(2):
            file.write(f"{content}" * 10_000)
            file.flush()
            time.sleep(0.02)


ALL = WRITERS | {
    CARELESS: Writer(write_in_place, files("file"))
}  # and one whose damage must be seen


def forked(run: Callable[[int], object]) -> tuple[int, int]:
    """Start a process that runs a function with the end of a pipe to write to: (its id, the end to
    read from)."""
    reads, writes = os.pipe()
    child = os.fork()
    if child:
        os.close(writes)
        return child, reads
    status = 1
    try:
        os.close(reads)
        run(writes)
        status = 0
    finally:
        os._exit(status)


def told(pipe: int) -> bytes:
    """Return what a child says next; b"" where it has ended or says nothing."""
    ready, _, _ = select.select([pipe], [], [], MAX_SECONDS)
    return os.read(pipe, 1 << 16) if ready else b""


def undisturbed(writer: Writer, folder: pathlib.Path, contents: str) -> str:
    """Write these contents in a process that nobody kills; return how many seconds the last
    took."""

    def run(pipe: int) -> None:
        for content in contents:
            start = time.monotonic()
            writer.write(folder, int(content))
        os.write(pipe, str(time.monotonic() - start).encode())

    child, pipe = forked(run)
    said = told(pipe).decode()
    os.close(pipe)
    _, status = os.waitpid(child, 0)
    if status or not said:
        raise RuntimeError(f"a writer that nobody killed ended with {status}")
    return said


def killed(
    writer: Writer, folder: pathlib.Path, apart: pathlib.Path, content: str, seconds: float
) -> str:
    """Kill a writer some seconds after it began with a content; return the content that it was
    writing."""
    parent = os.getpid()

    def run(pipe: int) -> None:
        writer.write(apart, 0)  # compiles what it needs, and starts JAX
        now = int(content)
        while os.getppid() == parent:  # a child whose parent was killed ends too
            os.write(pipe, str(now).encode())
            writer.write(folder, now)
            now = 1 - now

    child, pipe = forked(run)
    said = told(pipe)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(pipe, 1 << 16):
        said += more
    os.close(pipe)
    if not said:
        raise RuntimeError("a writer did not begin")
    return said.decode()[-1]


def outcome(name: str, folder: pathlib.Path, kills: int) -> dict[str, object]:
    """Kill a writer at these many moments: {what was damaged, how often it was met at work, what is
    left, ...}."""
    writer, moments = ALL[name], random.Random(name)
    places = {part: folder / name / part for part in ("old", "new", "apart", "killed")}
    for place in places.values():
        place.mkdir(parents=True)
    undisturbed(writer, places["old"], "0")
    whole = [writer.read(places["old"])]
    seconds = float(undisturbed(writer, places["new"], "010101"))
    whole.append(writer.read(places["new"]))
    undisturbed(writer, places["killed"], "0")
    damaged, unfinished, content = [], 0, "1"
    for kill in range(kills):
        content = killed(
            writer, places["killed"], places["apart"], content, moments.uniform(0, 4 * seconds)
        )
        unfinished += any(UNFINISHED in path for path in listing(places["killed"]))
        for file, held in writer.read(places["killed"]).items():
            if held not in (whole[0][file], whole[1][file]) and not (
                writer.absent and held is None
            ):
                damaged.append(f"kill {kill}: {file} is neither old nor new")
    undisturbed(writer, places["killed"], content + "01")
    if writer.read(places["killed"]) != whole[1]:
        damaged.append("the run after the last kill gives something else")
    left = sorted(listing(places["killed"]) ^ listing(places["new"]))
    return {
        "kills": kills,
        "damaged": damaged,
        "unfinished": unfinished,
        "left": left,
        "seconds": seconds,
    }


if __name__ == "__main__":
    print(
        json.dumps(
            {name: outcome(name, pathlib.Path(sys.argv[1]), int(sys.argv[2])) for name in ALL}
        )
    )

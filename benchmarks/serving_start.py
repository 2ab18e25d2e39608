"""From nothing to the first streamed token: `kvq fetch`, then `kvq serve`, and a client that asks
as soon as the server listens.

    python -m benchmarks.serving_start --model smollm2 --cache kivi:bits=4 --json serving_start.json

Every start is a new process. The first one has an empty folder in place of the user's cache folder:
neither a model nor a compiled program is there. The second one finds both. Installing kvq is not
counted, starting Python is.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO
from urllib.parse import urlsplit

from benchmarks.markdown import head, table
from benchmarks.report_file import Report, arguments, cores, header
from kvq_models.named_models.published import PUBLISHED

STARTS = ("empty folder", "again")
PROMPT = "Name three rivers."
WAIT = 600  # seconds for anything


@dataclasses.dataclass(frozen=True)
class StartRow:
    """One start. Seconds, one after the other: to fetch the model (0 if there is nothing to fetch),
    until the server says that it listens, and from a client's request to the first text of its
    stream."""

    start: str
    fetched: float
    listening: float
    first_text: float

    @property
    def seconds(self) -> float:
        return self.fetched + self.listening + self.first_text


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartReport(Report):
    """model: as it was named. cores: of the machine."""

    model: str
    cache: str
    cores: int
    rows: tuple[StartRow, ...]


def started(
    model: str, cache: str, start: str, environment: dict[str, str], size: Sequence[str] = ()
) -> StartRow:
    """Fetch the model if it has a name, serve it, and ask. size: options of `kvq serve`. Raises
    RuntimeError if a command fails."""
    began = time.perf_counter()
    if model in PUBLISHED:
        _finished([sys.executable, "-m", "kvq_tools", "fetch", model], environment)
    fetched = time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "kvq_tools",
        "serve",
        model,
        "--cache",
        cache,
        "--port",
        "0",
        "--json",
        *size,
    ]
    with tempfile.TemporaryFile("w+") as errors, _process(command, environment, errors) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line == "}\n":
                break
        listening, server = time.perf_counter(), json.loads("".join(lines) or "{}")
        if "url" not in server:
            process.wait(WAIT)
            errors.seek(0)
            raise RuntimeError(f"kvq serve ended before it listened: {errors.read().strip()}")
        _first_text(server["url"], server["name"])
        first = time.perf_counter()
    return StartRow(start, fetched - began, listening - fetched, first - listening)


def _finished(command: Sequence[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])}: {done.stderr.strip()}")


@contextlib.contextmanager
def _process(
    command: Sequence[str], environment: dict[str, str], errors: IO[str]
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(WAIT)
        if process.stdout is not None:
            process.stdout.close()


def _first_text(url: str, name: str) -> None:
    """Wait for the first text of a stream. Raises RuntimeError if the server refuses, or sends
    none."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=WAIT)
    with contextlib.closing(connection):
        asked = {
            "model": name,
            "prompt": PROMPT,
            "max_tokens": 16,
            "temperature": 0,
            "stream": True,
        }
        connection.request(
            "POST", "/v1/completions", json.dumps(asked), {"content-type": "application/json"}
        )
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise RuntimeError(f"the server answers {answer.status}: {answer.read().decode()}")
        while line := answer.readline():
            data = line.decode().removeprefix("data: ").strip()
            if (
                data
                and data != "[DONE]"
                and any(choice["text"] for choice in json.loads(data)["choices"])
            ):
                return
    raise RuntimeError("the stream ended without a text")


def page(report: StartReport, file: pathlib.Path) -> str:
    """Render the starts."""
    said = (
        f"{report.cores} cores. `kvq fetch`, `kvq serve {report.model} --cache {report.cache}`, and"
        " a client that asks for a stream as soon as the server listens; seconds. Programs for"
        " longer chunks of a prompt compile beside the first answers."
    )
    lines = [
        (
            row.start,
            *(
                f"{value:.1f}"
                for value in (row.fetched, row.listening, row.first_text, row.seconds)
            ),
        )
        for row in report.rows
    ]
    return "\n\n".join(
        [
            *head(report, file, said),
            table(("start", "fetched", "listening", "first text", "together"), lines),
        ]
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving_start", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument(
        "--model", default="smollm2", help="a name, or a checkpoint (default: %(default)s)"
    )
    parser.add_argument(
        "--cache", default="kivi:bits=4", metavar="SPEC", help="the cache (default: %(default)s)"
    )
    parser.add_argument("--slots", type=int, metavar="B", help="as kvq serve takes it")
    parser.add_argument("--capacity", type=int, metavar="S", help="as kvq serve takes it")
    parser.add_argument(
        "--starts",
        type=int,
        choices=(1, 2),
        default=2,
        help="leave the second start out with 1 (default: %(default)s)",
    )
    parser.add_argument("--json", metavar="F", help="write the report")
    args = parser.parse_args(argv)
    size = [
        word
        for name in ("slots", "capacity")
        if (value := getattr(args, name))
        for word in (f"--{name}", str(value))
    ]
    with tempfile.TemporaryDirectory() as empty:
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("JAX_COMPILATION_CACHE_DIR", "KVQ_API_KEY")
        }
        environment["KVQ_CACHE"] = empty
        try:
            rows = tuple(
                started(args.model, args.cache, start, environment, size)
                for start in STARTS[: args.starts]
            )
        except RuntimeError as error:
            parser.exit(1, f"{error}\n")
    report = StartReport(
        title="The first streamed token of a server",
        model=args.model,
        cache=args.cache,
        cores=cores(),
        rows=rows,
        **header(("benchmarks.serving_start", *arguments(argv))),
    )
    for row in rows:
        print(
            f"{row.start:<14} fetched {row.fetched:6.1f} s, listening {row.listening:6.1f} s, first"
            f" text {row.first_text:6.1f} s, together {row.seconds:6.1f} s"
        )
    if args.json:
        report.write(args.json)


if __name__ == "__main__":
    main()

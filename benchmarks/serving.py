"""Many requests on one engine against one at a time: requests per second and time to first token at
1 to 8 slots; how many sequences an equal memory holds with dense and quantized caches, counted from
their layout; and what a prefix that was read before saves.

    python -m benchmarks.serving --model smollm2 --json serving.json

All requests come at once, each with a prompt and a length of its own, greedy and without an end
token, so that every way generates the same number of tokens. One at a time is `generate`, prompt
after prompt; its time to first token is that of a request that waits for those before it. Programs
are compiled before the clock runs. A prefix comes back from the host's memory, and from the files
of another store.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import kvq_jax as kvq
from benchmarks.markdown import head, table
from benchmarks.report_file import Report, arguments, cores, header
from kvq_models import load_llama, prepare
from kvq_models.inference import generation
from kvq_models.inference.engine.budget import plan
from kvq_models.inference.engine.engine import Engine
from kvq_models.inference.engine.prefix_folder import PrefixFolder
from kvq_models.inference.engine.prefixes import PrefixStore
from kvq_models.inference.engine.requests import Request, Token
from kvq_models.inference.padding import bucket
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import Llama

ALONE = 0  # slots of the row that tells of one request at a time
CACHES = ("dense", "kivi:bits=4", "kivi:bits=2")
PREFIX_LIMIT = 8 << 30  # bytes that pieces of the prefix may take


@dataclasses.dataclass(frozen=True)
class ServingRow:
    """All requests through `slots` slots; slots 0 is one at a time by `generate`. Seconds from the
    start on, of each request."""

    cache: str
    slots: int
    requests: int
    new_tokens: int
    seconds: float
    first_token: tuple[float, ...]
    cache_bytes: int

    @property
    def requests_per_second(self) -> float:
        return self.requests / self.seconds


@dataclasses.dataclass(frozen=True)
class RoomRow:
    """How many sequences of `capacity` tokens fit `memory` bytes, the row in which prompts are read
    counted. Exact."""

    cache: str
    capacity: int
    memory: int
    sequences: int
    sequence_bytes: int


@dataclasses.dataclass(frozen=True)
class PrefixRow:
    """Seconds from a prompt of `tokens` tokens to its first token: read by the model, found in
    memory, and found in files."""

    cache: str
    tokens: int
    read: float
    memory: float
    disk: float
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingReport(Report):
    """model: as it was named; prompt and new: the least and the most tokens of a request. cores: of
    the machine."""

    model: str
    cores: int
    capacity: int
    prompt: tuple[int, ...]
    new: tuple[int, ...]
    rows: tuple[ServingRow, ...]
    room: tuple[RoomRow, ...]
    prefixes: tuple[PrefixRow, ...]


def requests_of(
    count: int, prompt: Sequence[int], new: Sequence[int], vocabulary: int
) -> list[Request]:
    """Return requests of random tokens, the same for the same numbers."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(prompt[0], prompt[1] + 1, count), rng.integers(new[0], new[1] + 1, count)
    return [
        Request(tuple(rng.integers(0, vocabulary, n).tolist()), int(most))
        for n, most in zip(*lengths, strict=True)
    ]


def through_slots(
    llama: Llama, cache: str, slots: int, capacity: int, requests: Sequence[Request]
) -> ServingRow:
    """Serve all requests through an engine, which is compiled first."""
    engine = Engine(llama, cache, slots=slots, capacity=capacity, queue_limit=len(requests))
    engine.warm_up()
    started, first = time.perf_counter(), dict[int, float]()
    for request in requests:
        engine.submit(request)
    while not engine.idle:
        events = engine.advance()
        passed = time.perf_counter() - started
        for event in events:
            if isinstance(event, Token):
                first.setdefault(event.ticket, passed)
    seconds = time.perf_counter() - started
    tokens = engine.counts.new_tokens
    return ServingRow(
        cache,
        slots,
        len(requests),
        tokens,
        seconds,
        tuple(first[t] for t in sorted(first)),
        engine.nbytes,
    )


def one_at_a_time(
    llama: Llama, cache: str, capacity: int, requests: Sequence[Request]
) -> ServingRow:
    """Generate for one request after another; every prompt and the loop run once before, so that
    they are compiled."""
    size = kvq.nbytes(kvq.layout(cache, llama.config, 1, capacity))

    def generated(request: Request, most: int) -> float:
        """Return the seconds to the first token, once all are there."""
        began = time.perf_counter()
        empty = kvq.init_cache(cache, llama.config, 1, capacity)
        settings = generation.generation_settings(request.max_new_tokens)
        state = jax.block_until_ready(
            generation.start(llama, empty, [request.prompt], None, settings)
        )
        state = generation.advance(llama, state, settings, jnp.int32(1))
        jax.block_until_ready(state.tokens)
        first = time.perf_counter() - began
        if most > 1:
            jax.block_until_ready(generation.advance(llama, state, settings, jnp.int32(most)))
        return first

    widths = {(bucket(len(r.prompt)), bucket(r.max_new_tokens)): r for r in requests}
    for request in widths.values():
        generated(request, 2)
    started, first = time.perf_counter(), []
    for request in requests:
        waited = time.perf_counter() - started
        first.append(waited + generated(request, request.max_new_tokens))
    seconds, tokens = (
        time.perf_counter() - started,
        sum(request.max_new_tokens for request in requests),
    )
    return ServingRow(cache, ALONE, len(requests), tokens, seconds, tuple(first), size)


def room_of(cache: str, config: LlamaConfig, capacity: int, memory: int) -> RoomRow:
    """Count the sequences that fit. Nothing is allocated."""
    one, two = (
        plan(cache, config, slots=slots, capacity=capacity, dtype="bfloat16").nbytes
        for slots in (1, 2)
    )
    each = two - one
    return RoomRow(cache, capacity, memory, max(0, (memory - one) // each + 1), each)


def prefix_of(llama: Llama, cache: str, tokens: int) -> PrefixRow:
    """Time one prompt three times: with an empty store, again, and with a new store on the folder
    of the first."""
    prompt = requests_of(1, (tokens, tokens), (1, 1), llama.config.vocab_size)[0]
    with tempfile.TemporaryDirectory() as name:
        folder = PrefixFolder(pathlib.Path(name), PREFIX_LIMIT)
        store = PrefixStore(PREFIX_LIMIT, folder)
        engine = Engine(llama, cache, slots=1, capacity=tokens + 1, prefixes=store)
        engine.warm_up()
        read, memory = (_seconds(engine, prompt) for _ in range(2))
        folder.close()
        files = PrefixFolder(pathlib.Path(name), PREFIX_LIMIT)
        engine.prefixes = PrefixStore(PREFIX_LIMIT, files)
        disk = _seconds(engine, prompt)
        files.close()
    if engine.counts.prefix_tokens != 2 * tokens:
        raise RuntimeError(
            f"{engine.counts.prefix_tokens} tokens of {2 * tokens} came from a store"
        )
    return PrefixRow(cache, tokens, read, memory, disk, store.nbytes)


def _seconds(engine: Engine, request: Request) -> float:
    started = time.perf_counter()
    engine.submit(request)
    while not engine.idle:
        engine.advance()
    return time.perf_counter() - started


def lines_of(report: ServingReport) -> list[str]:
    """Return the report as lines of text."""
    found = [
        f"{'cache':<14} {'slots':>8} {'requests/s':>11} {'tokens/s':>9} {'first token, median':>20}"
        f" {'most':>8} {'times one':>10}"
    ]
    for row in report.rows:
        alone = next(
            (one for one in report.rows if one.cache == row.cache and one.slots == ALONE), None
        )
        times = f"{alone.seconds / row.seconds:.2f}" if alone else ""
        median, most = np.median(row.first_token), max(row.first_token)
        slots = "generate" if row.slots == ALONE else str(row.slots)
        found.append(
            f"{row.cache:<14} {slots:>8} {row.requests_per_second:>11.3f}"
            f" {row.new_tokens / row.seconds:>9.1f} {median:>18.2f} s {most:>6.2f} s {times:>10}"
        )
    found += [
        "",
        (
            f"{'cache':<14} {'sequences':>10} of {report.capacity} tokens in"
            f" {report.room[0].memory / 2**30:g} GiB, bfloat16 rows"
        ),
    ]
    found += [
        f"{row.cache:<14} {row.sequences:>10}   {row.sequence_bytes} bytes each"
        for row in report.room
    ]
    for row in report.prefixes:
        found += [
            f"{row.cache:<14} a prefix of {row.tokens} tokens: read {row.read:.2f} s, from memory"
            f" {row.memory:.3f} s ({row.read / row.memory:.0f} times), from disk {row.disk:.3f} s"
            f" ({row.read / row.disk:.0f} times)"
        ]
    return found


def page(report: ServingReport, file: pathlib.Path) -> str:
    """Render the three tables."""
    said = (
        f"{report.cores} cores. Requests of {report.model} come all at once, with"
        f" {report.prompt[0]} to {report.prompt[1]} tokens of a prompt and {report.new[0]} to"
        f" {report.new[1]} new ones, greedy; caches hold {report.capacity} tokens a sequence. One"
        " at a time is `generate`; first tokens are counted from the start, so they wait for the"
        " requests before."
    )
    parts = head(report, file, said)
    lines = []
    for row in report.rows:
        alone = next(
            (one for one in report.rows if one.cache == row.cache and one.slots == ALONE), None
        )
        times = f"{alone.seconds / row.seconds:.2f}" if alone else ""
        slots = "one at a time" if row.slots == ALONE else str(row.slots)
        rates = f"{row.requests_per_second:.3f}", f"{row.new_tokens / row.seconds:.1f}", times
        waits = f"{np.median(row.first_token):.2f} s", f"{max(row.first_token):.2f} s"
        lines.append((f"`{row.cache}`", slots, *rates, *waits, f"{row.cache_bytes / 1e6:.1f}"))
    names = (
        "cache",
        "slots",
        "requests/s",
        "tokens/s",
        "times one at a time",
        "first token, median",
        "last",
        "cache MB",
    )
    parts.append(table(names, lines))
    for memory in dict.fromkeys(row.memory for row in report.room):
        parts.append(
            f"## Sequences of {report.capacity} tokens in {memory / 2**30:g} GiB\n\nCounted from"
            " the layout, bfloat16 rows."
        )
        held = [
            (f"`{row.cache}`", f"{row.sequences:,}", f"{row.sequence_bytes:,}")
            for row in report.room
            if row.memory == memory
        ]
        parts.append(table(("cache", "sequences", "bytes each"), held))
    if report.prefixes:
        parts.append(
            "## Prefixes\n\nSeconds to the first token of a prompt that was read before, beside"
            " reading it."
        )
        times = [
            (
                f"`{row.cache}`",
                f"{row.tokens:,}",
                f"{row.read:.2f} s",
                *_saved(row.read, row.memory),
                *_saved(row.read, row.disk),
            )
            for row in report.prefixes
        ]
        parts.append(
            table(
                (
                    "cache",
                    "tokens",
                    "read",
                    "from memory",
                    "times faster",
                    "from disk",
                    "times faster",
                ),
                times,
            )
        )
    return "\n\n".join(parts)


def _saved(read: float, found: float) -> tuple[str, str]:
    return f"{found:.3f} s", f"{read / found:.0f}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--model", default="smollm2", help="a checkpoint (default: %(default)s)")
    parser.add_argument(
        "--cache",
        nargs="+",
        default=list(CACHES),
        metavar="SPEC",
        help="caches (default: %(default)s)",
    )
    parser.add_argument(
        "--timed",
        nargs="*",
        metavar="SPEC",
        help="those of them whose requests and prefixes are timed (default: all)",
    )
    parser.add_argument(
        "--slots",
        nargs="*",
        type=int,
        default=[1, 2, 4, 8],
        metavar="B",
        help="slots (default: %(default)s)",
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=24,
        metavar="N",
        help="requests, all at once (default: %(default)s)",
    )
    parser.add_argument(
        "--prompt",
        nargs=2,
        type=int,
        default=[32, 256],
        metavar="N",
        help="least and most tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--new",
        nargs=2,
        type=int,
        default=[32, 64],
        metavar="N",
        help="least and most tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--capacity",
        type=int,
        default=1024,
        metavar="S",
        help="tokens of a sequence (default: %(default)s)",
    )
    parser.add_argument(
        "--memory",
        type=float,
        default=1,
        metavar="GIB",
        help="GiB that sequences share (default: %(default)s)",
    )
    parser.add_argument(
        "--prefix",
        type=int,
        default=4096,
        metavar="N",
        help="tokens of a prefix; 0 leaves it out (default: %(default)s)",
    )
    parser.add_argument(
        "--json", metavar="F", help="write the report, with the times of every request"
    )
    args = parser.parse_args(argv)
    most = args.prompt[1] + args.new[1]
    if (
        args.requests < 1
        or min(args.prompt[0], args.new[0]) < 1
        or most > args.capacity
        or any(slots < 1 for slots in args.slots)
    ):
        parser.error(
            f"requests, slots and tokens are at least 1, and {most} tokens must fit --capacity"
            f" {args.capacity}"
        )
    timed = args.cache if args.timed is None else args.timed
    if not set(timed) <= set(args.cache):
        parser.error(f"--timed names caches of --cache, which are {', '.join(args.cache)}")
    plain, _ = load_llama(args.model, dtype="float32")
    requests = requests_of(args.requests, args.prompt, args.new, plain.config.vocab_size)
    rows = []
    for cache in timed if args.slots else ():
        llama = prepare(plain, cache)
        rows.append(one_at_a_time(llama, cache, args.capacity, requests))
        rows += [
            through_slots(llama, cache, slots, args.capacity, requests) for slots in args.slots
        ]
    prefixes = (
        tuple(prefix_of(prepare(plain, cache), cache, args.prefix) for cache in timed)
        if args.prefix > 0
        else ()
    )
    memory = int(args.memory * 2**30)
    report = ServingReport(
        title="Requests through slots of one cache",
        model=args.model,
        cores=cores(),
        capacity=args.capacity,
        prompt=tuple(args.prompt),
        new=tuple(args.new),
        rows=tuple(rows),
        room=tuple(room_of(cache, plain.config, args.capacity, memory) for cache in args.cache),
        prefixes=prefixes,
        **header(("benchmarks.serving", *arguments(argv))),
    )
    print("\n".join(lines_of(report)))
    if args.json:
        report.write(args.json)


if __name__ == "__main__":
    main()

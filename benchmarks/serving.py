"""Compare many requests on one engine with one request at a time, and count what fits a memory.

    python -m benchmarks.serving --model smollm2 --json serving.json

Rows are requests per second and time to first token at 1 to 8 slots, for longer prompts with short
answers and for short prompts with long ones. Other tables have the sequences that equal memory
holds with dense and quantized caches, counted from their layout, and the time that a prefix saves
if it was read before. All requests come at once, each with its own prompt and length, greedy and
without an end token, so that every way generates the same number of tokens. One at a time is
`generate`, prompt after prompt: its time to first token includes the wait for the requests before.
Programs are compiled before the clock runs. Ways take turns, and a row is the run of the median
time. A prefix comes back from the host's memory, and from the files of another store, which the
system still holds in its page cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pathlib
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np

import kvq_jax as kvq
from benchmarks.report_file import arguments, cores, header
from benchmarks.serving_report import ALONE, PrefixRow, RoomRow, ServingReport, ServingRow, page
from kvq_models import load_llama, prepare
from kvq_models.inference import generation
from kvq_models.inference.engine.engine import Engine
from kvq_models.inference.engine.engine_size import engine_size
from kvq_models.inference.engine.prefix_folder import PrefixFolder
from kvq_models.inference.engine.prefixes import PrefixStore
from kvq_models.inference.engine.requests import Request, Token
from kvq_models.inference.padding import bucket
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.flat_llama import FlatLlama
from kvq_models.llama.model import Llama
from kvq_models.llama.packed_loading import with_activations
from kvq_models.llama.packed_weights import Activations

LENGTHS = ((32, 256, 32, 64), (16, 32, 200, 256))
CACHES = ("dense", "kivi:bits=4", "kivi:bits=2")
PREFIX_LIMIT = 8 << 30  # bytes that pieces of the prefix may take


@dataclasses.dataclass(frozen=True)
class Work:
    """Requests, and the cache that serves them. lengths: least and most tokens of prompts, and of
    answers."""

    cache: str
    activations: Activations
    lengths: tuple[int, int, int, int]
    capacity: int
    requests: tuple[Request, ...]

    def row(
        self, slots: int, tokens: int, seconds: float, first: Iterable[float], size: int
    ) -> ServingRow:
        minimum, maximum, *new = self.lengths
        facts = self.cache, self.activations, (minimum, maximum), tuple(new)
        return ServingRow(*facts, slots, len(self.requests), tokens, seconds, tuple(first), size)


def requests_of(
    count: int, lengths: tuple[int, int, int, int], vocabulary: int
) -> tuple[Request, ...]:
    """Return requests of random tokens, the same for the same numbers."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(lengths[0], lengths[1] + 1, count)
    answers = rng.integers(lengths[2], lengths[3] + 1, count)
    return tuple(
        Request(tuple(rng.integers(0, vocabulary, n).tolist()), int(maximum))
        for n, maximum in zip(prompts, answers, strict=True)
    )


def through_slots(llama: Llama, work: Work, slots: int) -> ServingRow:
    """Serve all requests through an engine, which is compiled first."""
    queue = len(work.requests)
    engine = Engine(llama, work.cache, slots=slots, capacity=work.capacity, queue_limit=queue)
    engine.warm_up()
    started, first = time.perf_counter(), dict[int, float]()
    for request in work.requests:
        engine.submit(request)
    while not engine.idle:
        events = engine.advance()
        passed = time.perf_counter() - started
        for event in events:
            if isinstance(event, Token):
                first.setdefault(event.ticket, passed)
    seconds = time.perf_counter() - started
    times = [first[t] for t in sorted(first)]
    return work.row(slots, engine.counts.new_tokens, seconds, times, engine.nbytes)


def one_at_a_time(llama: Llama, work: Work) -> ServingRow:
    """Generate for one request after another. Every prompt and the loop run once before, so that
    they are compiled."""
    cache, capacity = work.cache, work.capacity
    size = kvq.size.nbytes(kvq.cache.layout(cache, llama.config, 1, capacity))
    model = FlatLlama(llama)

    def generated(request: Request, maximum: int) -> float:
        """Return the seconds to the first token, once all are there."""
        began = time.perf_counter()
        empty = kvq.init_cache(cache, llama.config, 1, capacity)
        settings = generation.generation_settings(request.max_new_tokens)
        state = jax.block_until_ready(
            generation.start(llama, empty, [request.prompt], None, settings)
        )
        state = generation.advance(model, state, settings, jnp.int32(1))
        jax.block_until_ready(state.tokens)
        first = time.perf_counter() - began
        if maximum > 1:
            jax.block_until_ready(generation.advance(model, state, settings, jnp.int32(maximum)))
        return first

    widths = {(bucket(len(r.prompt)), bucket(r.max_new_tokens)): r for r in work.requests}
    for request in widths.values():
        generated(request, 2)
    started, first = time.perf_counter(), []
    for request in work.requests:
        waited = time.perf_counter() - started
        first.append(waited + generated(request, request.max_new_tokens))
    seconds = time.perf_counter() - started
    tokens = sum(request.max_new_tokens for request in work.requests)
    return work.row(ALONE, tokens, seconds, first, size)


def room_of(cache: str, config: LlamaConfig, capacity: int, memory: int) -> RoomRow:
    """Count the sequences that fit. Nothing is allocated."""
    one, two = (
        engine_size(cache, config, slots=slots, capacity=capacity, dtype="bfloat16").nbytes
        for slots in (1, 2)
    )
    each = two - one
    return RoomRow(cache, capacity, memory, max(0, (memory - one) // each + 1), each)


def prefix_of(llama: Llama, cache: str, tokens: int) -> PrefixRow:
    """Time one prompt three times: with an empty store, again, and with a new store on the folder
    of the first."""
    prompt = requests_of(1, (tokens, tokens, 1, 1), llama.config.vocab_size)[0]
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


def parser_of_options() -> argparse.ArgumentParser:
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
        "--repeats",
        type=int,
        default=3,
        metavar="N",
        help="of every row, in turns; the median counts (default: %(default)s)",
    )
    parser.add_argument(
        "--lengths",
        nargs=4,
        type=int,
        action="append",
        metavar="N",
        help="least and most tokens of prompts, and of answers; may be given several times"
        f" (default: {' and '.join(' '.join(map(str, four)) for four in LENGTHS)})",
    )
    parser.add_argument(
        "--activations",
        nargs="+",
        choices=get_args(Activations),
        default=["float32"],
        help="that packed weights multiply (default: %(default)s)",
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
    return parser


def checked_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, of which `timed` names all caches if none were given."""
    parser = parser_of_options()
    args = parser.parse_args(argv)
    args.lengths = [tuple(four) for four in args.lengths or LENGTHS]
    maximum = max(prompt + new for _, prompt, _, new in args.lengths)
    if (
        min(args.requests, args.repeats) < 1
        or min(map(min, args.lengths)) < 1
        or maximum > args.capacity
        or any(slots < 1 for slots in args.slots)
    ):
        parser.error(
            f"requests, repeats, slots and tokens are at least 1, and {maximum} tokens must fit"
            f" --capacity {args.capacity}"
        )
    if args.timed is None:
        args.timed = args.cache
    if not set(args.timed) <= set(args.cache):
        parser.error(f"--timed names caches of --cache, which are {', '.join(args.cache)}")
    return args


def in_turns(llama: Llama, work: Work, slots: Sequence[int], repeats: int) -> list[ServingRow]:
    """Serve the requests one at a time and through each number of slots, in turns, and return the
    run of the median time of each way."""
    turns = [
        [one_at_a_time(llama, work), *(through_slots(llama, work, count) for count in slots)]
        for _ in range(repeats)
    ]
    ways = zip(*turns, strict=True)
    return [sorted(runs, key=lambda run: run.seconds)[repeats // 2] for runs in ways]


def main(argv: Sequence[str] | None = None) -> None:
    args = checked_options(argv)
    plain, _ = load_llama(args.model, dtype="float32")
    vocabulary, memory = plain.config.vocab_size, int(args.memory * 2**30)
    report = ServingReport(
        title="Requests through slots of one cache",
        model=args.model,
        cores=cores(),
        capacity=args.capacity,
        rows=(),
        room=tuple(room_of(cache, plain.config, args.capacity, memory) for cache in args.cache),
        prefixes=(),
        **header(("benchmarks.serving", *arguments(argv))),
    )

    def add(**measured: tuple) -> None:
        nonlocal report
        more = {name: getattr(report, name) + rows for name, rows in measured.items()}
        report = dataclasses.replace(report, **more)
        if args.json:
            report.write(args.json)

    for cache, activations in itertools.product(args.timed, args.activations):
        llama = prepare(with_activations(plain, activations), cache)
        for lengths in args.lengths if args.slots else ():
            requests = requests_of(args.requests, lengths, vocabulary)
            work = Work(cache, activations, lengths, args.capacity, requests)
            add(rows=tuple(in_turns(llama, work, args.slots, args.repeats)))
    for cache in args.timed if args.prefix > 0 else ():
        add(prefixes=(prefix_of(prepare(plain, cache), cache, args.prefix),))
    add()  # what is counted, if nothing is timed
    print(page(report, pathlib.Path(args.json or "serving.json")))


if __name__ == "__main__":
    main()

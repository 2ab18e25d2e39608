"""Serve thousands of requests through the slots of one engine, and see that nothing grows, that
nothing is compiled, and that every request gets the answer that it gets alone.

Requests are drawn from a pool of different ones: prompts and answers of mixed lengths, greedy and
sampled. The answer to each one of the pool, tokens and log-probabilities, is computed once by an
engine that serves nothing else; every answer among others must be equal to it, bit for bit. Some
clients leave after their first tokens: what they had must begin the same answer.

    python -m laboratory.serving_soak --requests 10000 --json serving_soak.json --work
    runs/serving_soak

A run that was stopped goes on after the last round that the folder of --work has.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from tqdm import tqdm

import kvq_jax as kvq
from benchmarks.markdown import head, table
from benchmarks.model_names import model_words, shown
from benchmarks.report_file import Report, from_json, header
from benchmarks.resources import resident_bytes
from kvq_models import load_llama, prepare
from kvq_models.inference.engine.engine import Engine
from kvq_models.inference.engine.requests import Ended, Request, Token
from kvq_models.inference.sampling import Sampling
from kvq_tools.evaluation.journal import Journal
from kvq_tools.evaluation.program_memory import mappings
from laboratory.soak import COMPILED, spaced
from laboratory.study import run_study, study_parser

CACHE = "kivi:bits=2,recent=32,block=32"
SLOTS, CAPACITY, QUEUE = 8, 256, 64
PROMPT, NEW = 200, 48  # the most tokens; the least are 1
POOL = 240  # different requests
ROUND = 500  # requests between two samples
LEAVES = 25  # one client in 25 leaves early
RULES = (Sampling(), Sampling(0.8), Sampling(1.0, top_p=0.9), Sampling(1.2, top_k=40, min_p=0.05))

Answer: TypeAlias = list[tuple[int, float]]  # tokens and their log-probabilities


@dataclasses.dataclass(frozen=True)
class ServedSample:
    """What the process held after `requests` requests of the run, of which `left` were let go by
    their clients.

    process: counts the starts of the run, from 0. programs: compiled by this process's engine
    before its first request; compiled: since then. different: requests whose answers were not those
    that they get alone. seconds: of the process.
    """

    requests: int
    left: int
    new_tokens: int
    process: int
    seconds: float
    resident_bytes: int
    mappings: int
    programs: int
    compiled: int
    different: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingSoakReport(Report):
    """The samples in order. requests: the number asked for; the last sample has the number
    done."""

    model: str
    requests: int
    cache: str
    slots: int
    capacity: int
    pool: int
    samples: tuple[ServedSample, ...]


class ServingSoak:
    """An engine, the pool of requests, and what each of them gets alone."""

    def __init__(self, model: str, cache: str):
        self.compiled = 0
        jax.monitoring.register_event_duration_secs_listener(self._count)
        llama, _ = load_llama(model, dtype="float32", weights="dense")
        self.engine = Engine(
            prepare(llama, cache), cache, slots=SLOTS, capacity=CAPACITY, queue_limit=QUEUE
        )
        before = self.compiled
        self.engine.warm_up()
        self.programs, self.compiled = self.compiled - before, 0
        self.pool = [_request(i, llama.config.vocab_size) for i in range(POOL)]
        self.alone = [self.served({i: request}, {})[i] for i, request in enumerate(self.pool)]

    def _count(self, event: str, duration_secs: float, **_: Any) -> None:
        self.compiled += event == COMPILED

    def served(self, requests: dict[int, Request], leaving: dict[int, int]) -> dict[int, Answer]:
        """Return the answers to requests that come as fast as the queue takes them. leaving: after
        how many tokens a client leaves."""
        waiting, tickets, answers = (
            list(reversed(requests.items())),
            dict[int, int](),
            dict[int, Answer](),
        )
        while waiting or not self.engine.idle:
            while waiting and self.engine.waiting < QUEUE:
                number, request = waiting.pop()
                tickets[self.engine.submit(request)] = number
                answers[number] = []
            for event in self.engine.advance():
                number = tickets.get(event.ticket, -1)
                if isinstance(event, Token) and len(answers[number]) < leaving.get(number, NEW):
                    answers[number].append((event.token, event.logprob))
                    if len(answers[number]) == leaving.get(number):
                        # nobody reads what else this call of `advance` drew for it
                        self.engine.cancel(event.ticket)
                elif isinstance(event, Ended):
                    del tickets[event.ticket]
        return answers

    def round(self, first: int, count: int) -> tuple[int, int, list[int]]:
        """Serve `count` requests of the run from number `first` on. Return (clients that left,
        tokens, requests with another answer than alone)."""
        draw = np.random.default_rng(first)
        chosen = dict(enumerate(draw.integers(0, POOL, count).tolist(), start=first))
        leaving = {
            number: int(draw.integers(1, 8)) for number in chosen if draw.random() < 1 / LEAVES
        }
        answers = self.served({number: self.pool[i] for number, i in chosen.items()}, leaving)
        lengths = {
            number: min(leaving.get(number, NEW), len(self.alone[i]))
            for number, i in chosen.items()
        }
        different = [
            number
            for number, i in chosen.items()
            if answers[number] != self.alone[i][: lengths[number]]
        ]
        return len(leaving), sum(map(len, answers.values())), different


def _request(i: int, vocabulary: int) -> Request:
    draw = np.random.default_rng([i, 1])
    prompt = draw.integers(0, vocabulary, draw.integers(1, PROMPT + 1)).tolist()
    return Request(tuple(prompt), int(draw.integers(1, NEW + 1)), RULES[i % len(RULES)], seed=i)


def run(options: argparse.Namespace) -> ServingSoakReport:
    """Run until `--requests` requests are answered; the report is written after each round.
    Raises ValueError if the folder of --work belongs to another run, or no request is asked for.
    """
    if options.requests < 1:
        raise ValueError("--requests must be at least 1")
    started, cache = time.monotonic(), str(kvq.parse(options.cache))
    identity = {
        "model": shown(options.model),
        "cache": cache,
        "slots": SLOTS,
        "capacity": CAPACITY,
        "pool": POOL,
    }
    options.work.mkdir(parents=True, exist_ok=True)
    journal = Journal(options.work / "journal.jsonl", identity)
    samples = [from_json(ServedSample, row) for row in journal.rows.values()]
    last = samples[-1] if samples else ServedSample(0, 0, 0, -1, 0, 0, 0, 0, 0, ())
    words = [
        "laboratory.serving_soak",
        *model_words(options.model),
        f"--requests {options.requests}",
    ]
    words += [f"--cache {options.cache}"] if options.cache != CACHE else []
    words += [f"--json {options.json.name}", f"--work {options.work.name}"]
    soak, process = ServingSoak(options.model, options.cache), last.process + 1
    with tqdm(
        total=options.requests,
        initial=last.requests,
        unit="request",
        desc="serving soak",
        mininterval=1,
    ) as bar:
        while last.requests < options.requests:
            count = min(ROUND, options.requests - last.requests)
            left, tokens, different = soak.round(last.requests, count)
            done, left, tokens = last.requests + count, last.left + left, last.new_tokens + tokens
            resources = (
                round(time.monotonic() - started, 1),
                resident_bytes(),
                mappings(),
                soak.programs,
                soak.compiled,
            )
            last = ServedSample(
                done, left, tokens, process, *resources, (*last.different, *different)
            )
            samples.append(last)
            journal.add(str(done), dataclasses.asdict(last))
            _report(words, options.requests, identity, samples).write(options.json)
            bar.update(count)
    return _report(words, options.requests, identity, samples)


def _report(
    words: Sequence[str], requests: int, identity: dict[str, Any], samples: Sequence[ServedSample]
) -> ServingSoakReport:
    return ServingSoakReport(
        title="Requests without end",
        **header(words),
        requests=requests,
        **identity,
        samples=tuple(samples),
    )


def page(report: ServingSoakReport, file: pathlib.Path) -> str:
    """Render what was held over time, and which answers differed from those given alone."""
    last = report.samples[-1]
    said = (
        f"{last.requests:,} of {report.requests:,} requests of {report.pool} kinds through"
        f" {report.slots} slots of {report.capacity} tokens of {report.model} with"
        f" `{report.cache}`. {last.new_tokens:,} tokens were drawn, {last.left:,} clients left"
        f" early. The engine has {last.programs} programs: two, and one for each width of a"
        " prompt's chunks."
    )
    wrong = (
        f"Not equal to the answer alone: request {', '.join(map(str, last.different))}."
        if last.different
        else (
            "Every answer was the one that its request gets alone, tokens and log-probabilities,"
            " bit for bit."
        )
    )
    names = (
        "requests",
        "clients that left",
        "tokens",
        "process",
        "seconds",
        "resident",
        "memory mappings",
        "compiled later",
        "different",
    )
    lines = map(_line, spaced(report.samples))
    return "\n\n".join([*head(report, file, said, wrong), table(names, lines)])


def _line(sample: ServedSample) -> tuple[str, ...]:
    resources = (
        f"{sample.resident_bytes / 2**20:.0f} MiB",
        f"{sample.mappings:,}",
        f"{sample.compiled}",
        f"{len(sample.different)}",
    )
    return (
        f"{sample.requests:,}",
        f"{sample.left:,}",
        f"{sample.new_tokens:,}",
        f"{sample.process}",
        f"{sample.seconds:,.0f}",
        *resources,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = study_parser("laboratory.serving_soak", __doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="requests to answer")
    parser.add_argument("--cache", default=CACHE, help="the cache")
    parser.add_argument(
        "--work",
        metavar="DIR",
        type=pathlib.Path,
        required=True,
        help="where a run that is stopped leaves its samples",
    )
    run_study(parser, argv, run)


if __name__ == "__main__":
    main()

"""Measure what caches do to answers about long texts: pass keys, the tasks of RULER, verbatim
quotes and tool calls in JSON, by length.

A prompt is read once for all caches, whose attention is exact inside it, but for its last tokens,
the question: these are decoded, so the question and the first token of the answer are read through
the cache too. Full precision is asked first, on samples of another seed. Tasks and lengths that it
cannot do itself are not asked of other caches: their answers would say nothing of the cache. A run
that is stopped goes on where it was when the same command is given again.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import itertools
import json
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

import kvq_jax as kvq
from benchmarks.model_names import add_model, model_words, shown
from benchmarks.progress import progress
from benchmarks.report_file import COMMIT, from_json, header
from kvq_jax.files.whole import delete_directory
from kvq_models import Llama, load_llama, prepare
from kvq_models.calibration.fingerprint import partial_fingerprint
from kvq_models.calibration.fit import calibrate
from kvq_models.calibration.needs import needs
from kvq_tools.cli.console import UserError
from kvq_tools.cli.text_input import encode
from kvq_tools.evaluation.journal import Journal
from kvq_tools.evaluation.tasks import niah, passkey, ruler, runner
from kvq_tools.evaluation.tasks.sample import AnswerRule, TaskPrompts, TaskSample
from laboratory.quality import quote, shared_prompts, tool_call
from laboratory.quality.long_context_report import (
    FULL_PRECISION,
    CacheSize,
    Cell,
    LongContextReport,
)
from laboratory.quality.report import Text

TASKS = ("passkey", *niah.KINDS, *ruler.KINDS, "quote", "tool_call")
NEW_TOKENS, MORE_NEW_TOKENS = (
    64,
    {"cwe": 120},
)  # of an answer: few different numbers, since each is a program to compile
LENGTHS = 1024, 2048, 4096
COUNT, BATCH, THRESHOLD = 50, 4, 0.1
THROUGH = 64  # tokens: more than the longest question, and the beginning of its answer
# what rows of one run share
SETTINGS = ["count", "chat", "seed", "samples", "sample_length", "through", "choosing", "threshold"]
CHOICE = "full precision on other samples"
CHOOSING = 8  # samples of the seed after the asked one, by which tasks are chosen


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m laboratory.quality.long_context",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add_model(parser)
    add(
        "--text",
        metavar="FILE",
        type=pathlib.Path,
        help="the text that needles are hidden in, for tasks that need one",
    )
    add(
        "--calibration-text",
        metavar="FILE",
        type=pathlib.Path,
        help="the calibration text, for caches that need one",
    )
    add(
        "--caches",
        metavar="SPEC",
        type=kvq.parse,
        nargs="+",
        required=True,
        help="caches beside full precision",
    )
    add(
        "--tasks",
        metavar="TASK",
        choices=TASKS,
        nargs="+",
        default=TASKS,
        help=f"any of {', '.join(TASKS)}",
    )
    add(
        "--lengths",
        metavar="L",
        type=int,
        nargs="+",
        default=LENGTHS,
        help="tokens of prompt and answer",
    )
    add(
        "--count",
        type=int,
        default=COUNT,
        help="samples of each task and length; intervals are over them",
    )
    add(
        "--threshold",
        type=float,
        default=THRESHOLD,
        help="ask no other cache where full precision's accuracy is lower",
    )
    add(
        "--choosing",
        type=int,
        default=CHOOSING,
        help="other samples that full precision is asked, to leave out what it cannot do",
    )
    add(
        "--through",
        type=int,
        default=THROUGH,
        help="last tokens of a prompt that are decoded through the cache; 0 for papers' way",
    )
    add("--chat", action="store_true", help="put the prompts into the tokenizer's chat template")
    add(
        "--batch", type=int, default=BATCH, help="prompts at a time; of no influence on the numbers"
    )
    add("--seed", type=int, default=0, help="of the samples")
    add("--samples", type=int, default=16, help="calibration samples")
    add("--sample-length", type=int, default=1024, help="tokens of a calibration sample")
    add("--json", metavar="FILE", type=pathlib.Path, required=True, help="where the scores go")
    add(
        "--work",
        metavar="DIR",
        type=pathlib.Path,
        help="keep calibration samples here, for other runs (default: no)",
    )
    return parser


class Bench:
    """The model, its questions, and the scores that were measured so far; none is measured again.

    ValueError if a task or a cache lacks its text, or samples do not fit the model.
    """

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.llama, tokenizer = load_llama(options.model, dtype="float32", weights="dense")
        self.prompts = TaskPrompts(
            tokenizer, functools.partial(encode, tokenizer, chat=True) if options.chat else None
        )
        self.texts = {
            name: self._read(getattr(options, name))
            for name in ("text", "calibration_text")
            if getattr(options, name)
        }
        self.caches = list(dict.fromkeys((FULL_PRECISION, *map(str, options.caches))))
        self.calibrated = [
            cache for cache in self.caches if needs(kvq.parse(cache), self.llama.config)
        ]
        if self.calibrated and "calibration_text" not in self.texts:
            raise ValueError(f"{self.calibrated[0]} is calibrated: give --calibration-text")
        self.samples = {
            (task, length): self._samples(task, length, options.count, options.seed)
            for length in options.lengths
            for task in options.tasks
        }
        for samples in self.samples.values():
            runner.check_samples(samples, self.llama.config)
        self.work = options.work or options.json.with_name(f"{options.json.stem}.unfinished")
        hashes = {name: text.sha256 for name, (text, _) in self.texts.items()}
        given = {name: getattr(options, name) for name in SETTINGS}
        self.journal = Journal(
            self.work / f"{options.json.stem}.jsonl",
            {"model": partial_fingerprint(self.llama), **hashes, **given},
        )

    def _read(self, path: pathlib.Path) -> tuple[Text, str]:
        text = path.read_text(encoding="utf-8")
        tokens = len(self.prompts.tokenizer(text, verbose=False).input_ids)
        return Text(path.name, hashlib.sha256(text.encode()).hexdigest(), tokens), text

    def _samples(self, task: str, length: int, count: int, seed: int) -> list[TaskSample]:
        """Return `count` samples, those of one fact with depths equally spaced."""
        depths = [(i + 0.5) / count for i in range(count)]
        common: dict[str, Any] = {
            "lengths": (length,),
            "seed": seed,
            "max_new_tokens": new_tokens(task),
        }
        if task in ruler.KINDS:
            return ruler.generated(self.prompts, task, count=count, **common)
        if task == "tool_call":
            return tool_call.generated(self.prompts, count=count, **common)
        if task == "passkey":
            return passkey.generated(self.prompts, depths=depths, count=1, **common)
        text = self.texts["text"][1] if "text" in self.texts else None
        if task == "quote":
            if text is None:
                raise ValueError("quote repeats a passage of a text: give one (--text FILE)")
            # a passage at the end of a text is among the exact tokens
            far = [depth / 2 for depth in depths]
            return quote.generated(self.prompts, depths=far, count=1, text=text, **common)
        each = 1 if niah.KINDS[task].single else count
        return niah.generated(self.prompts, task, depths=depths, count=each, text=text, **common)

    def measure(self) -> None:
        """Ask every cache what full precision can do, a line of progress for each task and length;
        a prompt is read once for all caches."""
        progress(f"{len(self.samples)} tasks and lengths, {len(self.caches)} caches")
        models = (
            {cache: self._prepared(kvq.parse(cache)) for cache in self.caches}
            if any(map(self._missing, self.samples))
            else {}
        )
        for _, places in itertools.groupby(self.samples, key=lambda place: place[1]):
            for place in places:
                if self._missing(place):
                    started = time.perf_counter()
                    self._ask(models, *place)
                    progress(f"{time.perf_counter() - started:6.0f} s")
            jax.clear_caches()  # programs of this length are not needed again

    def _missing(self, place: tuple[str, int]) -> list[str]:
        """Return the caches that are still to be asked, full precision first."""
        asked = self.caches
        if _key(CHOICE, *place) in self.journal.rows and not self.chosen(place):
            asked = asked[:1]
        return [cache for cache in asked if _key(cache, *place) not in self.journal.rows]

    def chosen(self, place: tuple[str, int]) -> bool:
        """Return True if full precision reaches the threshold on other samples."""
        return self.cell(CHOICE, *place).accuracy >= self.options.threshold

    def _ask(self, models: dict[str, Llama], task: str, length: int) -> None:
        """Ask caches one task at one length, all of them if full precision can do it on other
        samples. Their cells go into the journal."""
        options = self.options
        if _key(CHOICE, task, length) not in self.journal.rows:
            others = self._samples(task, length, options.choosing, options.seed + 1)
            self._scored(models, [FULL_PRECISION], others, task, length, CHOICE)
        if caches := self._missing((task, length)):
            self._scored(models, caches, self.samples[task, length], task, length)

    def _scored(
        self,
        models: dict[str, Llama],
        caches: Sequence[str],
        samples: Sequence[TaskSample],
        task: str,
        length: int,
        name: str | None = None,
    ) -> None:
        """Ask caches these samples. name: of the cell, if it is not the cache's."""
        answers_of = shared_prompts.run_together(
            [(models[cache], kvq.parse(cache)) for cache in caches],
            task_of(task),
            samples,
            self.prompts,
            batch=self.options.batch,
            through=self.options.through,
        )
        for cache, answers in zip(caches, answers_of, strict=True):
            ordered = sorted(answers, key=lambda answer: answer.index)
            scores = tuple(answer.scores["accuracy"] for answer in ordered)
            cell = Cell(cache, task, length, scores, COMMIT)
            self.journal.add(_key(name or cache, task, length), dataclasses.asdict(cell))
            progress(f"{name or cache:40s} {task:12s} {length:6d} tokens  {cell.accuracy:7.1%}")

    def places(self, cache: str) -> Iterator[tuple[str, int]]:
        """Yield the tasks and lengths that a cache is asked: all for full precision."""
        for place in self.samples:
            if cache == FULL_PRECISION or self.chosen(place):
                yield place

    def _prepared(self, spec: kvq.cache.CacheSpec) -> Llama:
        if not needs(spec, self.llama.config):
            return prepare(self.llama, spec)
        text, content = self.texts["calibration_text"]
        progress(f"{spec}: calibrating on {text.name}")
        ids = np.asarray(self.prompts.tokenizer(content, verbose=False).input_ids, np.int32)
        sizes = {"samples": self.options.samples, "length": self.options.sample_length}
        return prepare(
            self.llama,
            spec,
            calibrate(
                self.llama, ids, spec, work=self.work / "calibration", text=text.name, **sizes
            ),
        )

    def cell(self, cache: str, task: str, length: int) -> Cell:
        return from_json(Cell, self.journal.rows[_key(cache, task, length)])

    def clean(self) -> None:
        """Delete what an interrupted run needs to go on: this one is complete."""
        self.journal.delete()
        if self.options.work is None:
            delete_directory(self.work)


def new_tokens(task: str) -> int:
    return MORE_NEW_TOKENS.get(task, NEW_TOKENS)


def task_of(name: str) -> AnswerRule:
    special = {"passkey": passkey.TASK, "quote": quote.TASK, "tool_call": tool_call.TASK}
    return special.get(name, niah.TASK)


def _key(cache: str, task: str, length: int) -> str:
    return json.dumps([cache, task, length])


def run(options: argparse.Namespace) -> None:
    """Measure everything that an earlier run of the same command has not, write the report, and
    delete what only unfinished runs need."""
    if min(options.count, options.batch, options.choosing) < 1:
        raise ValueError("--count, --choosing and --batch must be at least 1")
    bench = Bench(options)
    bench.measure()
    config = bench.llama.config
    heads = f"{config.num_attention_heads} query heads on {config.num_key_value_heads} KV heads"
    report = LongContextReport(
        title=f"Long contexts: {shown(options.model)}",
        **header(_command(options)),
        model=f"{shown(options.model)}, {config.num_hidden_layers} layers, {heads}, float32",
        tasks=tuple(options.tasks),
        lengths=tuple(options.lengths),
        caches=tuple(
            CacheSize(cache, kvq.size.body_bits_per_element(kvq.parse(cache), config))
            for cache in bench.caches
        ),
        count=options.count,
        threshold=options.threshold,
        through=options.through,
        choosing=options.choosing,
        chat=options.chat,
        new_tokens={task: new_tokens(task) for task in options.tasks},
        text=bench.texts.get("text", (None,))[0],
        calibration_text=bench.texts["calibration_text"][0] if bench.calibrated else None,
        samples=options.samples,
        sample_length=options.sample_length,
        cells=tuple(
            bench.cell(cache, *place) for cache in bench.caches for place in bench.places(cache)
        ),
    )
    report.write(options.json)
    bench.clean()


def _command(options: argparse.Namespace) -> list[str]:
    """Return the command's words; files by their names, which tell nothing of a machine."""
    words = ["laboratory.quality.long_context", *model_words(options.model)]
    for name, value in vars(options).items():
        if value is None or value is False or name in ("model", "batch", "work"):
            continue
        values = [] if value is True else value if isinstance(value, (list, tuple)) else [value]
        words += [
            f"--{name.replace('_', '-')}",
            *(one.name if isinstance(one, pathlib.Path) else str(one) for one in values),
        ]
    return words


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser()
    options = parser.parse_args(argv)
    try:
        run(options)
    except (ValueError, OSError, UserError) as error:
        parser.exit(2, f"{error}\n")
    print(options.json)


if __name__ == "__main__":
    main()

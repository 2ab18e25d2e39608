"""Decode a million steps through the same few caches, and see that nothing grows and that they
still give the bits of a new cache.

A round prefills prompts into a cache that was trimmed to nothing, and then decodes segments of
sampled tokens; between two segments every row is trimmed, now by a few tokens as speculative
decoding does, now by many as a chat that goes back a turn. All draws of a round follow from its
number. After some of the rounds, the same round runs in a cache that was never used: every bit of
all of its logits must be equal.

    python -m laboratory.soak --steps 1000000 --json soak.json --work runs/soak

A run that was stopped goes on where it was, with its caches read from the folder of --work.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt32
from tqdm import tqdm

import kvq_jax as kvq
from benchmarks.markdown import head, table
from benchmarks.model_names import model_words, shown
from benchmarks.report_file import Report, from_json, header
from benchmarks.resources import resident_bytes
from kvq_models import Llama, decode_step, load_llama, prefill, prepare
from kvq_models.inference.method_parameters import parameters_for
from kvq_tools.evaluation.journal import Journal
from kvq_tools.evaluation.program_memory import mappings
from laboratory.study import run_study, study_parser

CACHES = ("innerq:bits=2", "kivi:bits=2", "polarquant")
BATCH, CAPACITY, PROMPT = 2, 384, 64
SEGMENT, SEGMENTS = 50, 20  # steps of one program; of them in a round
ROUNDS = 10  # after each ten rounds the last is compared with a new cache, and all is saved
LINES = 12  # of the page's table
COMPILED = "/jax/core/compile/backend_compile_duration"
Digest = UInt32[Array, ""]
S = TypeVar("S")


@dataclasses.dataclass(frozen=True)
class Sample:
    """What the process held after `steps` decode steps of the run and `trims` of rows.

    process: counts the starts of the run, from 0. programs: compiled since the process started.
    checked: rounds that were compared with a new cache, of the whole run; different: those of them
    that were not equal. seconds: of the process.
    """

    steps: int
    trims: int
    process: int
    seconds: float
    resident_bytes: int
    mappings: int
    programs: int
    checked: int
    different: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoakReport(Report):
    """The samples in order. steps: the number asked for; the last sample has the number done."""

    model: str
    steps: int
    caches: tuple[str, ...]
    batch: int
    capacity: int
    segment: int
    samples: tuple[Sample, ...]


@functools.partial(jax.jit, donate_argnames="cache")
def segment(
    llama: Llama, cache: kvq.cache.Cache, token: Int[Array, "B"], key: Array
) -> tuple[Digest, kvq.cache.Cache]:
    """Decode SEGMENT steps: `token`, then what is sampled. Return (a sum over all bits of their
    logits, the cache)."""

    def one(
        carry: tuple[kvq.cache.Cache, Array, Array], step: Array
    ) -> tuple[tuple[kvq.cache.Cache, Array, Array], None]:
        cache, token, digest = carry
        logits, cache = decode_step(llama, cache, token)
        token = jax.random.categorical(jax.random.fold_in(key, step), logits).astype(jnp.int32)
        return (cache, token, digest * jnp.uint32(31) + digest_of(logits)), None

    (cache, _, digest), _ = lax.scan(one, (cache, token, jnp.uint32(0)), jnp.arange(SEGMENT))
    return digest, cache


@jax.jit
def digest_of(logits: Float[Array, "B V"]) -> Digest:
    """Return a sum, modulo 2^32, over the bits of the logits, each with an odd weight of its own:
    no single entry changes unseen."""
    bits = lax.bitcast_convert_type(logits, jnp.uint32)
    weights = 2 * lax.iota(jnp.uint32, bits.size).reshape(bits.shape) + jnp.uint32(1)
    return jnp.sum(bits * weights, dtype=jnp.uint32)


trim = jax.jit(kvq.rows.trim, donate_argnames="cache")


class Soak:
    """The caches of a run, each with its model, and how a round goes through one of them."""

    def __init__(self, model: str, specs: Sequence[str]):
        llama, _ = load_llama(model, dtype="float32", weights="dense")
        self.specs = tuple(str(kvq.parse(spec)) for spec in specs)
        self.llamas = [prepare(llama, spec) for spec in self.specs]
        self.caches = [self.new(i) for i in range(len(specs))]

    def new(self, i: int) -> kvq.cache.Cache:
        return kvq.init_cache(self.specs[i], self.llamas[i].config, BATCH, CAPACITY)

    def trimmed(
        self, i: int, cache: kvq.cache.Cache, lengths: Int[np.ndarray, "B"]
    ) -> kvq.cache.Cache:
        return trim(cache, lengths.astype(np.int32), parameters_for(self.llamas[i], cache.spec))

    def round(
        self, number: int, i: int, cache: kvq.cache.Cache
    ) -> tuple[list[int], kvq.cache.Cache]:
        """Run a round through a cache of spec i. Return (the digests of its prompt and of its
        segments, the cache)."""
        draw, llama = np.random.default_rng(number), self.llamas[i]
        tokens = draw.integers(0, llama.config.vocab_size, (BATCH, PROMPT), np.int32)
        lengths = np.array([PROMPT, *draw.integers(1, PROMPT, BATCH - 1)], np.int32)
        logits, cache = prefill(llama, self.trimmed(i, cache, np.zeros(BATCH)), tokens, lengths)
        digests = [digest_of(logits)]
        for part in range(SEGMENTS):
            token = draw.integers(0, llama.config.vocab_size, BATCH, np.int32)
            digest, cache = segment(llama, cache, token, jax.random.key(number * SEGMENTS + part))
            digests.append(digest)
            lengths = np.maximum(
                np.minimum(
                    lengths + SEGMENT - draw.integers(0, draw.choice((6, 2 * SEGMENT)), BATCH),
                    CAPACITY - SEGMENT,
                ),
                1,
            )
            cache = self.trimmed(i, cache, lengths)
        return [int(digest) for digest in digests], cache

    def compare(self, number: int, i: int, digests: list[int]) -> str:
        """Run the round again in a new cache. Return what differs, or ""."""
        again, _ = self.round(number, i, self.new(i))
        first = next(
            (
                part
                for part, pair in enumerate(zip(digests, again, strict=True))
                if pair[0] != pair[1]
            ),
            None,
        )
        return (
            ""
            if first is None
            else f"round {number}, {self.specs[i]}: {f'segment {first}' if first else 'the prompt'}"
        )

    def save(self, folder: pathlib.Path) -> None:
        for i, cache in enumerate(self.caches):
            kvq.files.save(cache, folder / f"cache{i}.safetensors")

    def load(self, folder: pathlib.Path) -> None:
        """Take the caches that an earlier process saved, if there are any."""
        for i, spec in enumerate(self.specs):
            file = folder / f"cache{i}.safetensors"
            if file.exists():
                self.caches[i] = kvq.files.load(
                    file, spec=spec, config=self.llamas[i].config, capacity=CAPACITY
                )


def run(options: argparse.Namespace) -> SoakReport:
    """Run until `--steps` steps are done; the report is written after each sample. Raises
    ValueError if the folder of --work belongs to another run, or no step is asked for."""
    if options.steps < 1:
        raise ValueError("--steps must be at least 1")
    started, programs = time.monotonic(), [0]

    def count(event: str, duration_secs: float, **__: Any) -> None:
        programs[0] += event == COMPILED

    jax.monitoring.register_event_duration_secs_listener(count)
    soak = Soak(options.model, options.cache)
    identity = {
        "model": shown(options.model),
        "caches": soak.specs,
        "batch": BATCH,
        "capacity": CAPACITY,
        "segment": SEGMENT,
    }
    options.work.mkdir(parents=True, exist_ok=True)
    journal = Journal(options.work / "journal.jsonl", identity)
    soak.load(options.work)
    samples = [from_json(Sample, row) for row in journal.rows.values()]
    last = samples[-1] if samples else Sample(0, 0, -1, 0, 0, 0, 0, 0, ())
    process, checked, different, per_round = (
        last.process + 1,
        last.checked,
        last.different,
        SEGMENT * SEGMENTS,
    )
    first = last.steps // per_round
    words = ["laboratory.soak", *model_words(options.model), f"--steps {options.steps}"]
    words += [f"--cache {' '.join(options.cache)}"] if tuple(options.cache) != CACHES else []
    words += [f"--json {options.json.name}", f"--work {options.work.name}"]
    rounds = -(-options.steps // per_round)
    for number in (
        bar := tqdm(
            range(first, rounds),
            initial=first,
            total=rounds,
            unit="round",
            desc="soak",
            mininterval=1,
        )
    ):
        i, done = number % len(soak.specs), number + 1
        digests, soak.caches[i] = soak.round(number, i, soak.caches[i])
        if done % ROUNDS and done < rounds:
            continue
        difference = soak.compare(number, i, digests)
        checked, different = checked + 1, (*different, *([difference] if difference else []))
        soak.save(options.work)
        resources = round(time.monotonic() - started, 1), resident_bytes(), mappings(), programs[0]
        samples.append(
            Sample(
                done * per_round, done * SEGMENTS * BATCH, process, *resources, checked, different
            )
        )
        journal.add(str(done), dataclasses.asdict(samples[-1]))
        _report(words, options.steps, identity, samples).write(options.json)
        bar.set_postfix_str(
            f"{resources[1] >> 20} MiB, {programs[0]} programs, {len(different)} different"
        )
    return _report(words, options.steps, identity, samples)


def _report(
    words: Sequence[str], steps: int, identity: dict[str, Any], samples: Sequence[Sample]
) -> SoakReport:
    return SoakReport(
        title="Decode steps without end",
        **header(words),
        steps=steps,
        **identity,
        samples=tuple(samples),
    )


def page(report: SoakReport, file: pathlib.Path) -> str:
    """Render what was held over time, and what differed from a new cache."""
    last, caches = report.samples[-1], ", ".join(f"`{cache}`" for cache in report.caches)
    said = (
        f"{last.steps:,} of {report.steps:,} decode steps of {report.batch} rows of {report.model}"
        f" through {caches}, in turns of a round each. A cache has {report.capacity} tokens; rows"
        f" were trimmed {last.trims:,} times. {last.checked:,} rounds were run again in a new"
        " cache."
    )
    wrong = (
        [f"Not equal: {'; '.join(last.different)}."]
        if last.different
        else ["All logits of these rounds were equal, bit for bit."]
    )
    names = (
        "steps",
        "trims of a row",
        "process",
        "seconds",
        "resident",
        "memory mappings",
        "programs compiled",
        "compared",
        "different",
    )
    lines = map(_line, spaced(report.samples))
    return "\n\n".join([*head(report, file, said, *wrong), table(names, lines)])


def spaced(samples: Sequence[S]) -> list[S]:
    """Return LINES of the samples, or all if there are fewer, at equal distances."""
    places = {round(i * (len(samples) - 1) / (LINES - 1)) for i in range(LINES)}
    return [samples[i] for i in sorted(places)]


def _line(sample: Sample) -> tuple[str, ...]:
    numbers = (
        f"{sample.mappings:,}",
        f"{sample.programs}",
        f"{sample.checked:,}",
        f"{len(sample.different)}",
    )
    return (
        f"{sample.steps:,}",
        f"{sample.trims:,}",
        f"{sample.process}",
        f"{sample.seconds:,.0f}",
        f"{sample.resident_bytes / 2**20:.0f} MiB",
        *numbers,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = study_parser("laboratory.soak", __doc__)
    parser.add_argument(
        "--steps", type=int, default=1_000_000, help="decode steps, each of a token for every row"
    )
    parser.add_argument("--cache", nargs="+", default=CACHES, help="caches, which take turns")
    parser.add_argument(
        "--work",
        metavar="DIR",
        type=pathlib.Path,
        required=True,
        help="where a run that is stopped leaves its caches",
    )
    run_study(parser, argv, run)


if __name__ == "__main__":
    main()

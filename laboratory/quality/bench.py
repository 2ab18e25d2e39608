"""Run the comparisons of a suite: every cache is read as a decoding model reads it.

Caches that learn are calibrated, on every variant of the model.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

import kvq_jax as kvq
from benchmarks.model_names import add_model, model_words, shown
from benchmarks.progress import progress
from benchmarks.report_file import COMMIT, from_json, header
from kvq_jax.cache.paper_bits import paper_bits
from kvq_jax.files.whole import delete_directory
from kvq_models import Llama, load_llama, prepare, resolved
from kvq_models.calibration.fingerprint import partial_fingerprint
from kvq_models.calibration.fit import calibrate
from kvq_models.calibration.needs import needs
from kvq_tools.evaluation import RowQuality, measure_rows
from kvq_tools.evaluation.journal import Journal
from laboratory.quality.comparison import PLAIN, Comparison, Entry, Suite
from laboratory.quality.report import Measured, QualityReport, QualityRow, Text

TEXTS = "text", "calibration_text", "other_calibration_text"
SIZES = "windows", "window", "prompt", "samples", "length"
TOGETHER = 6  # caches that are compared with one run of the full-precision model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that a `Bench` reads."""
    add_model(parser)
    parser.add_argument(
        "--text", metavar="FILE", type=pathlib.Path, required=True, help="the text that is scored"
    )
    parser.add_argument(
        "--calibration-text",
        metavar="FILE",
        type=pathlib.Path,
        required=True,
        help="the calibration text",
    )
    parser.add_argument(
        "--other-calibration-text",
        metavar="FILE",
        type=pathlib.Path,
        help="another such text, where a table compares two",
    )
    parser.add_argument(
        "--json", metavar="FILE", type=pathlib.Path, required=True, help="where the rows go"
    )
    parser.add_argument(
        "--windows", type=int, default=12, help="windows of the text; intervals are over them"
    )
    parser.add_argument("--window", type=int, default=768, help="tokens of a window")
    parser.add_argument(
        "--prompt",
        type=int,
        default=256,
        help="tokens of a window that are a prompt, and not scored",
    )
    parser.add_argument("--samples", type=int, default=16, help="calibration samples")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a calibration sample")
    parser.add_argument(
        "--work",
        metavar="DIR",
        type=pathlib.Path,
        help="keep calibration samples here, for other runs (default: no)",
    )


class Wanted(NamedTuple):
    """One cache to measure: its spec as text, whether it is calibrated on the other text, the
    model's variant, and how it is run."""

    cache: str
    other_text: bool
    variant: str
    fake: bool

    @property
    def key(self) -> str:
        return json.dumps(self)


class Bench:
    """The model, its variants and texts, and the calibrations and measurements so far. None is made
    twice."""

    def __init__(
        self,
        options: argparse.Namespace,
        variants: Mapping[str, Callable[[Llama], Llama]] | None = None,
    ):
        plain, self.tokenizer = load_llama(options.model, dtype="float32", weights="dense")
        self.models: dict[str, Llama] = {PLAIN: plain}
        self.variants = variants or {}
        self.name = f"{shown(options.model)}, {_heads(plain)}"
        self.options = options
        self.work = options.work or options.json.with_name(f"{options.json.stem}.unfinished")
        self.texts = {
            name: self._read(getattr(options, name)) for name in TEXTS if getattr(options, name)
        }
        self.rows = self._windows()
        texts = {name: text.sha256 for name, (text, _) in self.texts.items()}
        sizes = {name: getattr(options, name) for name in SIZES}
        self.journal = Journal(
            self.work / f"{options.json.stem}.jsonl",
            {"model": partial_fingerprint(plain), **texts, **sizes},
        )

    def _read(self, path: pathlib.Path) -> tuple[Text, np.ndarray]:
        text = path.read_text(encoding="utf-8")
        ids = np.asarray(self.tokenizer(text, verbose=False).input_ids, np.int32)
        return Text(path.name, hashlib.sha256(text.encode()).hexdigest(), len(ids)), ids

    def _windows(self) -> Int[Array, "B T"]:
        """Return windows of the text, equally spaced, each after the token that opens every text,
        if the tokenizer has one."""
        ids, opened = self.texts["text"][1], 0
        if len(ids) and ids[0] == self.tokenizer.bos_token_id:
            opened = 1
        width = self.options.window - opened
        if len(ids) < self.options.windows * width + opened:
            raise ValueError(
                f"{self.options.text} has {len(ids)} tokens, fewer than {self.options.windows}"
                f" windows of {width}"
            )
        starts = np.linspace(opened, len(ids) - width, self.options.windows).astype(int)
        return jnp.asarray(
            np.stack([np.concatenate([ids[:opened], ids[s : s + width]]) for s in starts])
        )

    def model(self, variant: str) -> Llama:
        if variant not in self.models:
            self.models[variant] = self.variants[variant](self.models[PLAIN])
        return self.models[variant]

    def prepared(self, wanted: Wanted) -> tuple[Llama, str]:
        """Return the variant with the parameters that the cache needs, and the cache with what its
        calibration decides."""
        llama, spec = self.model(wanted.variant), kvq.parse(wanted.cache)
        if not needs(spec, llama.config):
            return prepare(llama, spec), wanted.cache
        name = "other_calibration_text" if wanted.other_text else "calibration_text"
        sizes = {"samples": self.options.samples, "length": self.options.length}
        work = self.work / wanted.variant.replace(" ", "_") / name
        progress(f"{wanted.cache}: calibrating on {self.texts[name][0].name}")
        calibration = calibrate(
            llama, self.texts[name][1], spec, work=work, text=self.texts[name][0].name, **sizes
        )
        return prepare(llama, spec, calibration), str(resolved(spec, calibration))

    def measure(self, wanted: Iterable[Wanted]) -> None:
        """Measure what the journal does not hold, a line of progress for each cache."""
        wanted = list(dict.fromkeys(wanted))
        missing = [one for one in wanted if one.key not in self.journal.rows]
        progress(f"{len(wanted)} caches, {len(wanted) - len(missing)} of them measured before")
        for _, alike in itertools.groupby(sorted(missing, key=_run_alike), key=_run_alike):
            remaining = list(alike)
            for at in range(0, len(remaining), TOGETHER):
                self._measure_together(remaining[at : at + TOGETHER])

    def _measure_together(self, wanted: Sequence[Wanted]) -> None:
        """Measure caches of one variant that are run alike, beside one full-precision model. Their
        rows go into the journal."""
        candidates = [self.prepared(one) for one in wanted]
        mode = "fake" if wanted[0].fake else "decode"
        qualities = measure_rows(candidates, self.rows, prompt=self.options.prompt, mode=mode)
        for (model, cache), one, quality in zip(candidates, wanted, qualities, strict=True):
            measured = _measured(cache, model, quality, self.options.window)
            self.journal.add(one.key, dataclasses.asdict(measured))
            progress(_progress(one, measured))
        jax.clear_caches()  # programs of other caches are not needed again

    def measured(self, wanted: Wanted) -> Measured:
        return from_json(Measured, self.journal.rows[wanted.key])

    def clean(self) -> None:
        """Delete what an interrupted run needs to go on: this one is complete."""
        self.journal.delete()
        if self.options.work is None:
            delete_directory(self.work)


def run(suite: Suite, options: argparse.Namespace) -> None:
    """Measure everything that an earlier run of the same command has not, write the report, and
    delete what only unfinished runs need."""
    chosen = [c for c in suite.comparisons if options.only is None or options.only in c.title]
    if not chosen:
        titles = "; ".join(c.title for c in suite.comparisons)
        raise ValueError(f"no title contains --only {options.only!r}: {titles}")
    if options.other_calibration_text is None and any(
        entry.other_text for c in chosen for entry in c.entries
    ):
        raise ValueError(
            "a table of this suite compares calibration texts: give --other-calibration-text"
        )
    variants = suite.variants if options.stressed else {}
    bench = Bench(options, variants)
    places = [
        place
        for comparison in chosen
        for place in _places(comparison, (PLAIN, *variants), not options.no_fake)
    ]
    bench.measure(w for _, _, w in places)
    rows = []
    for comparison, entry, w in places:
        fields = {**dataclasses.asdict(entry), **dataclasses.asdict(bench.measured(w))}
        rows.append(QualityRow(table=comparison.title, variant=w.variant, fake=w.fake, **fields))
    report = QualityReport(
        title=suite.title,
        **header(_command(options)),
        model=f"{bench.name}, float32",
        windows=options.windows,
        window=options.window,
        prompt=options.prompt,
        samples=options.samples,
        sample_length=options.length,
        heads={c.title: c.heads for c in chosen},
        against={c.title: c.against for c in chosen if c.against},
        rows=tuple(rows),
        text=bench.texts["text"][0],
        calibration_text=bench.texts["calibration_text"][0],
        other_calibration_text=bench.texts.get("other_calibration_text", (None,))[0],
    )
    report.write(options.json)
    bench.clean()


def _places(
    comparison: Comparison, variants: Sequence[str], with_fakes: bool
) -> Iterator[tuple[Comparison, Entry, Wanted]]:
    """Yield what has to be measured for each entry of a table."""
    for variant in variants if comparison.stressed else (PLAIN,):
        for entry, fake in itertools.product(
            comparison.entries, (False, True) if comparison.fake and with_fakes else (False,)
        ):
            yield (
                comparison,
                entry,
                Wanted(str(kvq.parse(entry.cache)), entry.other_text, variant, fake),
            )


def _run_alike(wanted: Wanted) -> tuple[bool, str, bool]:
    return wanted.variant != PLAIN, wanted.variant, wanted.fake


def _measured(cache: str, llama: Llama, quality: RowQuality, window: int) -> Measured:
    spec = kvq.parse(cache)
    return Measured(
        stored_bits=kvq.size.body_bits_per_element(spec, llama.config),
        paper_bits=paper_bits(spec, llama.config, window),
        outlier_fraction=kvq.size.outlier_fraction(spec, llama.config),
        dropped=quality.dropped,
        cache_bytes=kvq.size.nbytes(kvq.cache.layout(spec, llama.config, 1, window, "bfloat16")),
        tokens=len(quality.kl) * quality.tokens,
        nats=float(quality.nats.mean()),
        kl=float(quality.kl.mean()),
        agreement=float(quality.agreement.mean()),
        window_nats=tuple(quality.nats.tolist()),
        window_kl=tuple(quality.kl.tolist()),
        commit=COMMIT,
    )


def _progress(wanted: Wanted, measured: Measured) -> str:
    """Render the line that is shown when a cache was measured."""
    run = f"{wanted.variant}{', fake' if wanted.fake else ''}"
    return (
        f"{run:15s} {wanted.cache:60s} perplexity {measured.perplexity:9.3f}  KL {measured.kl:.5f}"
    )


def _heads(llama: Llama) -> str:
    config = llama.config
    return (
        f"{config.num_hidden_layers} layers, {config.num_attention_heads} query heads on"
        f" {config.num_key_value_heads} KV heads"
    )


def words_of(options: argparse.Namespace) -> list[str]:
    """Return the command's words for the arguments of `add_arguments`. Files have their names,
    without a machine's folders."""
    values = {name.replace("_", "-"): getattr(options, name) for name in (*TEXTS, *SIZES, "json")}
    return [
        *model_words(options.model),
        *(
            f"--{name} {getattr(value, 'name', value)}"
            for name, value in values.items()
            if value is not None
        ),
    ]


def _command(options: argparse.Namespace) -> list[str]:
    only = [] if options.only is None else [f"--only '{options.only}'"]
    chosen = [
        f"--{name.replace('_', '-')}" for name in ("stressed", "no_fake") if getattr(options, name)
    ]
    return [options.module, options.suite, *words_of(options), *chosen, *only]

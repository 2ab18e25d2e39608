"""Run the comparisons of a suite: every cache read as a model that decodes reads it, calibrated where it must be, on every variant."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import pathlib
import sys
import tempfile

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

import kvq_jax as kvq
from benchmarks.quality.comparison import PLAIN, VARIANTS, Entry, Suite
from benchmarks.quality.report import Measured, QualityReport, QualityRow, Text
from benchmarks.report_file import header
from kvq_jax.cache.paper_bits import paper_bits
from kvq_models import EMBEDDED, Llama, load_llama, prepare
from kvq_models.calibration.fit import calibrate
from kvq_models.calibration.needs import needs
from kvq_tools.evaluation import measure
from kvq_tools.evaluation.stress import stressed


class Bench:
    """The model, its variants and texts. What was calibrated and measured once is not done again."""

    def __init__(self, options: argparse.Namespace, work: pathlib.Path):
        plain, self.tokenizer = load_llama(options.model, dtype="float32")
        self.variants: dict[str, Llama] = {PLAIN: plain}
        self.name = "the embedded Llama" if options.model == EMBEDDED else f"{options.model.name}, {_heads(plain)}"
        self.options, self.work = options, work
        self.calibrated: dict[tuple[str, bool, str], Llama] = {}
        self.measured: dict[tuple[str, bool, str], Measured] = {}
        self.texts = {name: self._read(getattr(options, name)) for name in ("text", "calibration_text", "other_calibration_text")}

    def _read(self, path: pathlib.Path) -> tuple[Text, np.ndarray]:
        text = path.read_text(encoding="utf-8")
        ids = np.asarray(self.tokenizer(text, verbose=False).input_ids, np.int32)
        return Text(path.name, hashlib.sha256(text.encode()).hexdigest(), len(ids)), ids

    def rows(self) -> Int[Array, "B T"]:
        """Return windows of the text, equally spaced, each after the token that opens every text."""
        ids, width = self.texts["text"][1], self.options.window - 1
        if len(ids) < self.options.windows * width:
            raise ValueError(f"{self.options.text} has {len(ids)} tokens, fewer than {self.options.windows} windows of {width}")
        starts = np.linspace(1, len(ids) - width, self.options.windows).astype(int)
        windows = np.stack([np.concatenate([ids[:1], ids[s : s + width]]) for s in starts])
        return jnp.asarray(windows)

    def model(self, variant: str) -> Llama:
        if variant not in self.variants:
            stress = VARIANTS[variant]
            assert stress is not None
            self.variants[variant] = stressed(self.variants[PLAIN], stress)
        return self.variants[variant]

    def prepared(self, spec: kvq.CacheSpec, other_text: bool, variant: str) -> Llama:
        """Return the variant with the parameters that the cache needs."""
        llama = self.model(variant)
        if not needs(spec, llama.config):
            return prepare(llama, spec)
        key = str(spec), other_text, variant
        if key not in self.calibrated:
            name = "other_calibration_text" if other_text else "calibration_text"
            sizes = {"samples": self.options.samples, "length": self.options.length}
            work = self.work / variant.replace(" ", "_") / name
            found = calibrate(llama, self.texts[name][1], spec, work=work, text=self.texts[name][0].name, **sizes)
            self.calibrated[key] = prepare(llama, spec, found)
        return self.calibrated[key]

    def measure(self, entry: Entry, variant: str) -> Measured:
        spec = kvq.parse(entry.cache)
        key = str(spec), entry.other_text, variant
        if key not in self.measured:
            llama, window = self.prepared(spec, entry.other_text, variant), self.options.window
            self.measured[key] = Measured(
                stored_bits=kvq.body_bits_per_element(spec, llama.config),
                paper_bits=paper_bits(spec, llama.config, window),
                outlier_fraction=kvq.outlier_fraction(spec, llama.config),
                cache_bytes=kvq.nbytes(kvq.layout(spec, llama.config, 1, window, "bfloat16")),
                **dataclasses.asdict(measure(llama, spec, self.rows(), self.options.prompt)),
            )
        return self.measured[key]


def run(suite: Suite, options: argparse.Namespace) -> QualityReport:
    """Measure everything; a line of progress for each row."""
    chosen = [c for c in suite.comparisons if options.only is None or options.only in c.title]
    rows: list[QualityRow] = []
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(options, pathlib.Path(work))
        bench.rows()  # refuses a short text before the first minutes are spent
        for comparison in chosen:
            for variant in VARIANTS if comparison.stressed else (PLAIN,):
                for entry in comparison.entries:
                    found = bench.measure(entry, variant)
                    fields = {**dataclasses.asdict(entry), **dataclasses.asdict(found)}
                    rows.append(QualityRow(table=comparison.title, variant=variant, **fields))
                    _print_row(rows[-1])
        return QualityReport(
            title=suite.title,
            **header(_command(options)),
            model=f"{bench.name}, float32",
            window=options.window,
            prompt=options.prompt,
            samples=options.samples,
            sample_length=options.length,
            heads={c.title: c.heads for c in chosen},
            rows=tuple(rows),
            text=bench.texts["text"][0],
            calibration_text=bench.texts["calibration_text"][0],
            other_calibration_text=bench.texts["other_calibration_text"][0],
        )


def _print_row(row: QualityRow) -> None:
    label = " ".join(filter(None, (*row.cells, row.column)))
    print(f"{row.variant:15s} {label:45s} perplexity {row.perplexity:9.3f}  KL {row.kl:.5f}", file=sys.stderr, flush=True)


def _heads(llama: Llama) -> str:
    config = llama.config
    return f"{config.num_hidden_layers} layers, {config.num_attention_heads} query heads on {config.num_key_value_heads} KV heads"


def _command(options: argparse.Namespace) -> list[str]:
    """Return the words of the command line, files by their names."""
    texts = (f"--{name.replace('_', '-')} {getattr(options, name).name}" for name in ("text", "calibration_text", "other_calibration_text"))
    sizes = (f"--{name} {getattr(options, name)}" for name in ("windows", "window", "prompt", "samples", "length"))
    model = [] if options.model == EMBEDDED else [f"--model {options.model.name}"]
    return ["benchmarks.quality", options.suite, *model, *texts, *sizes, f"--json {options.json.name}"]

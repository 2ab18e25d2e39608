"""Measure variants of waterfill on texts of several domains, calibrated on others.

Windows are read as the protocol reads a cache after a prompt, with its exact tokens, in one
simulated pass (laboratory/waterfill/simulation.py). Variants are those of
laboratory/waterfill/table.py. Each row is printed as it is measured: name, stored bits, the rows
that it is fitted to, KL of each text, and their mean. Rows are written at once, and a run that is
stopped continues.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import pathlib
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.model_names import shown
from benchmarks.progress import progress
from benchmarks.protocol.code_text import code_text
from benchmarks.report_file import Report, arguments, header
from kvq_jax.files import whole
from kvq_models import load_llama
from kvq_tools.evaluation.protocol import Sizes, cut, tokenized
from laboratory.study import study_parser
from laboratory.waterfill import moments
from laboratory.waterfill.moments import BothSides
from laboratory.waterfill.registry import Cache
from laboratory.waterfill.simulation import Quantizer, Scene, kl_through, scene_of
from laboratory.waterfill.table import ENTRIES, OWN, TEXT, Entry

CACHES = {"turboquant:bits=3": 3.25, "turboquant:bits=4": 4.25, "kivi:bits=2": 3.0, "int4": 4.25}


@dataclasses.dataclass(frozen=True)
class VariantRow:
    """One variant: KL of each window, in the order of the texts."""

    name: str
    bits: float
    rows: str
    window_kl: tuple[float, ...]

    @property
    def key(self) -> tuple[str, float, str]:
        return self.name, self.bits, self.rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariantsReport(Report):
    """Rows, and what they were measured on. domains: of the texts, in their order."""

    model: str
    domains: tuple[str, ...]
    texts: tuple[str, ...]
    calibration_text: str
    windows: int
    context: int
    scored: int
    samples: int
    length: int
    rows: tuple[VariantRow, ...] = ()


class Study:
    """The model, scenes of the scored texts and moments of the others, kept in a directory."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.llama, self.tokenizer = load_llama(options.model, dtype="float32", weights="dense")
        self.scored = dict(map(_text, options.text))
        options.work.mkdir(parents=True, exist_ok=True)
        self.scenes = {domain: self._scene(domain) for domain in self.scored}
        self.learned = self._calibrated()

    def _scene(self, domain: str) -> Scene:
        options = self.options
        text = self.scored[domain][1]
        sizes = Sizes(options.context, options.scored, options.windows)
        file = self._file("scene", text, sizes)
        if not file.is_file():
            windows = cut(
                tokenized(self.tokenizer, domain, text), sizes, self.tokenizer.bos_token_id
            )
            scene = scene_of(self.llama, windows, options.context)
            whole.write(file, pickle.dumps(scene))
        return pickle.loads(file.read_bytes())

    def _calibrated(self) -> BothSides:
        """Return the moments of the calibration text."""
        options = self.options
        text = options.calibration_text.read_text(encoding="utf-8")
        file = self._file("moments", text, (options.samples, options.length))
        if not file.is_file():
            ids = tokenized(self.tokenizer, "", text).ids
            progress("running the calibration samples")
            moments.save(moments.of_text(self.llama, ids, options.samples, options.length), file)
        return moments.load(file)

    def _file(self, kind: str, text: str, sizes: object) -> pathlib.Path:
        digest = hashlib.sha256(f"{sizes} {text}".encode()).hexdigest()[:16]
        return self.options.work / f"{kind}_{digest}"

    def fitted_to(self, rows: str, domain: str) -> BothSides:
        """Return the moments that a variant is fitted to if this domain is scored."""
        if rows == TEXT:
            return self.learned
        names = [name for name in self.scenes if (name == domain) == (rows == OWN)]
        parts = [
            moments.with_rows(self.learned, scene.keys, scene.values)
            for scene in map(self.scenes.__getitem__, names)
        ]
        return moments.mixed(parts if rows == OWN else [self.learned, *parts])

    def measured(self, entry: Entry, bits: float) -> VariantRow:
        quantizers = {
            domain: entry.quantizer(
                self.fitted_to(entry.rows, domain),
                bits,
                self.fitted_to(entry.scales, domain) if entry.scales else None,
            )
            for domain in self.scenes
        }
        return self._row(entry, bits, quantizers)

    def cache(self, spec: str) -> VariantRow:
        """Measure a cache of the registry that learns nothing."""
        one = Cache(spec, self.llama.config)
        entry = Entry(spec, rows="")
        return self._row(entry, CACHES[spec], dict.fromkeys(self.scored, one))

    def _row(self, entry: Entry, bits: float, quantizers: dict[str, Quantizer]) -> VariantRow:
        sides, expected = entry.sides, entry.expected
        kl = [
            kl_through(self.llama, scene, quantizers[domain], sides, expected).mean(axis=1)
            for domain, scene in self.scenes.items()
        ]
        return VariantRow(entry.name, bits, entry.rows, tuple(map(float, np.concatenate(kl))))


def _text(words: str) -> tuple[str, tuple[str, str]]:
    """Return (domain, (name, contents)) of DOMAIN=FILE. FILE may be `python`."""
    domain, equals, file = words.partition("=")
    if not equals:
        raise ValueError(f"{words!r} is not a text: write DOMAIN=FILE")
    if file == "python":
        return domain, (file, code_text())
    path = pathlib.Path(file)
    return domain, (path.name, path.read_text(encoding="utf-8"))


def run(options: argparse.Namespace) -> None:
    """Measure the rows that the file lacks, each written at once."""
    study = Study(options)
    report = VariantsReport(
        title=f"Variants of waterfill: {shown(options.model)}",
        **header(["laboratory.waterfill", *_words()]),
        model=shown(options.model),
        domains=tuple(study.scored),
        texts=tuple(name for name, _ in study.scored.values()),
        calibration_text=options.calibration_text.name,
        **{
            name: getattr(options, name)
            for name in ("windows", "context", "scored", "samples", "length")
        },
    )
    if options.json.exists():
        report = dataclasses.replace(report, rows=VariantsReport.read(options.json).rows)
    for spec in options.caches:
        if (spec, CACHES[spec], "") not in {row.key for row in report.rows}:
            report = _add(report, study.cache(spec), options.json)
    by_name = {name: [e for e in ENTRIES if e.name == name] for name in (e.name for e in ENTRIES)}
    for bits in options.bits:
        for entry in (e for name in options.only or by_name for e in by_name[name]):
            key = entry.name, bits, entry.rows
            if key not in {row.key for row in report.rows}:
                report = _add(report, study.measured(entry, bits), options.json)


def _add(report: VariantsReport, row: VariantRow, file: pathlib.Path) -> VariantsReport:
    report = dataclasses.replace(report, rows=(*report.rows, row))
    report.write(file)
    progress(" | ".join(_line(report, row)))
    return report


def _words() -> list[str]:
    """Return the words of the command line, files by their names."""
    return [
        f"{before}{equals}{pathlib.Path(after).name}" if equals else pathlib.Path(before).name
        for before, equals, after in (word.partition("=") for word in arguments(None))
    ]


def _line(report: VariantsReport, row: VariantRow) -> tuple[str, ...]:
    by_domain = np.reshape(row.window_kl, (len(report.domains), -1)).mean(axis=1)
    return (
        row.name,
        f"{row.bits:g}",
        row.rows,
        *(f"{kl:.4f}" for kl in by_domain),
        f"{np.mean(by_domain):.4f}",
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = study_parser("laboratory.waterfill", __doc__)
    add: Any = parser.add_argument
    add("--text", metavar="DOMAIN=FILE", action="append", required=True, help="scored texts")
    add("--calibration-text", metavar="FILE", type=pathlib.Path, required=True)
    add("--work", type=pathlib.Path, required=True, help="folder of what variants share")
    add("--bits", type=float, nargs="*", default=[2.5], help="stored bits of variants")
    add("--caches", nargs="*", choices=tuple(CACHES), default=[], help="caches beside them")
    add("--only", nargs="*", default=[], help="names of variants")
    add("--windows", type=int, default=2, help="windows of each text")
    add("--context", type=int, default=1024, help="tokens of a prompt")
    add(
        "--scored",
        type=int,
        default=128,
        help="tokens after a prompt; all but the first are scored",
    )
    add("--samples", type=int, default=4, help="calibration samples of each text")
    add("--length", type=int, default=1024, help="tokens of a sample")
    options = parser.parse_args(argv)
    try:
        run(options)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()

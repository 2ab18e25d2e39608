"""Plan a run of the protocol from its command: texts, sizes, and rows in their order."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from typing import NamedTuple

import kvq_jax as kvq
from benchmarks.model_names import shown
from benchmarks.protocol import caches, made_plans
from benchmarks.protocol.code_text import code_text
from kvq_models.llama.checkpoint import read_config
from kvq_models.llama.config import LlamaConfig
from kvq_tools.evaluation.protocol import READINGS, Reading, Sizes, windowed
from kvq_tools.evaluation.text import passage

DOMAINS = "encyclopedia", "novel", "code"
SHIPPED = {"code": code_text, "passage": passage}


class Wanted(NamedTuple):
    """One row to measure."""

    cache: str
    own_windows: bool
    context: int
    reading: Reading


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run as its command asks for it.

    Args:
        texts, calibration: (domain, file's name, contents).
        named_texts: the command's words for them, files without a machine's folders.
    """

    model: str
    config: LlamaConfig
    texts: tuple[tuple[str, str, str], ...]
    calibration: tuple[str, str, str] | None
    contexts: tuple[int, ...]
    readings: tuple[Reading, ...]
    scored: int
    windows: int
    caches: tuple[str, ...] | None
    samples: int
    length: int
    json: pathlib.Path
    named_texts: tuple[str, ...]

    @property
    def command(self) -> tuple[str, ...]:
        """Return the words of the command that measures all rows, of every run that chooses some by
        --caches and --readings."""
        words = ["benchmarks.protocol", pathlib.Path(self.model).name, *self.named_texts]
        words.append(f"--contexts {' '.join(map(str, self.contexts))}")
        sizes = ("scored", "windows", *(("samples", "length") if self.calibration else ()))
        words += [f"--{name} {getattr(self, name)}" for name in sizes]
        return (*words, f"--json {self.json.name}")

    @classmethod
    def of(cls, options: argparse.Namespace) -> Plan:
        """Read the texts and the model's configuration. Raises ValueError if a word of --text is
        none, or the configuration is not supported."""
        config = read_config(options.model)
        texts = [_text(words, options.dry_run) for words in options.text]
        if not any(domain == "code" for domain, *_ in texts) and not any(
            domain == "passage" for domain, *_ in texts
        ):
            texts.append(_text("code", options.dry_run))
        return cls(
            options.model,
            config,
            tuple(texts),
            _text(options.calibration_text, options.dry_run) if options.calibration_text else None,
            tuple(options.contexts),
            tuple(reading for reading in READINGS if reading in options.readings),
            options.scored,
            options.windows,
            tuple(options.caches) if options.caches else None,
            options.samples,
            options.length,
            options.json,
            tuple(_named_texts(options)),
        )

    def sizes(self, context: int) -> Sizes:
        return Sizes(context, self.scored, self.windows)

    def spec(self, wanted: Wanted) -> kvq.cache.CacheSpec:
        """Return the cache of a row, with its windows."""
        if wanted.own_windows:
            return kvq.parse(wanted.cache)
        cache = made_plans.spec_of(wanted.cache, shown(self.model))
        return windowed(cache, self.config, self.sizes(wanted.context))


def planned(plan: Plan) -> list[Wanted]:
    """Return all rows, the shorter lengths and the cheaper reading first."""
    rows = [
        Wanted(cache, own_windows, context, reading)
        for context in plan.contexts
        for reading in plan.readings
        for cache, own_windows in (
            caches.listed(context, reading)
            if plan.caches is None
            else [(cache, False) for cache in plan.caches]
        )
    ]
    for context in plan.contexts:
        if plan.sizes(context).width > plan.config.positions:
            raise ValueError(
                f"windows of {plan.sizes(context).width} tokens are beyond the"
                f" {plan.config.positions} positions of {shown(plan.model)}: give shorter"
                " --contexts"
            )
    return rows


def _text(words: str, names_alone: bool) -> tuple[str, str, str]:
    """Return (domain, name, contents) of DOMAIN=FILE, or of a domain that needs no file. A dry run
    reads nothing."""
    domain, equals, file = words.partition("=")
    if not equals:
        if domain not in SHIPPED:
            raise ValueError(
                f"{words!r} is not a text: write DOMAIN=FILE, or {' or '.join(SHIPPED)}"
            )
        name = "Python's standard library" if domain == "code" else "passage.txt"
        return domain, name, "" if names_alone else SHIPPED[domain]()
    path = pathlib.Path(file)
    return domain, path.name, "" if names_alone else path.read_text(encoding="utf-8")


def _named_texts(options: argparse.Namespace) -> list[str]:
    def named(text: str) -> str:
        domain, equals, file = text.partition("=")
        return f"{domain}{equals}{pathlib.Path(file).name if equals else ''}"

    words = [f"--text {named(text)}" for text in options.text]
    if options.calibration_text:
        words.append(f"--calibration-text {named(options.calibration_text)}")
    return words

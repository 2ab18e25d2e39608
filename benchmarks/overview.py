"""Size and quality of a dozen caches in one table: bytes of an 8B model's cache, and KL to full
precision on a small model.

Sizes are counted from a cache's layout at the dimensions of Llama 3.1 8B, exactly. KL is measured
through the real cache: tokens of the text go one after the other through windows and codes, as in
generation, after a prompt that gives methods their statistics. Every cache has its method's default
windows. What a method must learn from a text it learns from another one.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

import kvq_jax as kvq
from benchmarks import llama_8b
from benchmarks.markdown import bracket, head, table, with_interval
from benchmarks.quality.bench import Bench, Wanted, add_arguments, words_of
from benchmarks.quality.comparison import PLAIN
from benchmarks.quality.report import Measured
from benchmarks.report_file import Report, header
from kvq_models import LlamaConfig
from kvq_tools.report.verdict import Choice, sentence

CONTEXT = 32768
CACHES = (
    "dense",
    "int4",
    "nf4",
    "kivi:bits=4",
    "kivi:bits=2",
    "innerq:bits=2",
    "innerq:bits=2,mode=sym",
    "kvquant:bits=3",
    "squat:bits=2",
    "squat_pre:bits=2,rank=60",
    "k=polarquant+v=kivi:bits=4",
    "xquant:bits=4",
    "xquant_cl:bits=2",
    "turboquant:bits=3",
    "waterfill:bits=2.5",
    "waterfill:bits=4",
)


@dataclasses.dataclass(frozen=True)
class OverviewRow:
    """Size of one cache of the large model, and its quality on the small one.

    stored_bits, cache_bytes: of the whole cache at the report's context: windows, scales and
        statistics included.
    ratio: bytes of bf16 keys and values over cache_bytes.
    body_share: share of the cached tokens, over all scored positions, that were read from the
        cache's body, which every method but `dense` quantizes.
    measured: quality on the small model.
    """

    cache: str
    stored_bits: float
    cache_bytes: int
    ratio: float
    body_share: float
    measured: Measured


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverviewReport(Report):
    """Rows and what they were measured on. Of each window the first `prompt` tokens are prefilled,
    and the others scored."""

    sized_model: str
    context: int
    measured_model: str
    text: str
    calibration_text: str
    window: int
    prompt: int
    rows: tuple[OverviewRow, ...]


def size(cache: str, config: LlamaConfig, context: int) -> dict[str, Any]:
    """Count the bytes of a cache of one sequence that is `context` tokens long."""
    stored = kvq.nbytes(kvq.layout(cache, config, 1, context, "bfloat16"))
    return {
        "stored_bits": kvq.bits_per_element(cache, config, context),
        "cache_bytes": stored,
        "ratio": kvq.dense_nbytes(config, 1, context) / stored,
    }


def body_share(
    cache: str, config: LlamaConfig, window: int, positions: Int[np.ndarray, " n"]
) -> float:
    """Return the share of the tokens before these positions that lie in the body, averaged over
    layers."""
    plans = kvq.layout(cache, config, 1, window).plans
    return float(
        np.mean(
            [
                np.asarray(plan.regions.body(jnp.asarray(positions))).sum() / positions.sum()
                for plan in plans
            ]
        )
    )


def run(options: argparse.Namespace) -> None:
    """Measure everything that an earlier run of the same command has not, and write the report.
    Raises ValueError if the text is too short."""
    bench = Bench(options)
    wanted = [
        Wanted(str(kvq.parse(cache)), other_text=False, variant=PLAIN, fake=False)
        for cache in options.cache
    ]
    bench.measure(wanted)
    config, large = bench.model(PLAIN).config, llama_8b.llama_config()
    positions = np.arange(options.prompt + 1, options.window)
    rows = tuple(
        OverviewRow(
            cache=cache,
            **size(cache, large, CONTEXT),
            body_share=body_share(cache, config, options.window, positions),
            measured=bench.measured(one),
        )
        for cache, one in zip(options.cache, wanted, strict=True)
    )
    chosen = () if tuple(options.cache) == CACHES else ("--cache", *options.cache)
    report = OverviewReport(
        title="Caches at a glance",
        **header(["benchmarks.overview", *words_of(options), *chosen]),
        sized_model=llama_8b.NAME,
        context=CONTEXT,
        measured_model=f"{bench.name}, float32",
        text=bench.texts["text"][0].name,
        calibration_text=bench.texts["calibration_text"][0].name,
        window=options.window,
        prompt=options.prompt,
        rows=rows,
    )
    report.write(options.json)
    bench.clean()


def readme_table(report: OverviewReport) -> str:
    """Render the table of the project's README."""
    columns = ("cache", "stored bits", "KL", f"{report.context // 1024}K tokens of an 8B model")
    return table(columns, (_readme_line(row) for row in report.rows))


def _readme_line(row: OverviewRow) -> tuple[str, ...]:
    return (
        f"`{row.cache}`",
        f"{row.stored_bits:.2f}",
        f"{row.measured.kl:.4f}",
        f"{row.cache_bytes / 2**30:.2f} GiB",
    )


def verdict(report: OverviewReport) -> str:
    """Say which caches of `readme_table` to take."""
    return sentence(
        [
            Choice(row.stored_bits, row.measured.kl, f"`{row.cache}` (KL {row.measured.kl:.2g})")
            for row in report.rows
        ]
    )


def headline(report: OverviewReport) -> str:
    """Say what the columns of `readme_table` are."""
    return (
        f"Stored bits of an element and bytes are of a whole bf16 cache of {report.sized_model} at"
        f" {report.context} tokens, exactly; KL to full precision is measured on"
        f" {report.measured_model}, through the real cache ([more](overview.md)):"
    )


def page(report: OverviewReport, file: pathlib.Path) -> str:
    """Render the page of the results."""
    columns = (
        "cache",
        "stored bits",
        "GiB",
        "bf16 / cache",
        "KL",
        "perplexity",
        "same top token",
        "bits there",
        "read from the body",
    )
    measured = report.rows[0].measured
    said = (
        "Stored bits of an element, bytes and their ratio to bf16 are of a whole cache of"
        f" {report.sized_model} at {report.context} tokens: windows, scales and statistics"
        " included, counted from its layout. KL to full precision, perplexity and the share of"
        f" equal likeliest tokens are means of {measured.tokens} tokens of {report.text}, read"
        f" through the real cache of {report.measured_model}: {len(measured.window_kl)} windows of"
        f" {report.window} tokens, of each the first {report.prompt} prefilled and the others"
        " decoded one after the other; brackets hold 95 % bootstrap intervals over the windows."
        " Bits there are those of a body element of that smaller model, where fewer elements share"
        " a scale. The last column is the share of the tokens before a scored one that lay in the"
        " cache's body, which all but `dense` quantize. Each cache has its method's default"
        f" windows; `kvquant` and `waterfill` are calibrated on {report.calibration_text}."
    )
    for row in report.rows:
        if "k" in row.measured.dropped:
            said += (
                f" Of the keys' outliers of `{row.cache}` {row.measured.dropped['k']:.1%} found no"
                " slot."
            )
    return "\n\n".join(
        [*head(report, file, said), table(columns, map(_line, report.rows)), verdict(report)]
    )


def _line(row: OverviewRow) -> tuple[str, ...]:
    quality = row.measured
    return (
        f"`{row.cache}`",
        f"{row.stored_bits:.3f}",
        f"{row.cache_bytes / 2**30:.3f}",
        f"{row.ratio:.2f}",
        with_interval(quality.kl, quality.kl_interval, ".5f"),
        f"{quality.perplexity:.3f}{bracket(quality.perplexity_interval, '.2f')}",
        f"{quality.agreement:.2%}",
        f"{quality.stored_bits:.2f}",
        f"{row.body_share:.0%}",
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overview",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_arguments(parser)
    parser.add_argument(
        "--cache", metavar="SPEC", nargs="+", default=CACHES, help="caches to measure"
    )
    options = parser.parse_args(argv)
    try:
        run(options)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{error}\n")
    print(options.json)


if __name__ == "__main__":
    main()

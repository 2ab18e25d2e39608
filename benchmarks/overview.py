"""Size and quality of a dozen caches in one table: bytes of an 8B model's cache, and KL to full precision on the embedded model.

Sizes are counted from a cache's layout at the dimensions of Llama 3.1 8B, exactly. KL is measured through the real cache: tokens of the
text go one after the other through windows and codes, as in generation, after a prompt that gives methods their statistics. Every cache has
its method's default windows. What a method must learn from a text it learns from another one.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

import kvq_jax as kvq
from benchmarks import llama_8b
from benchmarks.markdown import head, table
from benchmarks.report_file import Report, arguments, header
from kvq_models import EMBEDDED, Llama, LlamaConfig, load_llama, prepare
from kvq_models.calibration.fit import calibrate
from kvq_models.calibration.needs import needs
from kvq_tools.evaluation import Evaluation, evaluate_caches

ROOT = pathlib.Path(__file__).parents[1]
TEXT, CALIBRATION_TEXT = "kvq_tools/cli/passage.txt", "LICENSE"  # both lie in the repository
SAMPLES = 16  # of the calibration text, each as long as a window
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
    "squat_pre:bits=2",
    "k=polarquant+v=kivi:bits=4",
    "xquant:bits=4",
    "xquant_cl:bits=2,base_layer=0",
)


@dataclasses.dataclass(frozen=True)
class OverviewRow:
    """Size of one cache of the large model, and its quality on the small one.

    stored_bits, cache_bytes and ratio are of the whole cache at the report's context: windows, scales and statistics included; ratio is
    the bytes of bf16 keys and values over these. body_share: the share of the cached tokens, over all scored positions, that were read
    from the cache's body, where every method but `dense` quantizes. measured_bits: of a body element of the small model.
    """

    cache: str
    stored_bits: float
    cache_bytes: int
    ratio: float
    measured_bits: float
    body_share: float
    kl: float
    perplexity: float
    agreement: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverviewReport(Report):
    """Rows and what they were measured on. Of each window the first `prompt` tokens are prefilled; each token is scored once."""

    sized_model: str
    context: int
    measured_model: str
    text: str
    calibration_text: str
    window: int
    stride: int
    prompt: int
    tokens: int
    rows: tuple[OverviewRow, ...]


def size(cache: str, config: LlamaConfig, context: int) -> dict[str, Any]:
    """Count the bytes of a cache of one sequence that is `context` tokens long."""
    stored = kvq.nbytes(kvq.layout(cache, config, 1, context, "bfloat16"))
    return {
        "stored_bits": kvq.bits_per_element(cache, config, context),
        "cache_bytes": stored,
        "ratio": kvq.dense_nbytes(config, 1, context) / stored,
    }


def body_share(cache: str, config: LlamaConfig, window: int, positions: Int[np.ndarray, " n"]) -> float:
    """Return the share of the tokens before these positions that lie in the body, averaged over layers."""
    plans = kvq.layout(cache, config, 1, window).plans
    return float(np.mean([np.asarray(plan.regions.body(jnp.asarray(positions))).sum() / positions.sum() for plan in plans]))


def prepared(llama: Llama, cache: str, calibration: Int[np.ndarray, " n"], length: int) -> Llama:
    """Return the model with the parameters that the cache needs, calibrated where it must be."""
    if not needs(kvq.parse(cache), llama.config):
        return prepare(llama, cache)
    print(f"{cache}: calibrating", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as work:
        return prepare(llama, cache, calibrate(llama, calibration, cache, samples=SAMPLES, length=length, work=work))


def _shown(items: Sequence[Any], message: str) -> Iterator[Any]:
    for i, item in enumerate(items):
        print(f"[{i + 1}/{len(items)}] {message}", file=sys.stderr, flush=True)
        yield item


def evaluations(
    llama: Llama, text: Int[np.ndarray, " n"], calibration: Int[np.ndarray, " n"], options: argparse.Namespace
) -> tuple[Evaluation, ...]:
    """Measure all caches beside one exact model."""
    candidates = [(prepared(llama, cache, calibration, options.window), cache) for cache in options.cache]
    return evaluate_caches(
        candidates, text, window=options.window, stride=options.window // 2, prompt=options.prompt, mode="decode", progress=_shown
    )


def run(options: argparse.Namespace, command: Sequence[str]) -> OverviewReport:
    """Measure everything. ValueError where the text does not fill a window."""
    llama, tokenizer = load_llama(EMBEDDED, dtype="float32")
    text, calibration = (
        np.asarray(tokenizer((ROOT / name).read_text(encoding="utf-8"), verbose=False).input_ids, np.int32)
        for name in (TEXT, CALIBRATION_TEXT)
    )
    found = evaluations(llama, text, calibration, options)
    large = llama_8b.llama_config()
    rows = tuple(
        OverviewRow(
            cache=cache,
            **size(cache, large, CONTEXT),
            measured_bits=kvq.body_bits_per_element(cache, llama.config),
            body_share=body_share(cache, llama.config, options.window, quality.position),
            kl=quality.mean_kl,
            perplexity=quality.perplexity,
            agreement=quality.agreement,
        )
        for cache, quality in zip(options.cache, found, strict=True)
    )
    return OverviewReport(
        title="Caches at a glance",
        **header(command),
        sized_model=llama_8b.NAME,
        context=CONTEXT,
        measured_model="the embedded Llama, float32",
        text=TEXT,
        calibration_text=CALIBRATION_TEXT,
        window=options.window,
        stride=options.window // 2,
        prompt=options.prompt,
        tokens=found[0].tokens,
        rows=rows,
    )


def readme_table(report: OverviewReport) -> str:
    """Render the table of the project's README."""
    columns = ("cache", "stored bits", "KL", f"{report.context // 1024}K tokens of an 8B model")
    return table(columns, (_readme_line(row) for row in report.rows))


def _readme_line(row: OverviewRow) -> tuple[str, ...]:
    return f"`{row.cache}`", f"{row.stored_bits:.2f}", f"{row.kl:.4f}", f"{row.cache_bytes / 2**30:.2f} GiB"


def headline(report: OverviewReport) -> str:
    """Say what the columns of `readme_table` are."""
    return (
        f"Stored bits of an element and bytes are of a whole bf16 cache of {report.sized_model} at {report.context} tokens, exactly; KL to "
        f"full precision is measured on {report.measured_model}, through the real cache ([more](overview.md)):"
    )


def page(report: OverviewReport, file: pathlib.Path) -> str:
    """Render the page of the results."""
    columns = ("cache", "stored bits", "GiB", "bf16 / cache", "KL", "perplexity", "same top token", "bits there", "read from the body")
    lines = (
        (
            f"`{row.cache}`",
            f"{row.stored_bits:.3f}",
            f"{row.cache_bytes / 2**30:.3f}",
            f"{row.ratio:.2f}",
            f"{row.kl:.5f}",
            f"{row.perplexity:.3f}",
            f"{row.agreement:.2%}",
            f"{row.measured_bits:.2f}",
            f"{row.body_share:.0%}",
        )
        for row in report.rows
    )
    said = (
        f"Stored bits of an element, bytes and their ratio to bf16 are of a whole cache of {report.sized_model} at {report.context} "
        "tokens: windows, scales and statistics included, counted from its layout. KL to full precision, perplexity and the share of equal "
        f"likeliest tokens are means of {report.tokens} tokens of {report.text}, read through the real cache of {report.measured_model}: "
        f"windows of {report.window} tokens by {report.stride}, of each the first {report.prompt} prefilled and the others decoded one "
        "after the other. Bits there are those of a body element of that smaller model, where fewer elements share a scale. The last "
        "column is the share of the tokens before a scored one that lay in the cache's body, which all but `dense` quantize. Each cache "
        f"has its method's default windows; `kvquant` is calibrated on {report.calibration_text}."
    )
    return "\n\n".join([*head(report, file, said), table(columns, lines)])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overview",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path, required=True, help="where the rows go")
    parser.add_argument("--cache", metavar="SPEC", nargs="+", default=CACHES, help="caches to measure")
    parser.add_argument("--window", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a window that are a prompt, and not scored")
    options = parser.parse_args(argv)
    try:
        report = run(options, ("benchmarks.overview", *arguments(argv)))
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    report.write(options.json)
    print(options.json)


if __name__ == "__main__":
    main()

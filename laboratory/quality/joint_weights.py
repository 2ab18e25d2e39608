"""Perplexity with quantized weights, a quantized cache, and both: KVQuant's Table 5.

Weights are quantized as `kvq quantize-weights` does, packed if they have 4 bits, with sensitivities
from the calibration text, on which the caches are calibrated too, each for the weights that it is
used with. KL is to the model with the unquantized weights and no cache. A run that is stopped goes
on where it was when the same command is given again.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import kvq_jax as kvq
from benchmarks.markdown import bracket, head, table, with_interval
from benchmarks.progress import progress
from benchmarks.report_file import Report, from_json, header
from kvq_models import Llama, prepare
from kvq_models.calibration.fit import calibrate
from kvq_models.calibration.needs import needs
from kvq_models.calibration.weights import quantize_weights
from kvq_tools.evaluation.cache_run import Reference, Slice, WindowBatch
from kvq_tools.evaluation.compare import compare
from kvq_tools.evaluation.intervals import Interval, mean_interval
from kvq_tools.evaluation.results import exp
from kvq_tools.evaluation.run import measure_rows
from laboratory.quality.bench import Bench, add_arguments, words_of
from laboratory.quality.comparison import PLAIN

WEIGHTS = {
    "16": None,
    "4": (4, 0.0),
    "4, 0.45 % stay": (4, 0.0045),
    "3": (3, 0.0),
    "3, 0.45 % stay": (3, 0.0045),
}  # bits, sparse
CACHES = ("dense", "kvquant:bits=4", "kvquant:bits=3")
WEIGHT_SAMPLES, WEIGHT_LENGTH = 16, 512
EXACT_BITS = 16.0
PACKED_BITS = 4


@dataclasses.dataclass(frozen=True)
class JointRow:
    """One pair of weights and cache. weight_bits: of a weight of the projections, levels and what
    stays included. stored_bits: of a body element. window_nats: means of each window. kl: of the
    weights alone, from the unquantized model; None with a cache.
    """

    weights: str
    cache: str
    weight_bits: float
    stored_bits: float
    window_nats: tuple[float, ...]
    weights_kl: float | None

    @property
    def perplexity(self) -> float:
        return exp(float(np.mean(self.window_nats)))

    @property
    def interval(self) -> Interval:
        return Interval(*map(exp, mean_interval(self.window_nats)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class JointReport(Report):
    """Rows and what they were measured on."""

    model: str
    text: str
    calibration_text: str
    windows: int
    window: int
    prompt: int
    samples: int
    sample_length: int
    rows: tuple[JointRow, ...]


def run(options: argparse.Namespace) -> None:
    """Measure what an earlier run of the same command has not, and write the report."""
    bench = Bench(options)
    for name in options.weights:
        missing = [cache for cache in options.cache if _key(name, cache) not in bench.journal.rows]
        if missing:
            _measure(bench, name, missing)
    rows = [
        from_json(JointRow, bench.journal.rows[_key(name, cache)])
        for name in options.weights
        for cache in options.cache
    ]
    report = JointReport(
        title="Quantized weights and a quantized cache",
        **header(["laboratory.quality.joint_weights", *words_of(options)]),
        model=f"{bench.name}, float32",
        text=bench.texts["text"][0].name,
        calibration_text=bench.texts["calibration_text"][0].name,
        windows=options.windows,
        window=options.window,
        prompt=options.prompt,
        samples=options.samples,
        sample_length=options.length,
        rows=tuple(rows),
    )
    report.write(options.json)
    bench.clean()


def _measure(bench: Bench, name: str, caches: Sequence[str]) -> None:
    """Quantize the weights, calibrate the caches for them, and keep a row for each."""
    plain, ids, setting = bench.model(PLAIN), bench.texts["calibration_text"][1], WEIGHTS[name]
    llama, bits = plain, EXACT_BITS
    if setting is not None:
        llama, count = quantize_weights(
            plain,
            ids,
            bits=setting[0],
            sparse=setting[1],
            packed=setting[0] == PACKED_BITS,
            samples=WEIGHT_SAMPLES,
            length=WEIGHT_LENGTH,
            progress=_told,
        )
        bits = count.bits
    sizes = {"samples": bench.options.samples, "length": bench.options.length}
    for cache in caches:
        prepared, spec = llama, kvq.parse(cache)
        if needs(spec, llama.config):
            work = bench.work / name.replace(" ", "_").replace(",", "")
            prepared = prepare(
                llama, spec, calibrate(llama, ids, spec, work=work, text="", **sizes)
            )
        (quality,) = measure_rows([(prepared, cache)], bench.rows, prompt=bench.options.prompt)
        alone = cache == "dense" and setting is not None
        row = JointRow(
            weights=name,
            cache=cache,
            weight_bits=bits,
            stored_bits=EXACT_BITS
            if spec.exact
            else kvq.size.body_bits_per_element(spec, llama.config),
            window_nats=tuple(quality.nats.tolist()),
            weights_kl=(
                weights_kl(plain, llama, bench.rows, bench.options.prompt) if alone else None
            ),
        )
        bench.journal.add(_key(name, cache), dataclasses.asdict(row))
        progress(f"weights {name:15s} {cache:20s} perplexity {row.perplexity:.3f}")
    jax.clear_caches()


def weights_kl(before: Llama, after: Llama, rows: Int[Array, "R T"], prompt: int) -> float:
    """Return the mean KL of a model's predictions after the prompt to another's, both without a
    cache."""
    total = []
    for row in rows:
        batch = WindowBatch(row[None].astype(jnp.int32), jnp.full(1, len(row)), len(row))
        part = Slice(prompt, len(row) - 1, prompt)
        (exact, _), (logits, _) = Reference(before, batch)(part), Reference(after, batch)(part)
        total.append(float(_kl(logits, exact, batch.following(part))))
    return float(np.mean(total))


@jax.jit
def _kl(
    logits: Float[Array, "B T V"], exact: Float[Array, "B T V"], following: Int[Array, "B T"]
) -> Float[Array, ""]:
    return compare(logits, exact, following).kl.mean()


def _told(items: Sequence, message: str) -> Sequence:
    progress(f"{message}: {len(items)}")
    return items


def _key(weights: str, cache: str) -> str:
    return f"{weights} | {cache}"


def page(report: JointReport, file: pathlib.Path) -> str:
    """Render the paper's grid: a line for each kind of weights, a column for each cache."""
    said = (
        f"Model: {report.model}. Perplexity of the tokens after the first {report.prompt} of"
        f" {report.windows} windows of {report.window} tokens of {report.text}, read through the"
        " real cache; brackets hold 95 % t intervals over the logs of the windows'"
        " perplexities. Weights: sensitivity-weighted k-means for each output channel of the"
        " projections,"
        f" {WEIGHT_SAMPLES} samples of {WEIGHT_LENGTH} tokens of {report.calibration_text}; bits"
        f" count each channel's levels and what stays. Caches are calibrated on {report.samples}"
        f" samples of {report.sample_length} tokens of the same text, for the weights that they are"
        " used with. KL of the weights is to the unquantized model, without a cache. Rounding"
        " noise of a `dense` cache is part of its column."
    )
    row_of = {(row.weights, row.cache): row for row in report.rows}
    names, caches = (
        list(dict.fromkeys(getattr(row, field) for row in report.rows))
        for field in ("weights", "cache")
    )
    lines = []
    for name in names:
        first = row_of[name, caches[0]]
        cells = (
            f"{row.perplexity:.3f}{bracket(row.interval, '.2f')}"
            for row in (row_of[name, cache] for cache in caches)
        )
        kl = next(
            (
                row.weights_kl
                for row in report.rows
                if row.weights == name and row.weights_kl is not None
            ),
            None,
        )
        lines.append((name, f"{first.weight_bits:.2f}", "" if kl is None else f"{kl:.4f}", *cells))
    columns = (
        "weights",
        "bits",
        "KL of the weights",
        *(f"`{cache}`, {row_of[names[0], cache].stored_bits:.2f} bits" for cache in caches),
    )
    return "\n\n".join(
        [*head(report, file, said), table(columns, lines), *_costs(row_of, names, caches)]
    )


def _costs(
    row_of: Mapping[tuple[str, str], JointRow], names: Sequence[str], caches: Sequence[str]
) -> list[str]:
    """Render the nats that each cache adds to the first one's on each kind of weights, and how
    many more these are than on the first kind, in the same windows."""
    exact, *others = caches
    if not others:
        return []
    lines = []
    for name in names:
        cells = []
        for cache in others:
            cost, first = (
                np.subtract(row_of[kind, cache].window_nats, row_of[kind, exact].window_nats)
                for kind in (name, names[0])
            )
            cells += [_nats(cost), "" if name == names[0] else _nats(cost - first)]
        lines.append((name, *cells))
    columns = [title for cache in others for title in (f"`{cache}`", "more than on the first line")]
    return [f"## Nats a token more than `{exact}`", table(("weights", *columns), lines)]


def _nats(windows: Float[np.ndarray, "N"]) -> str:
    values = windows.tolist()
    return with_interval(float(np.mean(values)), mean_interval(values), ".3f")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m laboratory.quality.joint_weights",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_arguments(parser)
    parser.add_argument(
        "--cache", metavar="SPEC", nargs="+", default=CACHES, help="caches to measure"
    )
    parser.add_argument(
        "--weights",
        nargs="+",
        default=tuple(WEIGHTS),
        choices=tuple(WEIGHTS),
        help="kinds of weights",
    )
    options = parser.parse_args(argv)
    try:
        run(options)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{error}\n")
    print(options.json)


if __name__ == "__main__":
    main()

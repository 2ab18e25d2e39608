"""`kvq plan --text`: measure the costs of sides of layers, share out the budget, and check the best
caches.

    1. calibrate waterfill on the first half of the text
    2. for every layer and side, and MEASURED bits: measure KL with only that side read through the
       cache, on windows of the second half and of a text of another kind
    3. choose widths for a budget from the mean over both texts, shrunk (allocation.py)
    4. read waterfill with equal shares on these windows and on more: for each text, their ratio
       scales the sums of costs
    5. on further windows, check this cache, the one with equal shares, those that keep more of the
       newest tokens exact and fewer bits of the others, and the largest cache of each other method
       that fits

Every number goes to a journal at once, from which the same request continues.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

import kvq_jax as kvq
from kvq_jax.arrays.reverse_water_filling import MAX_BITS, layer_widths
from kvq_jax.cache.spec import CacheSpec
from kvq_jax.codecs.codec import Side
from kvq_jax.methods.waterfill import Waterfill
from kvq_jax.methods.waterfill.widths import written
from kvq_models.calibration import fit
from kvq_models.calibration.file import Calibration, resolved, save_calibration
from kvq_models.calibration.fingerprint import load_calibration, partial_fingerprint
from kvq_models.calibration.progress import Progress
from kvq_models.calibration.samples import sha256
from kvq_models.calibration.store import Store
from kvq_models.inference.method_parameters import prepare
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import HiddenBTD, Llama
from kvq_tools.evaluation.intervals import NONE, Estimate, Interval, paired_ratio
from kvq_tools.evaluation.journal import Journal
from kvq_tools.evaluation.results import finite
from kvq_tools.evaluation.run import measure_rows
from kvq_tools.planning.allocation import SIDES, Costs, Widths, costs_of, mean
from kvq_tools.planning.defaults import MEASURED, METHOD, SCORED, Bases
from kvq_tools.planning.request import SCALING, TEXTS, WHOLE, Kind, PlanRequest
from kvq_tools.planning.sensitivity import Sensitivity, one_side
from kvq_tools.planning.unmeasured import spec_of, widths_within

MEASURED_PROFILES = 2
MAX_FEWER = 0.75  # bits, for which KL is three times as large: no more exact tokens are worth it
SHARE_BIAS = 2.0  # docs/decisions/planner.md
MIN_COST = 1e-12  # nats; no cost is 0, so that logarithms exist
RIVALS = tuple(  # the other methods: those that need no calibration
    f"{name}:bits={bits}"
    for name, choices in {
        "turboquant": (1, 2, 3, 4),
        "kivi": (2, 3, 4),
        "xquant": (2, 3, 4),
        "innerq": (1, 2),
    }.items()
    for bits in choices
)
CHECKED_RIVALS = 3
FACTOR = 2.0  # a prediction outside this factor is only a rank


class MeasuredSide(NamedTuple):
    """One side of one layer, and the widths to read it with."""

    layer: int
    side: Side
    widths: Widths

    @property
    def key(self) -> str:
        return f"layer {self.layer} {self.side} {written(self.widths)}"

    def bits(self, config: LlamaConfig) -> float:
        return sum(self.widths) / len(self.widths) + 8 / config.head_dim


class Checked(NamedTuple):
    """A cache measured as a whole.

    Args:
        windows: KL of each window of the text and of the other text in nats per token, inf if the
            model's predictions through the cache are not finite.
        predicted: what the sum of the sides predicts for each text (None for other caches).
        share: of the tokens of a prompt, those that this cache keeps exact and others do not.
    """

    spec: CacheSpec
    windows: tuple[Sequence[float], Sequence[float]]
    predicted: tuple[float, float] | None
    share: float

    @property
    def kl(self) -> tuple[float, float]:
        """Return the mean KL on the text and on the other text."""
        text, other = (sum(windows) / len(windows) for windows in self.windows)
        return text, other

    @property
    def compared(self) -> float:
        """Return the number by which caches are chosen: the geometric mean of KL over the texts
        times 1 + SHARE_BIAS * share, because in a longer context that share is smaller."""
        return math.sqrt(math.prod(self.kl)) * self._bias

    @property
    def _bias(self) -> float:
        return 1 + SHARE_BIAS * self.share

    def over(self, other: Checked) -> Estimate:
        """Return the mean ratio to another cache over the windows of both texts, as they are
        compared, and its paired interval. nan if there is none."""
        ours, others = ([*one.windows[0], *one.windows[1]] for one in (self, other))
        if not math.isfinite(sum(ours) + sum(others)):
            return Estimate(math.nan, NONE)
        value, (low, high) = paired_ratio(ours, others)
        scale = self._bias / other._bias
        return Estimate(scale * value, Interval(scale * low, scale * high))


class PlannedCache(NamedTuple):
    """Waterfill with planned widths, and its predicted KL on each text."""

    spec: CacheSpec
    predicted: tuple[float, float]


class Predictions(NamedTuple):
    """The costs of sides on each text, and KL on more windows of it over KL on those of sides."""

    costs: tuple[Costs, Costs]
    scales: tuple[float, float]

    def of(self, widths: Sequence[tuple[Widths, Widths]]) -> tuple[float, float]:
        """Return the KL of a whole cache on each text: the scaled sum over layers and sides."""
        text, other = (costs.total(widths) for costs in self.costs)
        return text * self.scales[0], other * self.scales[1]


def calibrated(
    llama: Llama,
    request: PlanRequest,
    bases: Bases,
    file: Path,
    work: Path,
    text: str,
    progress: Progress[Any],
) -> Calibration:
    """Return the calibration that an earlier plan of this model on the same samples kept in `file`,
    else make and keep it, which takes minutes.

    text: the name of the request's text.
    """
    method, ids = kvq.parse(bases.spec()), request.halves[0]
    sizes = {"samples": request.samples, "length": request.length}
    # the folder is the model's path's: other weights may have been there, or another version of kvq
    with contextlib.suppress(ValueError, FileNotFoundError):
        earlier = load_calibration(file, llama, method)
        if earlier.origin.tokens_sha256 == sha256(ids) and (
            (earlier.origin.samples, earlier.origin.length) == tuple(sizes.values())
        ):
            return earlier
    samples = work / f"samples-{sha256(ids)[:12]}-{partial_fingerprint(llama)[:12]}"
    calibration = fit.calibrate(
        llama, ids, method, work=samples, text=text, progress=progress, **sizes
    )
    save_calibration(calibration, file)
    Store.delete(samples)
    return calibration


class Planner:
    """Measurements of one model on one text, and the caches that they lead to.

    Args:
        request: checked against the model.
        bases: of the cache.
        calibration, file: of these bases.
        work: the folder of the journal.
        sensitivity: returns the full-precision model's pass over the request's windows, which all
            planners of a request share.
        progress: wraps loops, as tqdm would.
    """

    def __init__(
        self,
        llama: Llama,
        request: PlanRequest,
        bases: Bases,
        calibration: Calibration,
        file: Path,
        work: Path,
        sensitivity: Callable[[], Sensitivity],
        progress: Progress[Any],
    ):
        self.llama, self.request, self.progress = llama, request, progress
        self.method, self.bases, self.file = kvq.parse(bases.spec()), bases, str(file)
        self.calibration, self.sensitivity = calibration, sensitivity
        self.prepared = prepare(llama, self.method, calibration)
        identity = {
            "kvq": kvq.__version__,
            "model": calibration.model_fingerprint,
            "text": sha256(request.ids),
            "calibration": hashlib.sha256(file.read_bytes()).hexdigest(),
            "other_text": sha256(request.other),
            "window": request.window,
            "windows": request.windows,
            "whole": WHOLE,
        }
        name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]
        self.journal = Journal(work / f"measured-{name}.jsonl", identity)
        self.sides: list[dict[str, Any]] = []
        # outputs of the full-precision model
        self.exact = dict[tuple[int, Kind], dict[int, HiddenBTD]]()

    def costs(self) -> tuple[Costs, Costs]:
        """Measure every side of every layer at MEASURED bits, except those that an earlier call
        measured. Return the costs on each text."""
        expected = costs_of(self.calibration, {})
        work = list(self._sides(expected))
        missing = [one for one in work if one.key not in self.journal.rows]
        for one in self.progress(missing, "measuring sides of layers"):
            layers = self.llama.config.num_hidden_layers
            spec = spec_of([(one.widths, one.widths)] * layers, self.method)
            of_windows = self.sensitivity().kl(
                self.prepared, one_side(spec, one.side, kvq.parse(METHOD)), one.layer
            )
            if not np.isfinite(of_windows).all():
                raise ValueError(
                    f"layer {one.layer}, {one.side}: the model's predictions through the cache are"
                    " not finite"
                )
            kl, other = map(float, of_windows.reshape(len(TEXTS), -1).mean(axis=1))
            row = {"layer": one.layer, "side": one.side, "bits": one.bits(self.llama.config)}
            self.journal.add(one.key, row | {"kl": kl, "kl_on_other_text": other})
        self.sides = [self.journal.rows[one.key] for one in work]
        text, other = (self._costs(work, field) for field in ("kl", "kl_on_other_text"))
        return text, other

    def _costs(self, work: Iterable[MeasuredSide], field: str) -> Costs:
        expected = costs_of(self.calibration, {})
        ratios = dict[tuple[int, Side], dict[int, float]]()
        for one in work:
            kl = max(self.journal.rows[one.key][field], MIN_COST)
            ratios.setdefault((one.layer, one.side), {})[sum(one.widths)] = kl / max(
                expected.expected(*one), MIN_COST
            )
        return costs_of(self.calibration, ratios)

    def _sides(self, costs: Costs) -> Iterator[MeasuredSide]:
        """Yield the sides and widths to measure. For each side and number of bits, layers have at
        most MEASURED_PROFILES different widths, because each is a program to compile. Only the
        ratio to the prediction for the same widths counts."""
        config = self.llama.config
        counts = sorted(
            {
                min(
                    max(1, round((bits - 8 / config.head_dim) * costs.chunks)),
                    MAX_BITS * costs.chunks,
                )
                for bits in MEASURED
            }
        )
        for (index, side), count in itertools.product(enumerate(SIDES), counts):
            shared = layer_widths(
                [[energies[index]] for energies in costs.energies], [count], MEASURED_PROFILES
            )
            for layer, (widths,) in enumerate(shared):
                yield MeasuredSide(layer, side, widths)

    def predictions(self, costs: tuple[Costs, Costs], bits: float) -> Predictions:
        """Return the costs with their scales, which waterfill with equal shares of `bits` stored
        bits measures. Windows of a text differ in how hard they are, much the same for all
        caches."""
        equal = self._equal(bits)
        self._read((equal, text, kind) for text in TEXTS for kind in SCALING)
        kl = np.array(
            [[np.mean(self._windows(equal, text, kind)) for kind in SCALING] for text in TEXTS]
        )
        if not np.isfinite(kl).all():
            return Predictions(costs, (1.0, 1.0))
        of_sides, of_more = np.maximum(kl, MIN_COST).T
        text, other = map(float, of_more / of_sides)
        return Predictions(costs, (text, other))

    def planned(
        self, predictions: Predictions, bits: float, context: int, recent: int | None = None
    ) -> PlannedCache:
        """Return waterfill with widths for `bits` stored bits in sequences of `context` tokens, and
        `recent` exact newest tokens (None: as many as usual)."""
        spec = self.method
        if recent is not None:
            spec = dataclasses.replace(spec, recent=recent)
        costs = mean(predictions.costs).shrunk()
        widths = widths_within(costs, bits, self.llama.config, context, spec)
        return PlannedCache(spec_of(widths, spec), predictions.of(widths))

    def check(
        self,
        predictions: Predictions,
        bits: float,
        context: int,
        fits: Callable[[CacheSpec], bool],
        bits_by_recent: Mapping[int, float],
    ) -> list[Checked]:
        """Measure the best caches of `bits` bits as a whole on windows of both texts that nothing
        else has seen, those with as many exact newest tokens and bits as `bits_by_recent` has, and
        of other methods those that fit. Return them with the best first."""
        equal, planned = self._equal(bits), self.planned(predictions, bits, context)
        # waterfill is the only method whose widths have predictions
        method, dims = cast("Waterfill", equal.k), self.calibration.dims
        layers = range(dims.num_hidden_layers)
        shares = [(method.widths("k", i, dims), method.widths("v", i, dims)) for i in layers]
        ours = {equal: predictions.of(shares), planned.spec: planned.predicted}
        wider = (
            self.planned(predictions, fewer, context, recent).spec
            for recent, fewer in bits_by_recent.items()
            if bits - fewer <= MAX_FEWER
        )
        specs = [*ours, *wider, *rivals(self.llama.config, fits)]
        self._read((spec, text, "check") for spec in specs for text in TEXTS)
        checked = list[Checked]()
        for spec in specs:
            text, other = (self._windows(spec, text, "check") for text in TEXTS)
            share = max(0, spec.recent - equal.recent) / (self.request.checked - SCORED)
            checked.append(Checked(spec, (text, other), ours.get(spec), share))
        return sorted(checked, key=lambda one: one.compared)

    def _equal(self, bits: float) -> CacheSpec:
        return resolved(self.bases.spec(bits), self.calibration)

    def _read(self, work: Iterable[tuple[CacheSpec, int, Kind]]) -> None:
        """Measure whole caches on windows of a text, except what an earlier call measured. Those
        on the same windows are measured together, because they share the exact prompts."""
        missing: dict[tuple[int, Kind], list[CacheSpec]] = {}
        for spec, text, kind in work:
            # rows of earlier versions have the mean alone
            if "windows" not in self.journal.rows.get(self._key(spec, text, kind), {}):
                missing.setdefault((text, kind), []).append(spec)
        for (text, kind), specs in missing.items():
            rows = self.request.rows(text, kind)
            count = "1 cache" if len(specs) == 1 else f"{len(specs)} caches"
            message = f"reading {count}, {('text', 'other text')[text]}"
            qualities = measure_rows(
                [(self._model(spec), spec) for spec in specs],
                rows,
                prompt=rows.shape[1] - SCORED,
                batch=self.request.windows,  # of all kinds: one program
                progress=lambda items, _, message=message: self.progress(items, message),
                kept=self.exact.setdefault((text, kind), {}),
            )
            for spec, quality in zip(specs, qualities, strict=True):
                windows = [finite(kl) for kl in quality.kl.tolist()]
                self.journal.add(self._key(spec, text, kind), {"windows": windows})

    def _model(self, spec: CacheSpec) -> Llama:
        return self.prepared if isinstance(spec.k, Waterfill) else prepare(self.llama, spec)

    def _windows(self, spec: CacheSpec, text: int, kind: Kind) -> list[float]:
        windows = self.journal.rows[self._key(spec, text, kind)]["windows"]
        return [math.inf if kl is None else kl for kl in windows]

    def _key(self, spec: CacheSpec, text: int, kind: Kind) -> str:
        longer = self.request.checked if kind == "check" else self.request.window
        windows = "" if longer == self.request.window else f" of {longer} tokens"
        return f"cache {spec}, text {text}, {kind}{windows}"


def rivals(config: LlamaConfig, fits: Callable[[CacheSpec], bool]) -> list[CacheSpec]:
    """Return the largest cache of each other method that fits, with waterfill's windows, the larger
    ones first."""
    ours = kvq.parse(METHOD)
    largest: dict[str, tuple[float, str]] = {}
    for spec in (f"{rival},sink={ours.sink},recent={ours.recent}" for rival in RIVALS):
        try:
            stored = kvq.size.body_bits_per_element(spec, config)
        except ValueError:
            continue  # it does not fit this model
        if fits(kvq.parse(spec)):
            name = spec.partition(":")[0]
            largest[name] = max((stored, spec), largest.get(name, (0.0, "")))
    return [kvq.parse(spec) for _, spec in sorted(largest.values(), reverse=True)[:CHECKED_RIVALS]]

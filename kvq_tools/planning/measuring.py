"""`kvq plan --text`: measure the costs of sides of layers, share out the budget, and check the best
caches.

    1. calibrate waterfill on the first half of the text
    2. for every layer and side, and MEASURED bits: measure KL with only that side read through the
       cache, on windows of the second half
    3. choose widths for a budget from these, shrunk towards their mean (allocation.py)
    4. measure waterfill with equal shares on these windows, on others, and on those of a text of
       another kind: the ratios scale the sums of costs to each text
    5. on further windows of both texts, check this cache, the one with equal shares, and the
       largest cache of each other method that fits

Every number goes to a journal at once, from which the same request continues.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax.numpy as jnp

import kvq_jax as kvq
from kvq_jax.arrays.reverse_water_filling import MOST, layer_widths
from kvq_jax.cache.spec import CacheSpec
from kvq_jax.codecs.codec import Side
from kvq_jax.methods.waterfill import Waterfill
from kvq_jax.methods.waterfill.widths import written
from kvq_models.calibration import fit
from kvq_models.calibration.file import Calibration, resolved, save_calibration
from kvq_models.calibration.fingerprint import load_calibration
from kvq_models.calibration.progress import Progress
from kvq_models.calibration.samples import sha256
from kvq_models.calibration.store import Store
from kvq_models.inference.method_parameters import prepare
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import HiddenBTD, Llama
from kvq_tools.evaluation.journal import Journal
from kvq_tools.evaluation.results import finite
from kvq_tools.evaluation.run import measure_rows
from kvq_tools.planning import kept
from kvq_tools.planning.allocation import SIDES, Costs, Widths, costs_of
from kvq_tools.planning.defaults import MEASURED, METHOD, Bases
from kvq_tools.planning.request import CHECKED, HELD_OUT, SCALING, PlanRequest
from kvq_tools.planning.sensitivity import Sensitivity, one_side
from kvq_tools.planning.unmeasured import spec_of, widths_within

MEASURED_PROFILES = 2
LEAST = 1e-12  # nats; no cost is 0, so that logarithms exist
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
    """A cache measured as a whole: its KL in nats per token on the text and on the other text, inf
    if the model's predictions through it are not finite, and what the sum of the sides predicts for
    each text (None for other methods)."""

    spec: CacheSpec
    kl: tuple[float, float]
    predicted: tuple[float, float] | None

    @property
    def mean(self) -> float:
        """Return the geometric mean over the texts."""
        return math.sqrt(math.prod(self.kl))


class PlannedCache(NamedTuple):
    """Waterfill with planned widths, and its predicted KL on each text."""

    spec: CacheSpec
    predicted: tuple[float, float]


class Predictions(NamedTuple):
    """The costs of sides, and KL on each text over KL on the windows of sides."""

    costs: Costs
    scales: tuple[float, float]

    def of(self, widths: Sequence[tuple[Widths, Widths]]) -> tuple[float, float]:
        """Return the KL of a whole cache on each text: the scaled sum over layers and sides."""
        total = self.costs.total(widths)
        return total * self.scales[0], total * self.scales[1]


class Planner:
    """Measurements of one model on one text, and the caches that they lead to."""

    def __init__(
        self,
        llama: Llama,
        request: PlanRequest,
        work: Path,
        calibration: str | None,
        text: str,
        progress: Progress[Any],
        bases: Bases,
    ):
        request.check(llama.config)
        self.llama, self.request, self.work, self.progress = llama, request, work, progress
        self.method, self.bases = kvq.parse(bases.spec()), bases
        self.file = calibration or str(work / kept.file_name(bases))
        self.calibration = self._calibrated(calibration is not None, text)
        self.prepared = prepare(llama, self.method, self.calibration)
        identity = {
            "kvq": kvq.__version__,
            "model": self.calibration.model_fingerprint,
            "text": sha256(request.ids),
            "calibration": hashlib.sha256(Path(self.file).read_bytes()).hexdigest(),
            "check_text": sha256(request.other),
            "window": request.window,
            "windows": request.windows,
            "checked": CHECKED,
        }
        name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]
        self.journal = Journal(work / f"measured-{name}.jsonl", identity)
        self.sides: list[dict[str, Any]] = []
        self.exact = dict[str, dict[int, HiddenBTD]]()  # the full-precision model's, by window
        self.sensitivity = functools.cache(lambda: Sensitivity(llama, request.rows, request.prompt))

    def _calibrated(self, given_file: bool, text: str) -> Calibration:
        """Return the calibration of a given file, else the one that an earlier plan on this text
        kept, else a new one."""
        ids = self.request.halves[0]
        sizes = {"samples": self.request.samples, "length": self.request.length}
        if Path(self.file).is_file():
            earlier = load_calibration(self.file, self.llama, self.method)
            if given_file or (
                earlier.origin.tokens_sha256 == sha256(ids)
                and (earlier.origin.samples, earlier.origin.length) == tuple(sizes.values())
            ):
                return earlier
        samples = self.work / f"samples-{sha256(ids)[:12]}"
        calibration = fit.calibrate(
            self.llama, ids, self.method, work=samples, text=text, progress=self.progress, **sizes
        )
        save_calibration(calibration, self.file)
        Store.delete(samples)
        return calibration

    def costs(self) -> Costs:
        """Measure every side of every layer at MEASURED bits, except those that an earlier call
        measured."""
        expected = costs_of(self.calibration, {})
        ratios = dict[tuple[int, Side], dict[int, float]]()
        work = list(self._sides(expected))
        missing = [one for one in work if one.key not in self.journal.rows]
        for one in self.progress(missing, "measuring sides of layers"):
            layers = self.llama.config.num_hidden_layers
            spec = spec_of([(one.widths, one.widths)] * layers, self.method)
            kl = self.sensitivity().kl(
                self.prepared, one_side(spec, one.side, kvq.parse(METHOD)), one.layer
            )
            if not math.isfinite(kl):
                raise ValueError(
                    f"layer {one.layer}, {one.side}: the model's predictions through the cache are"
                    " not finite"
                )
            bits = one.bits(self.llama.config)
            row = {"layer": one.layer, "side": one.side, "bits": bits, "kl": kl}
            self.journal.add(one.key, row)
        for one in work:
            kl = max(self.journal.rows[one.key]["kl"], LEAST)
            ratios.setdefault((one.layer, one.side), {})[sum(one.widths)] = kl / max(
                expected.expected(*one), LEAST
            )
        self.sides = [self.journal.rows[one.key] for one in work]
        return costs_of(self.calibration, ratios)

    def _sides(self, costs: Costs) -> Iterator[MeasuredSide]:
        """Yield the sides and widths to measure. For each side and number of bits, layers have at
        most MEASURED_PROFILES different widths, because each is a program to compile. Only the
        ratio to the prediction for the same widths counts."""
        config = self.llama.config
        counts = sorted(
            {
                min(max(1, round((bits - 8 / config.head_dim) * costs.chunks)), MOST * costs.chunks)
                for bits in MEASURED
            }
        )
        for (index, side), count in itertools.product(enumerate(SIDES), counts):
            shared = layer_widths(
                [[energies[index]] for energies in costs.energies], [count], MEASURED_PROFILES
            )
            for layer, (widths,) in enumerate(shared):
                yield MeasuredSide(layer, side, widths)

    def predictions(self, costs: Costs, bits: float) -> Predictions:
        """Return the costs with their scales: KL of waterfill with equal shares of `bits` stored
        bits on windows of each text over that on the windows of sides. Windows and texts differ in
        how hard they are, and much the same for all caches."""
        equal = self._equal(bits)
        self._read((equal, name) for name in SCALING)
        sides, text, other = (max(self._kl(equal, name), LEAST) for name in SCALING)
        if not math.isfinite(sides + text + other):
            return Predictions(costs, (1.0, 1.0))
        return Predictions(costs, (text / sides, other / sides))

    def planned(self, predictions: Predictions, bits: float, context: int) -> PlannedCache:
        """Return waterfill with widths for `bits` stored bits in sequences of `context` tokens."""
        widths = widths_within(predictions.costs.shrunk(), bits, self.llama.config, context)
        return PlannedCache(spec_of(widths, self.method), predictions.of(widths))

    def check(
        self,
        predictions: Predictions,
        bits: float,
        context: int,
        fits: Callable[[CacheSpec], bool],
    ) -> list[Checked]:
        """Measure the best caches of `bits` bits as a whole on the held-out windows of both texts,
        and of other methods those that fit. Return them with the best first."""
        equal, planned = self._equal(bits), self.planned(predictions, bits, context)
        # waterfill is the only method whose widths have predictions
        method, dims = cast("Waterfill", equal.k), self.calibration.dims
        layers = range(dims.num_hidden_layers)
        shares = [(method.widths("k", i, dims), method.widths("v", i, dims)) for i in layers]
        ours = {equal: predictions.of(shares), planned.spec: planned.predicted}
        specs = [*ours, *filter(fits, map(kvq.parse, rivals(self.llama.config, bits)))]
        self._read(itertools.product(specs, HELD_OUT))
        checked = [
            Checked(
                spec, (self._kl(spec, HELD_OUT[0]), self._kl(spec, HELD_OUT[1])), ours.get(spec)
            )
            for spec in specs
        ]
        return sorted(checked, key=lambda one: one.mean)

    def _equal(self, bits: float) -> CacheSpec:
        return resolved(self.bases.spec(bits), self.calibration)

    def _read(self, work: Iterable[tuple[CacheSpec, str]]) -> None:
        """Measure whole caches on windows of these names, except what an earlier call measured."""
        missing = [one for one in work if _key(*one) not in self.journal.rows]
        for spec, name in self.progress(missing, "reading whole caches"):
            known = isinstance(spec.k, Waterfill)
            llama = self.prepared if known else prepare(self.llama, spec)
            (quality,) = measure_rows(
                [(llama, spec)],
                jnp.asarray(self.request.of(name)),
                prompt=self.request.prompt,
                batch=self.request.windows,  # as many for all names: one program
                kept=self.exact.setdefault(name, {}),
            )
            self.journal.add(_key(spec, name), {"kl": finite(float(quality.kl.mean()))})

    def _kl(self, spec: CacheSpec, name: str) -> float:
        kl = self.journal.rows[_key(spec, name)]["kl"]
        return math.inf if kl is None else kl


def _key(spec: CacheSpec, name: str) -> str:
    return f"cache {spec} on {name}"


def rivals(config: LlamaConfig, bits: float) -> list[str]:
    """Return the largest cache of each other method that stores at most `bits` bits, with
    waterfill's windows, the larger ones first."""
    ours, fitting = kvq.parse(METHOD), dict[str, tuple[float, str]]()
    for spec in (f"{rival},sink={ours.sink},recent={ours.recent}" for rival in RIVALS):
        try:
            stored = kvq.size.body_bits_per_element(spec, config)
        except ValueError:
            continue  # it does not fit this model
        if stored <= bits + 1e-6:
            name = spec.partition(":")[0]
            fitting[name] = max((stored, spec), fitting.get(name, (0.0, "")))
    return [spec for _, spec in sorted(fitting.values(), reverse=True)[:CHECKED_RIVALS]]

"""Describe the caches of `kvq plan`, as JSON has them."""

from __future__ import annotations

import math
from typing import Any

import kvq_jax as kvq
from kvq_models.llama.config import LlamaConfig
from kvq_tools.cli import cache_sizes
from kvq_tools.evaluation.results import finite
from kvq_tools.planning.measuring import FACTOR, Checked

_KL = (
    *("predicted_kl", "measured_kl", "predicted_kl_on_other_text", "measured_kl_on_other_text"),
    *("compared_kl", "over_chosen", "over_chosen_interval"),
)


def described(
    name: str, bits: float, config: LlamaConfig, batch: int, context: int, dtype: str
) -> dict[str, Any]:
    """Return the facts about a cache that follow from its layout."""
    return {
        "name": name,
        "bits": bits,
        "body_bits_per_element": kvq.size.body_bits_per_element(name, config, context),
        "bytes": kvq.size.nbytes(kvq.cache.layout(name, config, batch, context, dtype)),
        "resident_by_batch": cache_sizes.by_batch(name, config, context, dtype, batch),
    }


def predicted(kl: tuple[float | None, float | None]) -> dict[str, Any]:
    """Return the KL of a cache that was not measured, on the text and on the other one."""
    text, other = kl
    return dict.fromkeys(_KL) | {"predicted_kl": text, "predicted_kl_on_other_text": other}


def measured(one: Checked, chosen: Checked) -> dict[str, Any]:
    """Return the KL of a cache on the text and on the other one, the KL by which caches are
    compared, and its ratio to that of the chosen cache with its 95 % interval."""
    text, other = map(finite, one.kl)
    over = one.over(chosen)
    return predicted(one.predicted or (None, None)) | {
        "measured_kl": text,
        "measured_kl_on_other_text": other,
        "compared_kl": finite(one.compared),
        "over_chosen": finite(over.value),
        "over_chosen_interval": [finite(limit) for limit in over.interval],
    }


def prediction(checked: list[Checked]) -> dict[str, Any]:
    """Return the largest factor between a prediction and its measurement, and whether predictions
    are only good for ranking."""
    factors = [
        max(kl / predicted, predicted / kl)
        for one in checked
        for kl, predicted in zip(one.kl, one.predicted or (0.0, 0.0), strict=True)
        if predicted and 0 < kl < math.inf
    ]
    largest = max(factors, default=1.0)
    return {"factor": largest, "ranks_only": largest > FACTOR}

"""KVQuant's calibration: thresholds, ranges and codebooks from the activations of a text, in NumPy,
for one side of one layer at a time.

    y = (x - zero) / scale,                  scale, zero: half the range and the middle of the inliers, by channel or by token
    levels = argmin sum_i w_i (y_i - nearest level)^2               over the inliers
    w = F scale^2 (fisher_scale), F (fisher), 1 (none)              F = (d loss / d x)^2, the diagonal of the Fisher information
    qnorm = (s1 / s2, m1 - m2 s1 / s2)                              means m and deviations s of y before (1) and after (2) quantization

Source: Hooper et al., KVQuant, sections 3.3 to 3.5, Appendices D and E, and Q-Norm (section 3.8 of
its first version).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Float

from kvq_jax.codecs.fitting import Rows, check_rows
from kvq_jax.methods.kvquant.kmeans import nearest, weighted_levels

Wide = Float[np.ndarray, "tokens width"]


def parameters(
    rows: Rows,
    gradients: Rows,
    *,
    levels: int | None,
    per_channel: bool,
    per_matrix: bool,
    outliers: float,
    per_side: int,
    weighting: str,
) -> Mapping[str, np.ndarray]:
    """Return every parameter that a `KVQuantCodec` may ask for, fp32.

    levels: entries of the codebook; None leaves it (and qnorm) out. per_side: outliers among a
    token's largest entries, and among its smallest. outliers: their fraction, 0 for none.
    weighting: fisher_scale, fisher or none.

    Raises ValueError where rows or gradients are not finite, where there are fewer than two tokens,
    or where all gradients are 0.
    """
    tokens, heads, head_dim = rows.shape
    check_rows(rows, gradients)
    x, grad = (array.reshape(tokens, -1).astype(np.float32) for array in (rows, gradients))
    lower, upper = _thresholds(x, per_channel, per_matrix, outliers, per_side)
    kept = (x >= lower) & (x <= upper)
    scale, zero = _ranges(x, kept, per_channel)
    fitted = {"scale": scale, "zero": zero, "lower": lower, "upper": upper}
    if per_channel:
        fitted = {
            name: np.broadcast_to(array, (1, heads * head_dim)).reshape(heads, head_dim)
            for name, array in fitted.items()
        }
    else:
        fitted = {name: array.reshape(()) for name, array in fitted.items() if array.size == 1}
    if levels is not None:
        kept &= scale > 0  # a constant channel needs no entry of the codebook
        y = np.clip(((x - zero) / np.where(scale > 0, scale, 1))[kept], -1, 1)
        weights = _weights(grad, scale, kept, weighting)
        fitted["levels"] = weighted_levels(y, weights, levels)
        fitted["qnorm"] = _qnorm(y, fitted["levels"])
    return {name: np.array(array, np.float32) for name, array in fitted.items()}


def _thresholds(
    x: Wide, per_channel: bool, per_matrix: bool, outliers: float, per_side: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (lower, upper), which broadcast against x. Elements outside them are outliers."""
    axis = None if per_matrix else 0 if per_channel else 1
    if not outliers:
        return x.min(axis=axis, keepdims=True), x.max(axis=axis, keepdims=True)
    if per_channel or per_matrix:
        low, high = np.percentile(x, [50 * outliers, 100 - 50 * outliers], axis=axis, keepdims=True)
        return low.astype(np.float32), high.astype(np.float32)
    width = x.shape[1]
    ordered = np.partition(
        x, [per_side, width - 1 - per_side], axis=1
    )  # as the codec finds them when a token arrives
    return ordered[:, per_side, None], ordered[:, width - 1 - per_side, None]


def _ranges(
    x: Wide, kept: Bool[np.ndarray, "tokens width"], per_channel: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return (scale, zero) of the kept elements, by channel or by token; 0 and 0 where none is
    kept."""
    axis = 0 if per_channel else 1
    low, high = (
        np.where(kept, x, np.inf).min(axis=axis, keepdims=True),
        np.where(kept, x, -np.inf).max(axis=axis, keepdims=True),
    )
    low, high = (np.where(np.isfinite(bound), bound, 0) for bound in (low, high))
    return (high - low) / 2, (high + low) / 2


def _weights(
    grad: Wide, scale: np.ndarray, kept: Bool[np.ndarray, "tokens width"], weighting: str
) -> Float[np.ndarray, " n"] | None:
    if weighting == "none":
        return None
    weights = np.square(grad * scale if weighting == "fisher_scale" else grad, dtype=np.float64)[
        kept
    ]
    if not weights.any():
        raise ValueError("all gradients are 0: no level can be weighted")
    return weights


def _qnorm(
    y: Float[np.ndarray, " n"], levels: Float[np.ndarray, " entries"]
) -> Float[np.ndarray, " two"]:
    coded = levels[nearest(y, levels)]
    deviation = coded.std(dtype=np.float64)
    stretch = y.std(dtype=np.float64) / deviation if deviation > 0 else 1.0
    return np.array([stretch, y.mean(dtype=np.float64) - coded.mean(dtype=np.float64) * stretch])

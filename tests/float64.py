"""The arithmetic of attention in NumPy's float64, with which kernels and caches are compared."""

from typing import Any

import numpy as np


def row_errors(actual: Any, expected: Any) -> np.ndarray:
    """Return the relative error of each last-axis row. Rows that are not finite are infinitely
    wrong."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    size = np.maximum(np.linalg.norm(expected, axis=-1), 1e-30)
    error = np.linalg.norm(actual - expected, axis=-1) / size
    return np.where(np.isfinite(error), error, np.inf)


def softmax(scores: np.ndarray, seen: np.ndarray | bool = True) -> np.ndarray:
    """Return the weights of the scores that are seen, along the last axis. All are 0 if none is."""
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - np.maximum(scores.max(axis=-1, keepdims=True), -1e300))
    return weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)


def rotated(rows: np.ndarray, angles: np.ndarray, factor: float = 1.0) -> np.ndarray:
    """Return rows [..., T, H] whose pairs (i, i + H/2) are turned by angles [T, H/2], times the
    factor."""
    first, second = np.split(np.asarray(rows).astype(np.float64), 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return factor * np.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )

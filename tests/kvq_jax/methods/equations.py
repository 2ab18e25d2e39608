"""What methods do to rows, in NumPy, and the rows that their bodies give back."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from kvq_jax.codecs.codec import Codec
from tests.kvq_jax.origins import prompt


def body_of(codec: Codec, params: dict[str, np.ndarray], rows: np.ndarray) -> tuple[Any, Any]:
    """Return (the parameters as JAX takes them, the body of a prompt's rows [K, T, H])."""
    arrays = {name: jnp.asarray(array) for name, array in params.items()}
    given = jnp.asarray(rows[None], jnp.float32)
    return arrays, codec.quantize(arrays, (), given, prompt(given))


def read_back(codec: Codec, params: dict[str, np.ndarray], rows: np.ndarray) -> np.ndarray:
    """Return what a prompt's rows [K, T, H] read as."""
    arrays, body = body_of(codec, params, rows)
    return np.asarray(codec.dequantize(arrays, (), body))[0]


def rounded(x: np.ndarray, axis: int, bits: int = 2, group: int | None = None) -> np.ndarray:
    """Round groups along an axis, all of it by default, to evenly spaced levels between the
    smallest and the largest entry."""
    moved = np.moveaxis(x, axis, -1)
    groups = moved.reshape(*moved.shape[:-1], -1, group or moved.shape[-1])
    low, high = (f(groups, axis=-1, keepdims=True) for f in (np.min, np.max))
    step = (high - low) / (2**bits - 1)
    codes = np.round((groups - low) / np.where(step == 0, 1, step))
    return np.moveaxis((codes * step + low).reshape(moved.shape), -1, axis)


def clipped(x: np.ndarray, kept: float) -> np.ndarray:
    """Clip each row [..., H] to the size of its entry at that share of its sizes."""
    maximum = np.sort(np.abs(x), axis=-1)[..., int(kept * x.shape[-1]), None]
    return x.clip(-maximum, maximum)


def assert_nearly_all_agree(
    found: np.ndarray, wanted: np.ndarray, atol: float, share: float = 0.02
) -> None:
    """A code midway between two levels may be either: at most that share of the rows differs."""
    off = (np.abs(found - wanted) > atol).any(axis=-1)
    assert off.mean() <= share, f"{off.mean():.3f} of the rows differ"

"""Moments of a text's keys and values and of the loss's gradients, all that a basis is fitted to.

    mean  E x,   second  E x x^T,   metric  E g g^T        for each layer, side and KV head

x are keys before RoPE or values, g the gradients of the mean loss with respect to them, over the
tokens of random samples from SINK on. A mixture of texts is the mean of their moments.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from kvq_jax.codecs.codec import Side
from kvq_jax.files import whole
from kvq_models import Llama
from kvq_models.calibration import samples
from kvq_models.calibration.activations import Recorded, record
from kvq_tools.evaluation.protocol import SINK

SIDES: tuple[Side, Side] = ("k", "v")


class Moments(NamedTuple):
    """Moments of one side of all layers."""

    mean: Float[np.ndarray, "L K H"]
    second: Float[np.ndarray, "L K H H"]
    metric: Float[np.ndarray, "L K H H"]

    @property
    def covariance(self) -> Float[np.ndarray, "L K H H"]:
        return self.second - self.mean[..., :, None] * self.mean[..., None, :]


BothSides = dict[Side, Moments]


def of_text(llama: Llama, ids: Int[np.ndarray, " n"], count: int, length: int) -> BothSides:
    """Return the moments over `count` random samples of `length` tokens."""
    config = llama.config
    shape = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    sums: BothSides = {
        side: Moments(np.zeros(shape), *(np.zeros((*shape, shape[-1])) for _ in range(2)))
        for side in SIDES
    }

    def add(recorded: Recorded) -> None:
        if recorded.side == "q":
            return
        rows = np.moveaxis(recorded.array[SINK:].astype(np.float64), 0, 1)
        square = np.swapaxes(rows, 1, 2) @ rows
        into = sums[recorded.side]
        if recorded.what == "rows":
            into.mean[recorded.layer] += rows.sum(axis=1)
            into.second[recorded.layer] += square
        else:  # of the summed loss
            into.metric[recorded.layer] += square / length**2

    for window in samples.draw(ids, count, length, seed=0):
        record(llama, window, add)
    tokens = count * (length - SINK)
    means: BothSides = {
        side: Moments(total.mean / tokens, total.second / tokens, total.metric / tokens)
        for side, total in sums.items()
    }
    return means


def with_rows(
    moments: BothSides, keys: Sequence[np.ndarray], values: Sequence[np.ndarray]
) -> BothSides:
    """Return the moments of other rows, [B, K, T, H] for each layer, with the same gradients."""
    of_rows: BothSides = {}
    for side, rows in zip(SIDES, (keys, values), strict=True):
        means, seconds = zip(*map(_of_rows, rows), strict=True)
        of_rows[side] = Moments(np.stack(means), np.stack(seconds), moments[side].metric)
    return of_rows


def _of_rows(rows: Float[np.ndarray, "B K T H"]) -> tuple[np.ndarray, np.ndarray]:
    flat = np.moveaxis(rows[:, :, SINK:], 1, 0).reshape(rows.shape[1], -1, rows.shape[-1])
    return flat.mean(axis=1, dtype=np.float64), np.swapaxes(flat, 1, 2) @ flat / flat.shape[1]


def mixed(parts: Sequence[BothSides]) -> BothSides:
    """Return the moments of a mixture in equal parts."""
    return {
        side: Moments(
            *(np.mean(field, axis=0) for field in zip(*(p[side] for p in parts), strict=True))
        )
        for side in SIDES
    }


def save(moments: BothSides, file: pathlib.Path) -> None:
    """Write the moments of both sides."""
    arrays = {
        f"{side}_{name}": array
        for side, of_side in moments.items()
        for name, array in of_side._asdict().items()
    }
    with whole.replacing(file) as unfinished, open(unfinished, "wb") as stream:
        np.savez(stream, **arrays)


def load(file: pathlib.Path) -> BothSides:
    """Read moments that `save` wrote."""
    with np.load(file) as arrays:
        return {
            side: Moments(*(arrays[f"{side}_{name}"] for name in Moments._fields)) for side in SIDES
        }

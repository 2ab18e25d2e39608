"""Measure how alike successive layers' inputs, keys and values are: Figure 3 of the XQuant paper in
numbers.

    cosine    mean over the tokens of  a_i . a_{i-1} / (|a_i| |a_{i-1}|)
    range     mean over the tokens and their groups of channels of  (max - min) of a_i - a_{i-1}
              over  (max - min) of a_i

The range sets the step of a uniform quantizer, so if it is below 1, XQuant-CL's differences are
easier to code than what they are taken of. Rows are those of the exact forward pass over windows of
a text, each a sequence of its own; means are over the tokens of all windows, and a bootstrap draws
whole windows. Post-norm X is the normalized input, which XQuant caches and the figure shows;
unit-norm X leaves the layer's own gains out; the residual stream is what both are made of; keys are
before RoPE, all heads of a token together.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

import kvq_jax as kvq
from kvq_models import load_llama
from laboratory.studies.squat_subspace import layer_inputs
from laboratory.study import first_tokens

KINDS = ("post-norm X", "unit-norm X", "residual stream", "keys", "values")


def rows_of(inputs: kvq.types.LayerInputs) -> tuple[Float[np.ndarray, "T C"], ...]:
    """Return the rows of one sequence in the order of `KINDS`, fp32."""
    assert inputs.x is not None
    assert inputs.residual is not None
    assert inputs.k_pre is not None
    unit = inputs.residual / jnp.sqrt(jnp.mean(jnp.square(inputs.residual), axis=-1, keepdims=True))
    keys, values = (
        jnp.moveaxis(rows, 1, 2).reshape(*inputs.x.shape[:2], -1)
        for rows in (inputs.k_pre, inputs.v)
    )
    x, unit_rows, stream, k, v = (
        np.asarray(rows[0], np.float32) for rows in (inputs.x, unit, inputs.residual, keys, values)
    )
    return x, unit_rows, stream, k, v


def cosine(rows: Float[np.ndarray, "T C"], before: Float[np.ndarray, "T C"]) -> float:
    """Return the mean cosine between the rows of a token."""
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(before, axis=1)
    return float(np.mean(np.sum(rows * before, axis=1) / lengths))


def relative_range(
    rows: Float[np.ndarray, "T C"], before: Float[np.ndarray, "T C"], group: int
) -> float:
    """Return the mean range of a group of the difference over that of the rows. Raises ValueError
    if the group does not divide the width."""
    if rows.shape[1] % group:
        raise ValueError(f"groups of {group} channels do not divide rows of {rows.shape[1]}")

    def ranges(a: Float[np.ndarray, "T C"]) -> Float[np.ndarray, "T groups"]:
        return np.ptp(a.reshape(len(a), -1, group), axis=2)

    return float(np.mean(ranges(rows - before) / ranges(rows)))


def measured(
    layers: Sequence[kvq.types.LayerInputs], group: int
) -> tuple[list[list[float]], list[list[float]]]:
    """Return the cosines and the ranges of one sequence, [pairs][kinds]."""
    rows = list(map(rows_of, layers))
    pairs = [list(zip(after, before, strict=True)) for before, after in itertools.pairwise(rows)]
    cosines = [[round(cosine(after, before), 5) for after, before in pair] for pair in pairs]
    return cosines, [
        [round(relative_range(after, before, group), 5) for after, before in pair] for pair in pairs
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--text", metavar="FILE", type=pathlib.Path, required=True)
    add("--windows", type=int, default=8, help="windows of the text, from its beginning")
    add("--tokens", type=int, default=2048, help="tokens of a window")
    add("--group", type=int, default=64, help="channels of a token that share a range")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return cosines and ranges of every pair of layers, [pairs][windows][kinds].

    Raises ValueError if the text is too short or a group does not divide the model's widths.
    """
    llama, tokenizer = load_llama(options.model, dtype="float32", weights="dense")
    windows = first_tokens(tokenizer, options.text, options.windows * options.tokens).reshape(
        options.windows, options.tokens
    )
    by_window = [measured(layer_inputs(llama, window), options.group) for window in windows]
    cosines, ranges = (np.swapaxes(field, 0, 1).tolist() for field in zip(*by_window, strict=True))
    return {"kinds": KINDS, "cosines": cosines, "ranges": ranges}

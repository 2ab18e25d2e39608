"""Predict the channels of key outliers from the key projection's weights alone, and measure them
(XQuant, Appendix B).

    K = X W_k (+ b)     X is the post-norm layer input
    W_k = U S B^T       thin SVD of a layer's whole projection, all KV heads side by side
    latent      X U, one channel for each singular direction, the largest singular value first
    prediction  the channels of keys with the largest |B^T[0]|: where the first latent channel goes
    truth       the channel of keys before RoPE with the largest mean magnitude over the tokens of a
                text

The paper's claim: all tokens lie close to the first column of U_k, so that the first latent channel
holds the outliers, and what it is multiplied with, sigma_0 B^T[0], decides which channels of the
keys have them. It makes no such claim of U_v.

Two things are not in W_k. A bias adds the same vector to every key: the channel where that is large
may be the largest whatever X W_k is. QK-norm divides each head's key by its own root mean square
and multiplies it by a gain for each channel: heads that were larger no longer are. So there are two
truths here, the projection X W_k, of which the argument speaks, and the keys that a cache sees;
without a bias and QK-norm they are the same.

Source: Tomar et al., XQuant, Appendix B (Figures B.2 and B.3, Table B.2), where B^T is misprinted
as B_v^T.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvq_jax.types.array_types import PositionsBT, ValidBT
from kvq_models.llama.model import HiddenBTD, Layer, Llama, layer_forward, merge_heads
from kvq_models.llama.rope import Ropes, ropes_for

TOPS = (1, 2, 4, 8)  # how many predictions Table B.2 allows


class Decomposition(NamedTuple):
    """The thin SVD W = U diag(S) B^T of a projection [D, C], R = min(D, C), fp32; singular values
    fall."""

    u: Float[np.ndarray, "D R"]
    singular: Float[np.ndarray, "R"]
    bt: Float[np.ndarray, "R C"]


class Magnitudes(NamedTuple):
    """Mean magnitudes over tokens, by channel, fp32: of X U_k, X U_v, X W_k, and of keys before
    RoPE with their bias and QK-norm."""

    latent_k: Float[np.ndarray, "R"]
    latent_v: Float[np.ndarray, "R"]
    projected: Float[np.ndarray, "C"]
    keys: Float[np.ndarray, "C"]


class Peak(NamedTuple):
    """The largest of the mean magnitudes, relative to the median one, and its channel."""

    ratio: float
    channel: int


def decompose(kernel: Float[np.ndarray, "D C"]) -> Decomposition:
    """Return the SVD of a projection in the convention y = x kernel. Exact to fp32; kernel of any
    float dtype."""
    return Decomposition(*np.linalg.svd(np.asarray(kernel, np.float32), full_matrices=False))


def singular_values(kernel: Float[np.ndarray, "D C"]) -> Float[np.ndarray, "R"]:
    """Return the singular values alone, several times faster."""
    return np.linalg.svd(np.asarray(kernel, np.float32), compute_uv=False)


def predicted_channels(parts: Decomposition, count: int = max(TOPS)) -> Int[np.ndarray, "count"]:
    """Return the channels with the largest |B^T[0]|, the largest first; all of them if there are
    fewer than `count`."""
    return np.argsort(-np.abs(parts.bt[0]), kind="stable")[:count]


def first_share(singular: Float[np.ndarray, "R"]) -> tuple[float, float]:
    """Return (sigma_0 / sum sigma, sigma_0^2 / sum sigma^2); zero for a projection that is zero."""
    total, energy = float(singular.sum()), float(np.square(singular, dtype=np.float64).sum())
    return (float(singular[0]) / total, float(singular[0]) ** 2 / energy) if total else (0.0, 0.0)


def peak(magnitudes: Float[np.ndarray, "R"]) -> Peak:
    """Return the largest channel; its ratio is infinite if at least half of the channels are
    zero and not all are."""
    channel = int(np.argmax(magnitudes))
    largest, median = float(magnitudes[channel]), float(np.median(magnitudes))
    return Peak(largest / median if median else (float("inf") if largest else 1.0), channel)


def place(predicted: Sequence[int] | Int[np.ndarray, "count"], channel: int) -> int | None:
    """Return the place, from 1, at which the channel was predicted; None if it was not."""
    matches = np.flatnonzero(np.asarray(predicted) == channel)
    return int(matches[0]) + 1 if matches.size else None


def accuracies(places: Sequence[int | None]) -> dict[int, float]:
    """Return for each k of Table B.2 the share of layers whose true channel is among the first k
    predictions."""
    return {k: sum(at is not None and at <= k for at in places) / len(places) for k in TOPS}


def layer_magnitudes(
    llama: Llama,
    rows: Int[np.ndarray, "rows T"],
    bases: Iterator[tuple[Float[np.ndarray, "D R"], Float[np.ndarray, "D R"]]],
) -> Iterator[Magnitudes]:
    """Yield the magnitudes of every layer over all tokens of `rows`, which are sequences of their
    own, by exact forward passes.

    bases: (U_k, U_v) of each layer, taken when the layer is reached, so that only one layer's are
    needed at a time. Besides the weights, the hidden states of all rows and the activations of one
    row in one layer exist. Sums are fp32; X, keys and attention have the model's dtype. Raises
    ValueError, naming the layer, if magnitudes are not finite.
    """
    count, length = rows.shape
    positions_BT = jnp.arange(length, dtype=jnp.int32)[None]
    valid_BT, rope = jnp.ones((1, length), bool), ropes_for(llama.config, length)
    hidden = [llama.embed_tokens(jnp.asarray(row[None], jnp.int32)) for row in rows]
    for index, (layer, basis) in enumerate(zip(llama.layers, bases, strict=True)):
        sums = []
        for row in range(count):
            hidden[row], magnitudes = _layer(
                layer,
                hidden[row],
                (jnp.asarray(basis[0]), jnp.asarray(basis[1])),
                positions_BT,
                valid_BT,
                rope,
            )
            sums.append([np.asarray(part, np.float64) for part in magnitudes])
        means = Magnitudes(
            *(np.asarray(sum(parts) / rows.size, np.float32) for parts in zip(*sums, strict=True))
        )
        if not all(np.isfinite(part).all() for part in means):
            raise ValueError(
                f"layer {index}: keys or values are not finite in {hidden[0].dtype.name}"
            )
        yield means


@jax.jit
def _layer(
    layer: Layer,
    hidden_BTD: HiddenBTD,
    basis: tuple[Array, Array],
    positions_BT: PositionsBT,
    valid_BT: ValidBT,
    rope: Ropes,
) -> tuple[HiddenBTD, list[Array]]:
    """Return the layer's output and the sums over tokens of the magnitudes that `Magnitudes`
    names."""
    x_BTD = layer.input_norm(hidden_BTD)
    wide_BTD = x_BTD.astype(jnp.float32)
    parts = (
        wide_BTD @ basis[0],
        wide_BTD @ basis[1],
        x_BTD @ layer.k_proj.kernel[...],
        merge_heads(layer.keys(x_BTD)),
    )
    sums = [jnp.sum(jnp.abs(part.astype(jnp.float32)), axis=(0, 1)) for part in parts]
    return layer_forward(layer, hidden_BTD, positions_BT, valid_BT, rope), sums

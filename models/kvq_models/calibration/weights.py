"""Weights of a few bits: sensitivity-weighted levels for each output channel of the layers'
projections.

    minimize  sum_i F_i (w_i - nearest level)^2    2^bits levels per row of W (output channel)
    F = mean over samples of (d loss / d w)^2      loss of a whole sample in nats; F is the
                                                   diagonal of the Fisher information

The fit is KVQuant's (kvq_jax/methods/kvquant/kmeans.py). A fraction of a matrix's weights may stay
unquantized and out of the fit: a ninth of them have the largest F, the others the largest
magnitude. The result is arrays, or packed matrices (llama/tabled_weights.py). The embedding, the
head, norms and biases are not changed.

The backward pass goes from the last layer to the first, all samples through one layer at a time,
with the unquantized weights. Memory besides the model: the inputs of all layers for all samples,
samples x length x width x layers in fp32 (0.6 GB for 16 x 512 tokens of SmolLM2, 8.6 GB for Llama
3.1 8B), and the quantized weights.

Source: Kim et al., SqueezeLLM, sections 4.1 and 4.2; KVQuant quantizes weights with it (section
4.4, Table 5).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from kvq_jax.methods.kvquant.kmeans import nearest, weighted_levels_of_rows
from kvq_jax.types.array_types import Integers
from kvq_models.calibration import samples as text_samples
from kvq_models.calibration.activations import gradient_of_the_loss
from kvq_models.calibration.progress import Progress, silent
from kvq_models.calibration.weight_bits import BITS
from kvq_models.llama import hf_names
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import HiddenBTD, Layer, Llama, layer_forward
from kvq_models.llama.packed_loading import dense_llama
from kvq_models.llama.packed_weights import Weight
from kvq_models.llama.quantized.dense_and_sparse import MAX_INPUTS, WORD
from kvq_models.llama.rope import ropes_for
from kvq_models.llama.tabled_weights import packed_rows

PROJECTIONS = (  # paths of the leaves of a layer's projections
    *(f"{name}_proj.kernel" for name in "qkvo"),
    *(f"mlp.{name}_proj.kernel" for name in ("gate", "up", "down")),
)
MAX_SPARSE = 0.1
# share of the unquantized weights that sensitivity selects: SqueezeLLM's 0.05 of 0.45 %
OF_SENSITIVITY = 1 / 9
# share of a row's mean F that is added to each: weights without a gradient in the text still count
FLOOR = 1e-4
ROWS = 256  # rows fitted at a time


@dataclasses.dataclass(frozen=True)
class WeightCount:
    """The size and error of a quantized model.

    weights         number of weights in the projections
    bits            per weight on average: its code, its row's levels in 16 bits each, and 16 bits
                    plus a 16-bit column for a weight that stays unquantized
    weighted_error  mean of F (w - w^)^2 divided by the mean of F w^2
    """

    weights: int
    bits: float
    weighted_error: float


def check_request(
    config: LlamaConfig,
    token_ids: Integers,
    bits: int,
    sparse: float,
    samples: int,
    length: int,
    *,
    packed: bool = False,
) -> None:
    """Raise ValueError, in one line, for everything that can be refused without the weights."""
    if bits not in BITS:
        raise ValueError(f"{bits=} is not supported; choose from {', '.join(map(str, BITS))}")
    if config.experts is not None:
        raise ValueError(
            "a model with a mixture of experts has no MLP to quantize, and most of its weights"
            " would stay as they are: take a model without experts"
        )
    if packed and bits != 4:
        raise ValueError(f"{bits=} cannot be packed: packed weights have 4 bits")
    widths = {config.hidden_size, config.num_attention_heads * config.head_dim}
    narrow = [n for n in sorted(widths | {config.intermediate_size}) if n % WORD or n > MAX_INPUTS]
    if packed and narrow:
        raise ValueError(
            f"matrices of {narrow[0]} inputs cannot be packed: it takes a multiple of {WORD}, at"
            f" most {MAX_INPUTS}"
        )
    if not 0 <= sparse <= MAX_SPARSE:
        raise ValueError(f"{sparse=} must be a fraction between 0 and {MAX_SPARSE:g}")
    text_samples.check(token_ids, samples, length, config)


def quantize_weights(
    llama: Llama,
    token_ids: Integers,
    *,
    bits: int,
    sparse: float = 0.0,
    packed: bool = False,
    samples: int = 16,
    length: int = 512,
    seed: int = 0,
    progress: Progress[Any] | None = None,
) -> tuple[Llama, WeightCount]:
    """Return the model with each projection's weights replaced by the nearest of its row's levels,
    in the model's dtype, and the size that this takes packed.

    Args:
        llama: the model.
        token_ids: the tokens of a text, [n] integers.
        bits: per weight: 2, 3 or 4.
        sparse: fraction of each matrix's weights that stay unquantized, at most 0.1.
        packed: True for matrices of codes, levels and sparse entries (TabledMatrix) with the same
            values, False for arrays. Packed weights have 4 bits.
        samples: random windows of the text to read.
        length: tokens per window.
        seed: of the random windows.
        progress: wraps both loops, as tqdm would.

    The same arguments give the same weights on the same machine. Raises ValueError, in one line, if
    the arguments cannot be met (`check_request`) or gradients are not finite.
    """
    progress = progress or silent
    check_request(llama.config, token_ids, bits, sparse, samples, length, packed=packed)
    llama = dense_llama(llama)
    windows = text_samples.draw(token_ids, samples, length, seed, llama.config.bos_token_id)
    inputs, cotangents = _inputs_and_gradients(llama, progress(list(windows), "running samples"))
    replaced: dict[str, Weight] = {}
    count = _Count()
    for index in progress(list(reversed(range(len(llama.layers)))), "fitting layers"):
        layer, squares = llama.layers[index], []
        for sample in range(samples):
            cotangents[sample], squared = _backward(
                layer, jnp.asarray(inputs[sample].pop()), cotangents[sample]
            )
            squares = [squared] if not squares else [jax.tree.map(jnp.add, *squares, squared)]
        for name, leaf in _kernels(layer).items():
            kernel = np.asarray(leaf, np.float32).T
            sensitivity = np.asarray(squares[0][name]).T / samples
            if not np.isfinite(sensitivity).all():
                raise ValueError(
                    f"layer {index}, {name}: gradients of a sample are not finite in"
                    f" {leaf.dtype.name}"
                )
            rows = quantized_rows(kernel, sensitivity, bits, sparse)
            count.add(rows, sensitivity, bits)
            replaced[f"layers.{index}.{name}"] = (
                packed_rows(*rows).astype(leaf.dtype)
                if packed
                else jnp.asarray(rows.values.T, leaf.dtype)
            )
    return hf_names.replace_weights(llama, replaced), count.total


def _inputs_and_gradients(
    llama: Llama, windows: Iterable[Int[np.ndarray, " length"]]
) -> tuple[list[list[np.ndarray]], list[HiddenBTD]]:
    """Return, for each window, the inputs of all layers, and the gradient of the loss with respect
    to the last layer's output."""
    inputs: list[list[np.ndarray]] = []
    cotangents: list[HiddenBTD] = []
    for window in windows:
        hidden, of_layers = llama.embed_tokens(jnp.asarray(window[None, :-1], jnp.int32)), []
        for layer in llama.layers:
            of_layers.append(np.asarray(hidden))
            hidden = _forward(layer, hidden)
        inputs.append(of_layers)
        targets = jnp.asarray(window[None, 1:], jnp.int32)
        cotangents.append(gradient_of_the_loss(llama, hidden, targets)[1])
    return inputs, cotangents


@dataclasses.dataclass
class _Count:
    """The sums of a `WeightCount` over the matrices so far."""

    weights: int = 0
    bits: int = 0
    error: float = 0.0
    energy: float = 0.0

    def add(self, rows: QuantizedRows, sensitivity: np.ndarray, bits: int) -> None:
        self.weights += rows.weights.size
        self.bits += rows.weights.size * bits + len(rows.weights) * 16 * 2**bits
        self.bits += 32 * int(rows.kept.sum())
        self.error += (sensitivity * np.square(rows.weights - rows.values)).sum()
        self.energy += (sensitivity * np.square(rows.weights)).sum()

    @property
    def total(self) -> WeightCount:
        error = float(self.error / self.energy) if self.energy > 0 else 0.0
        return WeightCount(self.weights, self.bits / self.weights, error)


class QuantizedRows(NamedTuple):
    """Weights as codes of their row's levels, but for those that are kept, whose codes say
    nothing."""

    weights: Float[np.ndarray, "out inputs"]
    codes: UInt8[np.ndarray, "out inputs"]
    levels: Float[np.ndarray, "out levels"]
    kept: Bool[np.ndarray, "out inputs"]

    @property
    def values(self) -> Float[np.ndarray, "out inputs"]:
        rounded = np.take_along_axis(self.levels, self.codes.astype(np.intp), axis=1)
        return np.where(self.kept, self.weights, rounded)


def quantized_rows(
    weights: Float[np.ndarray, "out inputs"],
    sensitivity: Float[np.ndarray, "out inputs"],
    bits: int,
    sparse: float,
) -> QuantizedRows:
    """Return the weights rounded to the nearest of their row's levels, in the weights' dtype, and
    a mask of those that stay unquantized."""
    kept = staying(weights, sensitivity, sparse)
    mean = sensitivity.mean(axis=1, keepdims=True, dtype=np.float64)
    importance = np.where(kept, 0, sensitivity + np.where(mean > 0, FLOOR * mean, 1))
    # no weight of such a row is rounded, but the fit needs one with importance
    importance[kept.all(axis=1)] = 1
    codes = np.zeros(weights.shape, np.uint8)
    levels = np.empty((len(weights), 2**bits), weights.dtype)
    for at in range(0, len(weights), ROWS):
        part = slice(at, at + ROWS)
        fitted = weighted_levels_of_rows(weights[part], importance[part], 2**bits)
        levels[part] = fitted
        for row, row_weights, row_levels in zip(codes[part], weights[part], fitted, strict=True):
            row[:] = nearest(row_weights, row_levels)
    return QuantizedRows(weights, codes, levels, kept)


def staying(
    weights: np.ndarray, sensitivity: np.ndarray, sparse: float
) -> Bool[np.ndarray, "out inputs"]:
    """Return a mask of the weights that stay unquantized: the most sensitive ones and the largest
    of the others."""
    count = round(sparse * weights.size)
    sensitive = round(count * OF_SENSITIVITY)
    kept = np.zeros(weights.size, bool)
    kept[_largest(sensitivity.ravel(), sensitive)] = True
    kept[_largest(np.where(kept, -1, np.abs(weights).ravel()), count - sensitive)] = True
    return kept.reshape(weights.shape)


def _largest(values: np.ndarray, count: int) -> Int[np.ndarray, " count"]:
    if count:
        return np.argpartition(values, values.size - count)[values.size - count :]
    return np.zeros(0, int)


@jax.jit
def _forward(layer: Layer, hidden: HiddenBTD) -> HiddenBTD:
    length = hidden.shape[1]
    return layer_forward(
        layer,
        hidden,
        jnp.arange(length, dtype=jnp.int32)[None],
        jnp.ones((1, length), bool),
        ropes_for(layer.config, length),
    )


@jax.jit
def _backward(
    layer: Layer, hidden: HiddenBTD, cotangent: HiddenBTD
) -> tuple[HiddenBTD, dict[str, jax.Array]]:
    """Return the gradient with respect to a layer's input, and the squared gradients with respect
    to its kernels, fp32."""

    def run(hidden: HiddenBTD, kernels: dict[str, jax.Array]) -> HiddenBTD:
        leaves = [kernels.get(name, leaf) for name, leaf in _named(layer)]
        return _forward(jax.tree.unflatten(jax.tree.structure(layer), leaves), hidden)

    _, pull = jax.vjp(run, hidden, _kernels(layer))
    cotangent, gradients = pull(cotangent)
    return cotangent, jax.tree.map(
        lambda gradient: jnp.square(gradient.astype(jnp.float32)), gradients
    )


def _kernels(layer: Layer) -> dict[str, jax.Array]:
    """Return the kernels [in, out] of a layer's projections by their paths."""
    return {name: leaf for name, leaf in _named(layer) if name in PROJECTIONS}


def _named(layer: Layer) -> list[tuple[str, jax.Array]]:
    """Return the leaves of a layer with their paths, as kvq_models.llama.hf_names writes them."""
    return [
        (hf_names.path_name(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(layer)
    ]

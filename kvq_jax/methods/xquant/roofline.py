"""The longest context at which rebuilding keys and values still hides behind memory traffic
(XQuant, section 3.4).

A cache that keeps less than keys and values computes them again in every decode step. With l cached
tokens, one layer of it

    computes   f l           FLOPs
    reads      c l + w       bytes

with f the FLOPs per token to rebuild the keys and values that attention reads (a multiply-add
counts as two), c the bytes of the cache per token, and w the bytes of weights, read once for all
sequences of a batch. At best the two overlap. With P = peak FLOP/s / peak bandwidth, the ridge
point, computing takes no longer than reading up to

    f l = P (c l + w)        l = P w / (f - P c),  and any length if f <= P c

The paper's equations (3) and (4) are this with its own f, c and w (`paper_cost`). It leaves out the
rest of a step, the projections of the one new token and attention itself, and so do we. l counts
the tokens of all sequences together: each of B equally long ones has l / B.

Here values are never rebuilt, unlike in the paper. sum_t p_t (x_t W_v) = (sum_t p_t x_t) W_v, so
the N query heads weigh cached rows, and only their sums are projected:

    f = 2 C_k K H + 2 N C_v

with C_k, C_v the widths of the cached rows that keys and values come from, in place of the paper's
2 (C_k + C_v) K H. That is less if N < K H: in any model whose head dim exceeds its query heads per
KV head.

These are limits from data sheets, not measured times. Source: Tomar et al., XQuant, section 3.4;
Williams et al., Roofline.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from kvq_jax.codecs.codec import Codec
from kvq_jax.methods.xquant.codec import XCodec, XCrossLayerCodec
from kvq_jax.peak_rates import Number
from kvq_jax.types.array_types import ModelDims

EXACT_BITS = 16  # of an element in full precision


@runtime_checkable
class LayerDims(ModelDims, Protocol):
    """The dimensions that determine the size of a layer's weights."""

    @property
    def intermediate_size(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """The cost of one layer in one decode step: f, c and w of the module's docstring. Zero FLOPs
    mean that nothing is rebuilt."""

    flops_per_token: Number
    cache_bytes_per_token: Number
    weight_bytes: Number

    def longest_hidden(self, ridge: Number) -> float:
        """Return l, the exact solution, in tokens of all sequences together. Infinite if reading
        always takes longer."""
        surplus = self.flops_per_token - ridge * self.cache_bytes_per_token
        return ridge * self.weight_bytes / surplus if surplus > 0 else math.inf


def longest_hidden(layers: Iterable[LayerCost], ridge: Number) -> float:
    """Return the smallest l of any layer, beyond which rebuilding costs time. Infinite if no layer
    rebuilds anything."""
    return min((layer.longest_hidden(ridge) for layer in layers), default=math.inf)


def flops_of_keys(key_width: int, value_width: int, kv_width: int, query_heads: int) -> int:
    """Return 2 C_k K H + 2 N C_v, the FLOPs per cached token of rebuilding keys and weighing cached
    rows for the values of one query token.

    kv_width = K H.
    """
    return 2 * key_width * kv_width + 2 * query_heads * value_width


def weight_bytes(config: LayerDims, bytes_per_weight: Number = 2) -> Number:
    """Return the bytes of a layer's seven matrices: q, k, v, o, gate, up, down. Norms and biases,
    less than a thousandth, are left out."""
    d, h = config.hidden_size, config.head_dim
    attention = 2 * d * h * (config.num_attention_heads + config.num_key_value_heads)
    return bytes_per_weight * (attention + 3 * d * config.intermediate_size)


def paper_cost(
    width: int,
    kv_width: int,
    bits: Number,
    *,
    latent: bool,
    weights: Number | None = None,
    cross_layer: bool = False,
    base_bits: Number = 4,
) -> LayerCost:
    """Return a layer's cost as the paper counts it, at width d = `width`, with d/g = `kv_width` key
    channels and e bits without scales.

        x form, where g = 1 (equation 3)    f = 4 d (d/g)    c = e/8 d      w = weights
        latents (equation 4)                f = 4 (d/g)^2    c = e/8 d/g    w = weights + 4 (d/g)^2

    Equation (4) reads e/8 d/g for each token, and 40.6K tokens follow from that. The text above it
    counts both latents, 2 e/8 d/g, which gives 41.6K.

    Args:
        width: d.
        kv_width: d/g.
        bits: e.
        latent: True for equation (4).
        weights: bytes of a layer's matrices. The default is the paper's 2 * 12 d^2 (Llama-2-7B) or
            2 * 13 d^2 (Llama-3.1-8B).
        cross_layer: XQuant-CL, for which the paper has the terms but no equation. c grows by
            e_b/8 d bytes of the accumulator, and f by 2 d to add to it. With latents, f = 8 d d/g
            (out of the accumulator for both sides, and into it), c counts both latents, and w
            counts U_kv, 4 d d/g bytes.
        base_bits: e_b.
    """
    if weights is None:
        weights = 2 * (13 if latent else 12) * width**2
    if not latent:
        flops, read = 4 * width * kv_width, bits / 8 * width
    elif cross_layer:
        flops, read = 8 * width * kv_width, 2 * bits / 8 * kv_width
        weights = weights + 4 * width * kv_width
    else:
        flops, read, weights = 4 * kv_width**2, bits / 8 * kv_width, weights + 4 * kv_width**2
    if cross_layer:
        flops, read = flops + 2 * width, read + base_bits / 8 * width
    return LayerCost(flops, read, weights)


def paper_cost_of(
    codecs: tuple[Codec, Codec], base: Codec | None, config: ModelDims, weights: Number
) -> LayerCost | None:
    """Return `paper_cost` of a layer with these codecs of keys and values, or None for codecs that
    the paper does not cover.

    base: the codec of the layer that starts the accumulator. weights: bytes of a layer's matrices.
    """
    k, v = codecs
    if not (isinstance(k, XCodec | XCrossLayerCodec) and isinstance(v, XCodec | XCrossLayerCodec)):
        return None
    cross = k.facts.cross_layer
    more = {}
    if cross is not None and not cross.starts and base is not None:
        more = {"cross_layer": True, "base_bits": _bits(base)}
    kv_width = config.num_key_value_heads * config.head_dim
    return paper_cost(
        config.hidden_size,
        kv_width,
        (_bits(k) + _bits(v)) / 2,
        latent=k.latent,
        weights=weights,
        **more,
    )


def _bits(codec: Codec) -> int:
    """Return the bits of an element, as the paper counts them."""
    layout = codec.facts.code_layout
    return EXACT_BITS if layout is None else layout.bits

"""Describe the layers of a cache for `kvq doctor`: their codecs, and the kernels that read them."""

from __future__ import annotations

from typing import Any

import kvq_jax as kvq
from kvq_jax.attention import dispatch
from kvq_jax.codecs.codec import Codec
from kvq_jax.layer.plan import LayerPlan


def describe_layer(
    index: int, plan: LayerPlan, spec: kvq.cache.CacheSpec, query_heads: int
) -> dict[str, Any]:
    """Describe a layer: both sides (`kv` if both are read from the same rows), why one is left in
    full precision, and why GPU and CPU kernels cannot read the layer (None if they can)."""
    skipped = index in spec.skip_layers
    if skipped:
        reason = "skip_layers names it"
    elif spec.exact:
        reason = "the cache is dense"
    elif not plan.quantizes:
        reason = "its options keep rows as they are"
    else:
        reason = next(
            (
                f"{side} is {method.name}"
                for side, method in (("k", spec.k), ("v", spec.v))
                if method.exact
            ),
            None,
        )
    sides = {
        side: describe_side(codec, plan)
        for side, codec in zip(plan.names, plan.codecs, strict=True)
    }
    return {
        "layer": index,
        "quantized": plan.quantizes,
        "reason": reason,
        "no_kernel": dispatch.unsupported(plan, query_heads, 1),
        "no_native_kernel": dispatch.unsupported(plan, query_heads, 1, "native"),
        **sides,
    }


def describe_side(codec: Codec, plan: LayerPlan) -> dict[str, Any]:
    """Return the codec's resolved options, its stored bits per element of keys or values, and how
    its codes are packed."""
    tokens = 32 * plan.regions.block
    body = codec.body(1, plan.heads, tokens)
    described = codec.describe()
    described["stored_bits"] = (
        8 * kvq.size.nbytes(body) / (plan.heads * tokens * plan.head_dim * (2 if plan.joint else 1))
    )
    if layout := codec.facts.code_layout:
        described["packing"] = {
            "code_bits": layout.bits,
            "plane_channels": layout.width,
            "tokens_per_word_row": layout.slots,
            "padding_channels": layout.chunks * layout.width - layout.channels,
        }
    return described

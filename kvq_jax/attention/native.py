"""Calls of the C++ kernels with the arrays of caches."""

from __future__ import annotations

from jaxtyping import Array, Float

from cpu_kernels.attention import decode_attention
from cpu_kernels.body import Body
from kvq_jax.attention import online_softmax, streaming
from kvq_jax.codecs.base import Codec
from kvq_jax.types.array_types import Tree
from pallas_kernels.decode_attention.partial_attention import PartialAttention


def read_body(view: streaming.View, queries: streaming.Queries, rows: Float[Array, "B K R H"], part: PartialAttention) -> PartialAttention:
    """Return `part` with the body added, as `streaming.read_chunks` does, but by the C++ kernel."""
    plan = view.plan
    if not plan.regions.body_capacity:
        return part
    keys, values = (_body_and_arrays(*side) for side in zip(plan.codecs, view.params, view.body, strict=True))
    query = plan.k.query(view.params[0], view.stats[0], rows)
    of_body = decode_attention(query, keys, values, queries.limits, capacity=plan.regions.body_capacity)
    return online_softmax.merge(part, PartialAttention(*of_body))


def _body_and_arrays(codec: Codec, params: Tree, body: Tree) -> tuple[Body, list[Array]]:
    description = codec.native_body()
    if isinstance(description, str):
        raise ValueError(description)
    return description, codec.kernel_arrays(params, body)

"""Whether a cache quantizes anything of a model: judged from its resolved layers, since a method's options may leave all of them exact."""

from __future__ import annotations

from kvq_jax.cache.cache import Cache
from kvq_jax.cache.spec import CacheSpec
from kvq_jax.codecs.base import Codec
from kvq_jax.codecs.bias_subtracting import inner_codec
from kvq_jax.layer.plan import LayerPlan
from kvq_jax.methods.dense import Dense, DenseCodec
from kvq_jax.methods.xquant.codec import XCodec, XCrossLayerCodec


def is_dense(spec: CacheSpec) -> bool:
    """Whether the method asked for is the exact one."""
    return isinstance(spec.k, Dense) and isinstance(spec.v, Dense)


def quantizes(plan: LayerPlan) -> bool:
    """Whether a layer stores codes; not where it is skipped, and not where a method runs without its quantization (xquant:bits=16)."""
    return not all(_exact(codec) for codec in plan.codecs)


def quantized_tokens(cache: Cache, tokens: int) -> int:
    """How many of the first `tokens` tokens some layer of a cache, or of its layout, holds quantized."""
    return max((plan.regions.body(tokens) for plan in cache.plans if quantizes(plan)), default=0)


def _exact(codec: Codec) -> bool:
    inner = inner_codec(codec)
    return isinstance(inner.stored if isinstance(inner, XCodec | XCrossLayerCodec) else inner, DenseCodec)

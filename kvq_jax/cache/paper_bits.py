"""Count average bits as the KVQuant paper does (Appendix M), for its method and the formats that it
compares with.

    integers      b + (16 + b) / group    a 16-bit scale, and a zero point of as many bits as a code
    NormalFloat   b + 32 / group          a 16-bit scale and a 16-bit zero point
    nuq           b + 32 / width (tokens) or b + 32 / context (channels), + 32 * fraction for
                  outliers: a 16-bit value and a 16-bit index

Outliers also cost one 32-bit pointer per token. The paper's averages (Tables 1, 2 and 17, and the
128K column of Table 8) agree with one pointer for a token's key and value together, the 1M and 10M
columns of Table 8 with none. `kvq.size.body_bits_per_element` counts this project's arrays: a pool
of slots has a 16-bit pointer for each head, slots are whole, and a pool that may overflow counts
what it dropped in 16 bits.
"""

from __future__ import annotations

from kvq_jax.cache.cache import dims_of, plans
from kvq_jax.cache.spec import CacheSpec, parse
from kvq_jax.types.array_types import ModelDims


def paper_bits(
    spec: CacheSpec | str, config: ModelDims, context: int, *, pointers: bool = True
) -> float | None:
    """Return the average bits of a cached element at a context of `context` tokens, without
    windows, or None if the paper's rule does not cover some layer's method.

    pointers: count the pointers of outliers.
    """
    dims, spec = dims_of(config), parse(spec)
    counts = [
        (codec.facts.paper.bits, plan.heads * plan.head_dim)
        for plan in plans(spec, dims, 1, "bfloat16")
        for codec in plan.codecs
    ]
    known = [count(width, context, pointers) for count, width in counts if count]
    return sum(known) / len(known) if len(known) == len(counts) else None

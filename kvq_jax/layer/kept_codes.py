"""Codes that outlive a `trim`.

Tokens that `trim` takes back from the body into the window are decoded, and would be quantized from
their decoded values when they age again. Most codecs change such values a little, so that errors
would grow with every answer that is generated again. Two rules prevent it:

    whole blocks       their codes stay in the body, and nothing writes a block that ages unchanged
    the last, cut one  its codes are copied to a spare place, because new tokens will complete the
                       block. If the row is cut in the same block again, the first codes come back

So a token is quantized once, and once more for each new place at which its block is cut. One number
for each row and layer says which codes remain from before a trim:

    intact   the number of body tokens with such codes. The first intact // block blocks have them
             in the body, the other intact % block tokens in the spare place

The spare place is the last block of the body (of each shard), which is free until the cache is
almost full. A row that fills it loses the spare codes, and nothing else. A body that wraps around
has one more slot for it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvq_jax.arrays.stored import load_row_blocks, store_blocks
from kvq_jax.layer.regions import Regions
from kvq_jax.types.array_types import LengthsB, Tree


class KeptCodes(NamedTuple):
    """The codes that remain when rows are trimmed.

    intact: [B], the body tokens whose codes remain.
    source, target: [B], the block whose codes are copied to the place of another one.
    copied: [B], True if they are.
    """

    intact: LengthsB
    source: Int[Array, "B"]
    target: Int[Array, "B"]
    copied: Bool[Array, "B"]


def unwritten(regions: Regions, intact: LengthsB, tokens: LengthsB) -> LengthsB:
    """Return the first body token that a row of `tokens` tokens has not in its body, neither aged
    nor intact."""
    return jnp.maximum(regions.aged_tokens(tokens), intact // regions.block * regions.block)


def after_trim(regions: Regions, intact: LengthsB, old: LengthsB, new: LengthsB) -> KeptCodes:
    """Return the codes that remain when rows of `old` tokens are trimmed to `new` tokens."""
    block, aged = regions.block, regions.aged_tokens(old)
    spare = regions.last_of_shard(intact // block)
    # a row that filled the spare place has lost what was there
    intact = jnp.where(aged > spare * block, intact // block * block, intact)
    kept = jnp.maximum(new - regions.sink, 0)
    # if no block comes back, the spare codes are still those of the last cut
    coded = jnp.where(regions.aged_tokens(new) < aged, jnp.maximum(intact, aged), intact)
    cut = kept // block
    again = (kept <= intact) & (cut == intact // block)
    spare = regions.last_of_shard(cut)
    copied = (kept <= coded) & (kept % block > 0)
    source, target = jnp.where(again, spare, cut), jnp.where(again, cut, spare)
    return KeptCodes(jnp.minimum(kept, coded), source, target, copied)


def copied_codes(regions: Regions, block: Tree, body: Tree, kept: KeptCodes) -> Tree:
    """Return the stored body with the codes of a cut block copied. `block` describes one block."""
    source, target = regions.place(kept.source), regions.place(kept.target)
    copied = kept.copied
    if regions.shards > 1:
        copied &= regions.holds(kept.source * regions.block)
    values = load_row_blocks(block, body, source, 1)
    return store_blocks(block, body, values, target, copied.astype(jnp.int32))

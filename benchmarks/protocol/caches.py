"""The caches of the protocol, in the order in which they are measured.

A run that is stopped has the first ones, so the ten of the README come first.
"""

from __future__ import annotations

from kvq_tools.evaluation.protocol import Reading

README = (
    "kivi:bits=2",
    "kivi:bits=4",
    "turboquant:bits=3",
    "xquant:bits=4",
    "int4",
    "innerq:bits=2",
    "waterfill:bits=2.5",
    "kvquant:bits=3",
    "waterfill:bits=2.25,preset=rotated",
    "waterfill:bits=3.1,preset=rotated",
)
# a little smaller than others: resident bits are up to 0.3 more for one sequence
EIGEN = tuple(
    f"waterfill:bits={bits:g},key_basis=eigen"
    for bits in (1.5, 1.85, 2.1, 2.5, 2.85, 3.35, 3.75, 4.4, 4.7)
)
ROTATED = tuple(
    f"waterfill:bits={bits:g},preset=rotated" for bits in (2, 2.15, 2.75, 3.25, 4, 4.75)
)
OTHERS = (
    *ROTATED,
    "xquant_cl:bits=2",
    "turboquant:bits=4",
    "turboquant:bits=2",
    *EIGEN,
    "waterfill:bits=3",
    "waterfill:bits=2",
    "waterfill:bits=4",
    "waterfill:bits=1.5",
    "kvquant:bits=2",
    "kvquant:bits=4",
    "kivi:bits=3",
    "kivi:bits=2,group_size=64",
    "xquant:bits=3",
    "xquant:bits=2",
    "squat:bits=2",
    "squat_pre:bits=2,rank=60",
    "innerq:bits=2,mode=sym",
    "innerq:bits=1",
    "k=polarquant+v=kivi:bits=4",
    "gear:outliers=0",
    "zipcache",
    "nf4",
    "nvfp4",
    "mxfp4",
    "nf3",
    "int3",
    "kvarn",
    "k=kvarn:bits=4+v=kvarn:bits=2",
    "oscar_omni",
    "oscar_spectral",
    "optr",
    "block_gtq",
    "block_gtq:bits=2",
    "pq",
)
CACHES = (*README, *OTHERS)
LONG = 4096  # tokens
CACHES_BEYOND_LONG = CACHES[:5]  # beyond that
OWN_WINDOWS = tuple(
    cache for cache in README if cache.partition(":")[0] not in ("int4", "waterfill")
)  # whose papers have windows of their own: the registry's defaults
EXACT = "dense"  # its KL is rounding, its perplexity the model's


def listed(context: int, reading: Reading) -> list[tuple[str, bool]]:
    """Return (cache, own windows) pairs of one length and reading. EXACT is read once, since its
    readings are equal, and papers' windows stand beside the protocol's after a prompt, as the
    papers measure, to LONG tokens."""
    exact = [(EXACT, False)] if reading == "prompt" else []
    with_own = reading == "prompt" and context <= LONG
    papers = [(cache, True) for cache in OWN_WINDOWS] if with_own else []
    return exact + [(cache, False) for cache in of_context(context)] + papers


def of_context(context: int) -> tuple[str, ...]:
    """Return the caches that are measured at this length: fewer the longer it is, since a row of 4K
    tokens costs twice and one of 8K five times as much as one of 2K."""
    if context > LONG:
        return CACHES_BEYOND_LONG
    return README if context > 2048 else CACHES

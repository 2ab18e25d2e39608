"""The limits of the watched kernels: exceptions by target and JAX, and usual groups of limits."""

from __future__ import annotations

from typing import Any

Limits = dict[str, Any]  # fields of a case, from cap_instructions on
# Exceptions for an A100, 8 % above its counts. Its memory is half as fast, so that twice the
# instructions fit, and little is lost if ptxas schedules them otherwise than for an H200. All of
# these are at the limit of memory but tables, and array operations of KIVI with 2 bits or before
# RoPE (docs/kernels.md).
A100_LIMITS: dict[str, Limits] = {
    "innerq, 2-bit sym, H 128, 16 query heads, asm": {"cap_spill_bytes": 126},
    "innerq, 2-bit asym, H 128, asm": {"cap_spill_bytes": 139},
    "innerq, 3-bit hybrid, H 64, asm": {"cap_alu": 1.71},
    "innerq, 8-bit asym, H 64, asm": {"cap_alu": 1.31},
    "innerq, 8-bit asym, H 128, asm": {"cap_alu": 1.4},
    "innerq, 8-bit sym, H 128, asm": {"cap_alu": 1.35},
    "innerq, 8-bit hybrid, H 128, asm": {"cap_alu": 1.4},
    "kivi, 2-bit, H 128, asm": {"loop_spills_allowed": True, "cap_spill_bytes": 3418},
    "kivi, 2-bit, H 64, asm": {"loop_spills_allowed": True, "cap_spill_bytes": 385},
    "nuq4, after RoPE, H 128, asm": {"cap_spill_bytes": 350},
    "nuq3, before RoPE, H 128, asm": {"cap_spill_bytes": 1582},
    "nuq3-1%, before RoPE, H 128, asm": {"cap_spill_bytes": 683},
    "nf4, groups of 64, H 128, asm": {"cap_spill_bytes": 666},
    "innerq, 4-bit sym, H 128, jnp": {"cap_spill_bytes": 726},
    "kivi, 2-bit, H 128, jnp": {"cap_instructions": 4.37, "cap_alu": 1.84},
    "kivi, 4-bit, before RoPE, H 128, jnp": {"cap_spill_bytes": 100},
    "polar 4+2, groups of 64, exact values, H 128, asm": {"cap_spill_bytes": 83},
    "kivi, 2-bit, groups of 128 tokens, H 128, asm": {
        "loop_spills_allowed": True,
        "cap_spill_bytes": 2096,
    },
}
NEWER = (0, 11)  # from this JAX on, with another Triton
# Exceptions for JAX 0.11.2 and 0.12, 8 % above the larger count. Their PTX shows why.
# Full-precision rows are taken apart and joined again by 128 permutations in a loop (0.12).
# Symmetric InnerQ in array operations brings scales to their lanes by 32 exchanges and as many
# permutations. KIVI before RoPE has the same instructions in another order, of which ptxas spills
# more. Why tables before RoPE take more was not found out (docs/kernels.md).
NEWER_LIMITS: dict[str, Limits] = {
    "dense, bf16, H 128, asm": {"cap_alu": 0.58},
    "dense, bf16, H 128, jnp": {"cap_alu": 0.58},
    "innerq, 2-bit sym, H 128, jnp": {"cap_alu": 1.04},
    "kivi, 4-bit, before RoPE, H 128, asm": {"cap_spill_bytes": 527},
    "nuq3, before RoPE, H 128, asm": {"cap_instructions": 5.24, "min_share": 0.5},
    "nuq2-1%, before RoPE, H 128, asm": {"cap_instructions": 5.33, "cap_spill_bytes": 281},
    "nuq3-1%, before RoPE, H 128, asm": {"cap_instructions": 6.08, "cap_spill_bytes": 718},
    "polar 4+4, groups of 128, exact values, H 128, asm": {"cap_alu": 1.3},
    "polar 4+4, groups of 128, exact values, H 128, jnp": {"cap_alu": 1.92},
    "polar 4+4, groups of 32, exact values, H 128, asm": {"cap_alu": 1.28},
    "polar 4+2, groups of 64, exact values, H 128, asm": {"cap_alu": 1.47},
    "polar 4+2, groups of 64, exact values, H 128, jnp": {"cap_alu": 2.59},
    "polar 4+4, groups of 128, exact values, H 256, asm": {"cap_alu": 1.41},
    "polar 4+4, groups of 128, exact values, H 256, jnp": {"cap_alu": 2.26},
}


def usual_limits(instructions: float, alu: float, share: float, *, waits: bool = False) -> Limits:
    """Return the limits. waits: small loads in the loop, of two bytes a lane, are not asynchronous:
    scales of tokens in short steps."""
    return {
        "cap_instructions": instructions,
        "cap_alu": alu,
        "min_share": share,
        "plain_loads_allowed": waits,
    }


def slow_limits(instructions: float, alu: float, share: float, spill_bytes: int = 64) -> Limits:
    """Return the limits of a kernel that is bound by its instructions.

    Its small loads wait: scales of tokens, and cosines that the L1 cache holds. It may spill if a
        table or rotated queries do not fit the registers beside the sums.
    """
    return usual_limits(instructions, alu, share, waits=True) | {
        "loop_spills_allowed": True,
        "cap_spill_bytes": spill_bytes,
    }

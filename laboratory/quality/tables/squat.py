"""SQuat: Wang et al. (2025)."""

from __future__ import annotations

from collections.abc import Iterator

from laboratory.quality.comparison import Suite, listed, swept

RANKS, LAMBDAS = (5, 60), ("1e-4", "1e-3", "1e-2", "1e-1")
WINDOW = "sink=0,recent=0,block=32"  # the paper's R = 32: what fills a block is quantized


def squat() -> Suite:
    """Return appendix E.3, where lambda = 0 is KIVI, and the methods side by side at the paper's
    window and at KIVI's."""
    columns = (
        ("KIVI", f"kivi:{WINDOW}"),
        *((f"lambda={lam}", f"squat:lam={lam},{WINDOW}") for lam in LAMBDAS),
    )

    def ranked(cache: str, rank: int) -> str:
        return f"{cache},rank={rank}" if "lam" in cache else cache

    lines = (
        (f"r={rank}", [(name, ranked(cache, rank)) for name, cache in columns]) for rank in RANKS
    )
    wide = "sink=0,recent=96,block=32"
    return Suite(
        "The SQuat paper's tables",
        (
            listed("SQuat, 2 bits, windows of the paper", _methods(2, WINDOW), "KIVI, after RoPE"),
            listed("SQuat, 2 bits, KIVI's windows", _methods(2, wide), "KIVI, after RoPE"),
            listed("SQuat, 3 bits, KIVI's windows", _methods(3, wide), "KIVI, after RoPE"),
            swept("SQuat, Table 3: lambda and rank", "rank", lines),
        ),
    )


def _methods(bits: int, window: str) -> Iterator[tuple[str, str]]:
    """Yield SQuat and its base line on keys before and after RoPE. Stored bits of both are equal
    but for the subspace."""
    yield "exact", f"dense:{window}"
    for where, squat, kivi in (
        ("after", "squat", "kivi:"),
        ("before", "squat_pre", "kivi:pre_rope=true,"),
    ):
        yield f"KIVI, {where} RoPE", f"{kivi}bits={bits},{window}"
        for rank in (5, 60):
            yield f"SQuat, {where} RoPE, rank {rank}", f"{squat}:bits={bits},rank={rank},{window}"
    yield (
        "SQuat, after RoPE, rank 60, queries turned ahead by 256",
        f"squat:bits={bits},rank=60,ahead=256,{window}",
    )

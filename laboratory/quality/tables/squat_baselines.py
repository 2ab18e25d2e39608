"""The baselines of SQuat's Tables 1 and 2: GEAR and ZipCache beside KIVI and SQuat."""

from __future__ import annotations

from collections.abc import Iterator

from laboratory.quality.comparison import Suite, listed

SQUAT = "sink=0,recent=0,block=32"  # SQuat's appendix E.2: groups and a residual length of 32


def squat_baselines() -> Suite:
    """Return the methods of SQuat's Tables 1 and 2, with the settings of its appendix E.2, and the
    same in one window for all."""
    return Suite(
        "The baselines of SQuat's Tables 1 and 2",
        (
            listed(
                "SQuat's Tables 1 and 2: 2 bits, each method's own windows",
                _of_squat(2, SQUAT, "sink=0,recent=0,block=64"),
                "KIVI",
            ),
            listed(
                "2 bits, the same windows",
                _of_squat(2, "sink=0,recent=64,block=64", "sink=0,recent=64,block=64"),
                "KIVI",
            ),
            listed(
                "4 bits, the same windows",
                _of_squat(4, "sink=0,recent=64,block=64", "sink=0,recent=64,block=64"),
                "KIVI",
            ),
            listed("GEAR by its parts, 2 bits", _parts_of_gear(), "KIVI, groups of 64"),
        ),
    )


def _of_squat(bits: int, window: str, of_gear: str) -> Iterator[tuple[str, str]]:
    """Yield the rows of SQuat's tables. GEAR as there: rank 2, 3 iterations; ZipCache: 4 and 2
    bits."""
    yield "exact", f"dense:{window}"
    yield "KIVI", f"kivi:bits={bits},group_size=32,{window}"
    yield "GEAR-L", f"gear:bits={bits},outliers=0,{of_gear}"
    yield "GEAR", f"gear:bits={bits},{of_gear}"
    yield "ZipCache, 4 and 2 bits, 60 % unimportant", f"zipcache:unimportant_ratio=0.6,{of_gear}"
    yield "SQuat_pre, rank 5", f"squat_pre:bits={bits},group_size=32,{window}"
    yield "SQuat, rank 5", f"squat:bits={bits},group_size=32,{window}"


def _parts_of_gear() -> Iterator[tuple[str, str]]:
    window = "sink=0,recent=64,block=64"
    yield "exact", f"dense:{window}"
    yield "KIVI, groups of 64", f"kivi:bits=2,group_size=64,{window}"
    yield "KIVI, groups of 32", f"kivi:bits=2,group_size=32,{window}"
    yield "KIVI, groups of 16", f"kivi:bits=2,group_size=16,{window}"
    yield "outliers alone", f"gear:rank=0,{window}"
    for rank in (1, 2, 4, 8):
        yield f"GEAR-L, rank {rank}", f"gear:outliers=0,rank={rank},{window}"
    yield "GEAR, rank 2", f"gear:{window}"
    yield "GEAR, rank 2, rotated", f"gear:rotate=true,{window}"
    yield "KIVI, 3 bits, groups of 64", f"kivi:bits=3,group_size=64,{window}"
    yield "KIVI, 4 bits, groups of 64", f"kivi:bits=4,group_size=64,{window}"

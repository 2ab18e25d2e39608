"""Rotations, TurboQuant and the formats that engines ship."""

from __future__ import annotations

from benchmarks.quality.comparison import Suite, listed

WINDOW = "sink=16,recent=64,block=32"


def anchors() -> Suite:
    """Return tables for about 2.25, 3.25, 4.25 and 8 stored bits of an element. Scales and zero
    points count. Windows are the same."""
    budgets = {
        "2.25 to 3": (
            "kivi:bits=2",
            "kivi:bits=2,rotate=true",
            "turboquant:bits=2",
            "nf2:rotate=true",
            "innerq:total_bits=2",
            "int2:rotate=true",
        ),
        "3.25 to 4": (
            "kivi:bits=3",
            "kivi:bits=3,rotate=true",
            "turboquant:bits=3",
            "nf3:rotate=true",
            "int3",
            "int3:rotate=true",
            "innerq:bits=2,mode=sym",
            "innerq:bits=2,mode=sym,rotate=true",
        ),
        "4.25 to 5": (
            "kivi:bits=4",
            "kivi:bits=4,rotate=true",
            "turboquant:bits=4",
            "mxfp4",
            "mxfp4:rotate=true",
            "nvfp4",
            "nvfp4:rotate=true",
            "nvfp4:scale=none",
            "int4",
            "int4:rotate=true",
            "int4:group_size=32",
            "int4:group_size=32,rotate=true",
            "nf4",
            "nf4:rotate=true",
        ),
        "8": (
            "int8",
            "int8:rotate=true",
            "fp8",
            "fp8:scale=head",
            "fp8:scale=none",
            "fp8:rotate=true",
        ),
    }
    return Suite(
        "Rotation, TurboQuant and the formats that engines ship",
        tuple(
            listed(
                f"About {bits} stored bits",
                ((cache, _windowed(cache)) for cache in ("dense", *caches)),
                caches[0],
            )
            for bits, caches in budgets.items()
        ),
    )


def _windowed(cache: str) -> str:
    return f"{cache}{',' if ':' in cache else ':'}{WINDOW}"

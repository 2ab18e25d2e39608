"""All methods at equal stored bits, with the same windows."""

from __future__ import annotations

from benchmarks.quality.comparison import Suite, listed

WINDOW, WIDE = "sink=32,recent=96,block=32", "sink=32,recent=96,block=64"


def equal_bits() -> Suite:
    """Return a table for about 3, 3.5, 4 and 5 stored bits of an element. Scales, zero points and
    outliers count."""
    budgets = {
        "3": (
            f"kivi:bits=2,{WINDOW}",
            f"kivi:bits=2,pre_rope=true,{WINDOW}",
            f"squat:bits=2,{WINDOW}",
            f"squat_pre:bits=2,rank=60,{WINDOW}",
            f"innerq:bits=2,mode=asym,{WINDOW}",
            f"innerq:bits=1,{WINDOW}",
            f"kvquant:bits=2,outliers=0.02,{WINDOW}",
            f"nf3:{WINDOW}",
            f"xquant:bits=2,group_size=32,{WINDOW}",
        ),
        "3.5": (
            f"kivi:bits=3,group_size=64,{WIDE}",
            f"kivi:bits=3,group_size=64,pre_rope=true,{WIDE}",
            f"squat_pre:bits=3,group_size=64,rank=60,{WIDE}",
            f"innerq:bits=2,mode=sym,{WINDOW}",
            f"int3:{WINDOW}",
            f"kvquant:bits=3,{WINDOW}",
            f"xquant:bits=3,group_size=64,{WIDE}",
        ),
        "4": (
            f"kivi:bits=3,{WINDOW}",
            f"kivi:bits=3,pre_rope=true,{WINDOW}",
            f"squat_pre:bits=3,rank=60,{WINDOW}",
            f"innerq:bits=2,{WINDOW}",
            f"kvquant:bits=3,outliers=0.02,{WINDOW}",
            f"int4:{WINDOW}",
            f"nf4:{WINDOW}",
            f"xquant:bits=3,group_size=32,{WINDOW}",
        ),
        "5": (
            f"kivi:bits=4,{WINDOW}",
            f"kivi:bits=4,pre_rope=true,{WINDOW}",
            f"innerq:bits=3,{WINDOW}",
            f"kvquant:bits=4,outliers=0.02,{WINDOW}",
            f"k=polarquant:group_size=64+v=kivi:bits=4+cache:{WIDE}",
            f"xquant:bits=4,group_size=32,{WINDOW}",
        ),
    }
    return Suite(
        "Methods at equal stored bits",
        tuple(
            listed(f"About {bits} stored bits", ((cache, cache) for cache in caches), caches[0])
            for bits, caches in budgets.items()
        ),
    )

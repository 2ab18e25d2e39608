"""Waterfill beside the other methods, from 1.5 to 5 stored bits, with the same windows."""

from __future__ import annotations

from benchmarks.quality.comparison import Suite, listed
from benchmarks.quality.tables.equal_bits import WIDE, WINDOW

BUDGETS = (1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0)
WIDEST = "sink=32,recent=96,block=128"


def waterfill() -> Suite:
    """Return two tables: waterfill at every budget, and the methods of the registry at stored bits from about 1.5 to 5."""
    ours = [f"waterfill:bits={bits:g},{WINDOW}" for bits in BUDGETS]
    others = (
        f"innerq:bits=1,mode=asym,{WINDOW}",
        f"kvquant:bits=2,outliers=0,{WINDOW}",
        f"int2:{WINDOW}",
        f"nf2:{WINDOW}",
        f"kivi:bits=2,group_size=64,{WIDE}",
        f"kvquant:bits=2,{WINDOW}",
        f"kivi:bits=2,{WINDOW}",
        f"kivi:bits=2,pre_rope=true,{WINDOW}",
        f"squat_pre:bits=2,rank=60,{WINDOW}",
        f"innerq:bits=1,{WINDOW}",
        f"xquant:bits=2,group_size=32,{WINDOW}",
        f"innerq:bits=2,mode=sym,{WINDOW}",
        f"xquant:bits=3,{WIDEST}",
        f"kvquant:bits=3,{WINDOW}",
        f"kivi:bits=3,{WINDOW}",
        f"innerq:bits=2,{WINDOW}",
        f"xquant:bits=4,{WIDEST}",
        f"int4:{WINDOW}",
        f"nf4:{WINDOW}",
        f"kvquant:bits=4,{WINDOW}",
        f"k=polarquant:group_size=64+v=kivi:bits=4+cache:{WIDE}",
        f"kivi:bits=4,{WINDOW}",
    )
    return Suite(
        "Waterfill and the other methods from 1.5 to 5 stored bits",
        (
            listed("Waterfill at each budget", ((cache, cache) for cache in (*ours, others[6])), others[6]),
            listed("The other methods", ((cache, cache) for cache in others), others[6]),
        ),
    )

"""Compare waterfill with every other method from 1.5 to 5 stored bits, with the same windows, and
plans with the nearest.
"""

from __future__ import annotations

import json
import pathlib

from benchmarks.quality.comparison import Suite, listed
from benchmarks.quality.tables.equal_bits import WIDE, WINDOW

BUDGETS = (2.0, 2.5, 3.0, 1.5, 4.0, 5.0, 3.5)  # in the order in which they are measured
WIDEST = "sink=32,recent=96,block=128"
KIVI = f"kivi:bits=2,{WINDOW}"


def waterfill() -> Suite:
    """Return two tables: waterfill at every budget, and the methods of the registry at stored bits
    from about 1.5 to 5."""
    ours = [f"waterfill:bits={bits:g},{WINDOW}" for bits in BUDGETS]
    others = (
        KIVI,
        f"turboquant:bits=2,{WINDOW}",
        f"turboquant:bits=3,{WINDOW}",
        f"turboquant:bits=4,{WINDOW}",
        f"xquant:bits=3,{WIDEST}",
        f"kvquant:bits=3,{WINDOW}",
        f"innerq:bits=2,mode=sym,{WINDOW}",
        f"innerq:bits=2,{WINDOW}",
        f"squat_pre:bits=2,rank=60,{WINDOW}",
        f"gear:outliers=0,{WIDE}",
        f"zipcache:{WIDE}",
        f"kivi:bits=4,{WINDOW}",
        f"kivi:bits=3,{WINDOW}",
        f"xquant:bits=2,{WIDEST}",
        f"xquant:bits=4,{WIDEST}",
        f"xquant_cl:bits=2,{WIDEST}",
        f"kvquant:bits=2,{WINDOW}",
        f"k=polarquant:group_size=64+v=kivi:bits=4+cache:{WIDE}",
        f"innerq:bits=1,mode=asym,{WINDOW}",
        f"innerq:bits=1,{WINDOW}",
        f"kvquant:bits=4,{WINDOW}",
        f"gear:{WIDE}",
        f"nf4:{WINDOW}",
        f"nvfp4:{WINDOW}",
        f"mxfp4:{WINDOW}",
        f"int4:{WINDOW}",
        f"nf3:{WINDOW}",
        f"int3:{WINDOW}",
        f"squat:bits=2,{WINDOW}",
        f"kivi:bits=2,group_size=64,{WIDE}",
        f"kvquant:bits=2,outliers=0,{WINDOW}",
        f"nf2:{WINDOW}",
        f"int2:{WINDOW}",
    )
    return Suite(
        "Waterfill and the other methods from 1.5 to 5 stored bits",
        (
            listed("Waterfill at each budget", ((cache, cache) for cache in (*ours, KIVI)), KIVI),
            listed("The other methods", ((cache, cache) for cache in others), KIVI),
        ),
    )


def plans() -> Suite:
    """Return one table: waterfill with the widths that `kvq plan` finds for SmolLM2 at each budget,
    and the nearest other caches, one of which is the plan if it has less KL."""
    file = pathlib.Path(__file__).with_name("plans_smollm2.json")
    spec_of_bits = json.loads(file.read_text(encoding="utf-8"))["plans"]
    ours = [(f"plan, {bits} bits", f"{spec},{WINDOW}") for bits, spec in spec_of_bits.items()]
    others = (
        f"xquant:bits=4,{WIDEST}",
        f"turboquant:bits=4,{WINDOW}",
        f"kivi:bits=4,{WINDOW}",
        f"xquant:bits=3,{WIDEST}",
        f"turboquant:bits=3,{WINDOW}",
        f"xquant_cl:bits=2,{WIDEST}",
        f"turboquant:bits=2,{WINDOW}",
        KIVI,
    )
    return Suite(
        "Plans of `kvq plan` for SmolLM2",
        (listed("Plans at each budget", (*ours, *((cache, cache) for cache in others)), KIVI),),
    )

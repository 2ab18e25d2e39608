"""Compare the plans of `kvq plan` with the nearest caches, with the same windows."""

from __future__ import annotations

import json
import pathlib

from laboratory.quality.comparison import Suite, listed

WINDOW = "sink=32,recent=96,block=32"
WIDEST = "sink=32,recent=96,block=128"
KIVI = f"kivi:bits=2,{WINDOW}"


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

"""Compare the plans of `kvq plan` with the nearest caches, with the same windows."""

from __future__ import annotations

from benchmarks.protocol import made_plans
from laboratory.quality.comparison import Suite, listed

WINDOW = "sink=32,recent=96,block=32"
WIDEST = "sink=32,recent=96,block=128"
KIVI = f"kivi:bits=2,{WINDOW}"


def plans() -> Suite:
    """Return one table: waterfill with the widths that `kvq plan` finds for SmolLM2 at each budget,
    with the KL that it predicted and measured itself, and the nearest other caches, one of which is
    the plan if it has less KL."""
    ours = [
        (
            f"{name} (predicted {plan.predicted:.4f}, measured {plan.measured:.4f})",
            f"{plan.spec},{WINDOW}",
        )
        for name, plan in made_plans.made_for("smollm2").items()
    ]
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

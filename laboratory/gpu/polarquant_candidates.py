"""The candidates of the PolarQuant paper's Table 4: q K^T alone, over keys that PolarQuant, KIVI
and KVQuant store, and exact ones.

The paper prints head dim 128 and lengths, not how many heads; its fp16 times fit about as many as
Llama-3.1-8B has query heads, each with keys of its own. So the shapes are those of InnerQ's tables.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from benchmarks.cpu.timing import Shape
from benchmarks.gpu.attention_candidates import Planned
from laboratory.gpu import innerq_candidates, kvquant_candidates
from pallas_kernels.launch import Launch

SECTION = "polarquant keys"
MODEL = "Llama-3.1-8B"
SPEC = "polarquant"
EXACT, KIVI, KVQUANT = innerq_candidates.EXACT, "kivi:bits=4", "nuq4-1%"


def table_tasks(shape: Shape, launches: Sequence[Launch]) -> list[Planned]:
    """Return the tasks of the paper's rows."""
    known = {
        name: functools.partial(innerq_candidates.scores_task, shape, name, tuple(launches))
        for name in (EXACT, KIVI, SPEC)
    }
    known[KVQUANT] = functools.partial(kvquant_candidates.total_of_keys, shape, tuple(launches))
    return [Planned(SECTION, name, make) for name, make in known.items()]

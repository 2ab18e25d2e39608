"""Estimate what a run will cost in rows, tokens, hours and bytes, from config.json alone."""

from __future__ import annotations

import itertools
import time

import jax
import jax.numpy as jnp

from benchmarks.markdown import table
from benchmarks.protocol.bench import TOGETHER
from benchmarks.protocol.plan import Plan, planned
from benchmarks.report_file import cores
from kvq_tools.evaluation.protocol import cost

MATRIX = 1024  # rows and columns of the product that is timed
SHARE = 0.3  # of a plain product's speed that SmolLM2-135M reaches at 2K tokens, measured
HEAD = "context", "reading", "rows", "tokens prefilled", "tokens decoded", "hours", "GiB at a time"


def operations_per_second() -> float:
    """Return the speed of a product of fp32 matrices on all cores, by processor time: other
    processes of a busy machine do not count."""
    product = jax.jit(jnp.matmul)
    matrix = jnp.ones((MATRIX, MATRIX), jnp.float32)
    product(matrix, matrix).block_until_ready()
    times = []
    for _ in range(5):
        started = time.process_time()
        product(matrix, matrix).block_until_ready()
        times.append(time.process_time() - started)
    return cores() * 2 * MATRIX**3 / min(times)


def table_of(plan: Plan) -> str:
    """Render the cost of each length and reading, and of all. Reads no weights and no texts."""
    speed, lines, hours = SHARE * operations_per_second(), [], 0.0
    begun = set()
    for (context, reading), rows in itertools.groupby(
        planned(plan), lambda row: (row.context, row.reading)
    ):
        group = list(rows)
        costs = [
            cost(plan.spec(row), plan.config, len(plan.texts), plan.sizes(context), reading)
            for row in group
        ]
        together = -(-len(group) // TOGETHER[reading])
        operations = sum(one.operations for one in costs) + together * costs[0].prompt
        if context not in begun:  # the full-precision model runs once
            begun.add(context)
            operations += costs[0].exact
        some = operations / speed / 3600
        hours += some
        lines.append(
            (
                f"{context}",
                reading,
                f"{len(group)}",
                f"{sum(one.prefilled for one in costs):,}",
                f"{sum(one.decoded for one in costs):,}",
                f"{some:.1f}",
                f"{max(one.nbytes for one in costs) / 2**30:.1f}",
            )
        )
    lines.append(("all", "", f"{len(planned(plan))}", "", "", f"{hours:.1f}", ""))
    return table(HEAD, lines)

"""`kvq ruler`: track variables and find frequent words, as RULER asks for them."""

from __future__ import annotations

import argparse
from functools import partial

from kvq_models.llama.config import LlamaConfig
from kvq_tools.cli import task_runs
from kvq_tools.evaluation.tasks import niah, ruler
from kvq_tools.evaluation.tasks.sample import TaskPrompts, TaskSample


def run(options: argparse.Namespace) -> None:
    task_runs.refuse_beside_data(options, "task", "lengths")
    kind = options.task or "vt"
    new = options.max_new_tokens or (
        ruler.MAX_NEW_TOKENS[kind] if options.data is None else niah.MAX_NEW_TOKENS
    )

    def samples(prompts: TaskPrompts, config: LlamaConfig) -> list[TaskSample]:
        if options.data is not None:
            return niah.from_file(options.data, prompts, limit=options.limit, max_new_tokens=new)
        return task_runs.generated(
            options, config, partial(ruler.generated, prompts, kind, max_new_tokens=new)
        )

    rules = niah.FILE_RULES if options.data else ruler.RULES[kind] | ruler.SCORING
    settings = {
        "kind": None if options.data else kind,
        "data": options.data,
        "seed": options.seed,
        "max_new_tokens": new,
    }
    task_runs.run_task(
        options, niah.TASK, samples, rules=rules, groups=("length",), settings=settings
    )

"""`kvq passkey`: hide a pass key in a long text and ask for it."""

from __future__ import annotations

import argparse
from functools import partial

from kvq_models.llama.config import LlamaConfig
from kvq_tools.cli import task_runs
from kvq_tools.evaluation.tasks import passkey
from kvq_tools.evaluation.tasks.sample import TaskPrompts, TaskSample


def run(options: argparse.Namespace) -> None:
    task_runs.refuse_beside_data(options, "lengths", "depths", "text")

    def samples(prompts: TaskPrompts, config: LlamaConfig) -> list[TaskSample]:
        new = {"max_new_tokens": options.max_new_tokens}
        if options.data is not None:
            return passkey.from_file(options.data, prompts, limit=options.limit, **new)
        hiding = task_runs.hiding_settings(options)
        return task_runs.generated(
            options, config, partial(passkey.generated, prompts, **hiding, **new)
        )

    settings = {
        "data": options.data,
        "text": options.text,
        "seed": options.seed,
        "max_new_tokens": options.max_new_tokens,
    }
    rules = passkey.FILE_RULES if options.data else passkey.RULES
    groups = ("length", "depth")
    task_runs.run_task(
        options, passkey.TASK, samples, rules=rules, groups=groups, settings=settings
    )

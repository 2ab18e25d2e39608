"""`kvq niah`: hide needles in a haystack and ask for them, as RULER does."""

from __future__ import annotations

import argparse
from functools import partial

from kvq_models.llama.config import LlamaConfig
from kvq_tools.cli import task_runs
from kvq_tools.cli.console import UserError
from kvq_tools.evaluation.tasks import niah
from kvq_tools.evaluation.tasks.sample import TaskPrompts, TaskSample


def run(options: argparse.Namespace) -> None:
    task_runs.refuse_beside_data(options, "task", "lengths", "depths", "text")
    kind, new = options.task or "single_1", options.max_new_tokens
    task_kind = niah.KINDS[kind]
    if options.depths is not None and not task_kind.single:
        raise UserError(f"--depths is for one needle, and {kind} spreads several: leave it out")
    if options.text is not None and task_kind.haystack != "text":
        raise UserError(f"--text is for needles in a text, and {kind} has another filler")

    def samples(prompts: TaskPrompts, config: LlamaConfig) -> list[TaskSample]:
        asked = {"suffix": options.suffix, "max_new_tokens": new}
        if options.data is not None:
            return niah.from_file(options.data, prompts, limit=options.limit, **asked)
        asked |= task_runs.hiding_settings(options)
        return task_runs.generated(options, config, partial(niah.generated, prompts, kind, **asked))

    settings = {
        "kind": None if options.data else kind,
        "data": options.data,
        "text": options.text,
        "suffix": options.suffix,
        "seed": options.seed,
        "max_new_tokens": new,
    }
    rules = niah.FILE_RULES if options.data else niah.RULES
    groups = ("length", "depth")
    task_runs.run_task(options, niah.TASK, samples, rules=rules, groups=groups, settings=settings)

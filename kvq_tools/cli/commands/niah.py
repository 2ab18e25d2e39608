"""`kvq niah`: hide needles in a haystack and ask for them, as RULER does."""

from __future__ import annotations

import argparse
from functools import partial

from kvq_models.llama.config import LlamaConfig
from kvq_tools.cli import inputs, task_runs
from kvq_tools.evaluation.tasks import niah
from kvq_tools.evaluation.tasks.sample import TaskPrompts, TaskSample

DESCRIPTION = f"""\
Hides facts ("One of the special magic numbers for brave-river is: 4839201.") in
a long text and asks for some of them at the end, with RULER's prompts and
score: for every cache, and by the text's length and the fact's depth in it.

{"task":<12} {"haystack":<10} {"keys":<7} {"values":<9} {"facts":<7} asked for
""" + "\n".join(
    f"{name:<12} {kind.haystack:<10} {kind.keys:<7} {kind.values:<9}"
    f" {kind.needles * kind.values_each:<7} {kind.asked * kind.values_each}"
    for name, kind in niah.KINDS.items()
)

EPILOG = f"""\
examples:
  kvq niah embedded --task single_1 --suffix ': ' --cache dense \\
      --cache kivi:bits=2 --lengths 512,1024
  kvq niah path/to/model --task multikey_1 --text essays.txt --batch 8 \\
      --cache innerq:bits=2 --lengths 4096,16384 --dtype bfloat16
  kvq niah path/to/model --cache kivi:bits=2 --data niah_multikey_3.jsonl
      (with the fields input and outputs)

{inputs.CACHE_GRAMMAR}"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    task_runs.add_arguments(parser, niah.MAX_NEW_TOKENS)
    parser.add_argument(
        "--task",
        choices=niah.KINDS,
        metavar="TASK",
        help=("kind of needles and haystack, see above (default: single_1)"),
    )
    parser.add_argument(
        "--suffix",
        metavar="S",
        default="",
        help=(
            "text after the prompt's last word; the embedded model was trained on other "
            "prompts and needs ': ' (default: none, as in RULER)"
        ),
    )
    task_runs.add_generator_arguments(
        parser, "a UTF-8 text to hide needles in, for tasks with the haystack 'text'"
    )


def run(options: argparse.Namespace) -> None:
    task_runs.refuse_beside_data(options, "task", "lengths", "depths", "text")
    kind, new = options.task or "single_1", options.max_new_tokens

    def samples(prompts: TaskPrompts, config: LlamaConfig) -> list[TaskSample]:
        if options.data is not None:
            return niah.from_file(
                options.data,
                prompts,
                limit=options.limit,
                suffix=options.suffix,
                max_new_tokens=new,
            )
        hiding = task_runs.hiding_settings(options)
        return task_runs.generated(
            options,
            config,
            partial(
                niah.generated, prompts, kind, **hiding, suffix=options.suffix, max_new_tokens=new
            ),
        )

    settings = {
        "kind": None if options.data else kind,
        "data": options.data,
        "text": options.text,
        "suffix": options.suffix,
        "seed": options.seed,
        "max_new_tokens": new,
    }
    task_runs.run_task(
        options,
        task_runs.TaskRun("niah", niah.TASK, niah.RULES, samples, ("length", "depth"), settings),
    )

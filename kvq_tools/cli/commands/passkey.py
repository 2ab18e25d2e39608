"""`kvq passkey`: hide a pass key in a long text and ask for it."""

from __future__ import annotations

import argparse
from functools import partial

from kvq_models.llama.config import LlamaConfig
from kvq_tools.cli import inputs, task_runs
from kvq_tools.evaluation.tasks import passkey
from kvq_tools.evaluation.tasks.sample import TaskPrompts, TaskSample

DESCRIPTION = """\
Hides a five-digit pass key in a long text, asks for it at the end, and counts
how often the greedy answer is right: for every cache, and by the text's length
and the key's depth in it. Prompts and scores are those of Landmark Attention
and KIVI's examples; the output repeats them. The same arguments give the same
prompts for all caches."""

EPILOG = f"""\
examples:
  kvq passkey embedded --cache dense --cache kivi:bits=2 \\
      --cache innerq:bits=2 --lengths 512,1024
  kvq passkey path/to/model --cache kivi:bits=2 --lengths 4096,32768 \\
      --text book.txt --limit 20 --batch 8 --dtype bfloat16
  kvq passkey path/to/model --cache innerq:bits=2 \\
      --data passkey_examples.jsonl      (with the fields input and target)

{inputs.CACHE_GRAMMAR}"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    task_runs.add_arguments(parser, passkey.MAX_NEW_TOKENS)
    task_runs.add_generator_arguments(
        parser, "a UTF-8 text to hide the key in (default: dull sentences, repeated)"
    )


def run(options: argparse.Namespace) -> None:
    task_runs.refuse_beside_data(options, "lengths", "depths", "text")

    def samples(prompts: TaskPrompts, config: LlamaConfig) -> list[TaskSample]:
        if options.data is not None:
            return passkey.from_file(
                options.data, prompts, limit=options.limit, max_new_tokens=options.max_new_tokens
            )
        make = partial(
            passkey.generated,
            prompts,
            **task_runs.hiding_settings(options),
            max_new_tokens=options.max_new_tokens,
        )
        return task_runs.generated(options, config, make)

    settings = {
        "data": options.data,
        "text": options.text,
        "seed": options.seed,
        "max_new_tokens": options.max_new_tokens,
    }
    task_runs.run_task(
        options,
        task_runs.TaskRun(
            "passkey", passkey.TASK, passkey.RULES, samples, ("length", "depth"), settings
        ),
    )

"""`kvq ruler`: track variables and find frequent words, as RULER asks for them."""

from __future__ import annotations

import argparse
from functools import partial

from kvq_models.llama.config import LlamaConfig
from kvq_tools.cli import inputs, task_runs
from kvq_tools.evaluation.tasks import niah, ruler
from kvq_tools.evaluation.tasks.sample import TaskPrompts, TaskSample

DESCRIPTION = """\
Asks for facts that are spread over a long text, with RULER's prompts and score,
for every cache and by the text's length. RULER's needles are in kvq niah.

task  text                                          asked for
vt    VAR A = 12345, VAR B = VAR A, ... between     the 5 variables with the
      dull sentences                                value
cwe   a numbered list of words                      the 10 most frequent
fwe   made-up words with the frequencies of a       the 3 most frequent
      Zeta distribution"""

EPILOG = f"""\
examples:
  kvq ruler embedded --task fwe --cache dense --cache kivi:bits=2 \\
      --lengths 512,1024
  kvq ruler path/to/model --task vt --cache innerq:bits=2 \\
      --lengths 4096,16384 --batch 8 --dtype bfloat16
  kvq ruler path/to/model --cache kivi:bits=2 --data ruler_cwe.jsonl
      (with the fields input and outputs)

{inputs.CACHE_GRAMMAR}"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    task_runs.add_arguments(
        parser,
        None,
        "RULER's: " + ", ".join(f"{name} {new}" for name, new in ruler.MAX_NEW_TOKENS.items()),
    )
    parser.add_argument("--task", choices=ruler.KINDS, help="the task, see above (default: vt)")
    task_runs.add_generator_arguments(parser)


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
        options, task_runs.TaskRun("ruler", niah.TASK, rules, samples, ("length",), settings)
    )

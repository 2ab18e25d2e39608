"""`kvq gsm8k`: arithmetic word problems, answered with a chain of thought."""

from __future__ import annotations

import argparse

from kvq_tools.cli import inputs, task_runs
from kvq_tools.evaluation.tasks import gsm8k

DESCRIPTION = """\
GSM8K with the 8 worked examples of Wei et al., prompted and scored as the task gsm8k_cot of lm-evaluation-harness: the
last number of the answer counts (flexible), or what follows "The answer is" (strict). Every token of prompt and answer
goes through the cache."""

EPILOG = f"""\
example:
  kvq gsm8k path/to/model --data test.jsonl --cache dense --cache kivi:bits=2 --limit 200 --batch 8 --dtype bfloat16

{inputs.CACHE_GRAMMAR}"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    task_runs.add_arguments(parser, gsm8k.MAX_NEW_TOKENS)
    parser.add_argument("--data", metavar="FILE", required=True, help="the problems, one JSON object a line (fields: question, answer)")
    parser.add_argument("--limit", metavar="N", type=inputs.positive, help="only the first N problems")
    parser.add_argument(
        "--shots",
        metavar="K",
        type=int,
        choices=range(gsm8k.SHOTS + 1),
        default=gsm8k.SHOTS,
        help="examples (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> None:
    new = options.max_new_tokens or gsm8k.MAX_NEW_TOKENS
    settings = {"data": options.data, "shots": options.shots, "max_new_tokens": new}
    task_runs.evaluate(
        options,
        task_runs.Evaluation(
            "gsm8k",
            gsm8k.TASK,
            gsm8k.RULES,
            lambda prompts, _: gsm8k.from_file(options.data, prompts, limit=options.limit, examples=options.shots, max_new_tokens=new),
            (),
            settings,
        ),
    )

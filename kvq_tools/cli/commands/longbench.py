"""`kvq longbench`: long documents, with the prompts and metrics of LongBench."""

from __future__ import annotations

import argparse

from kvq_models.llama.config import LlamaConfig
from kvq_tools.cli import inputs, task_runs
from kvq_tools.evaluation.tasks import longbench
from kvq_tools.evaluation.tasks.sample import Prompts, Sample

DESCRIPTION = """\
LongBench from local JSON-lines files: its prompts, generation lengths, middle truncation and metrics, for every cache.
A prompt longer than --max-length keeps the first and the last half of that many tokens, as in the benchmark. Of the
Chinese datasets, multifieldqa_zh, dureader and vcsum need the package jieba."""

EPILOG = f"""\
examples:
  kvq longbench path/to/model --data qasper.jsonl --data multi_news.jsonl --cache dense --cache kivi:bits=2 --max-length 31500
  kvq longbench embedded --data multi_news.jsonl --cache innerq:bits=2 --limit 2 --max-new-tokens 64

{inputs.CACHE_GRAMMAR}"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    task_runs.add_arguments(parser, "the benchmark's for each dataset")
    parser.add_argument(
        "--data",
        metavar="FILE",
        action="append",
        required=True,
        help="samples of one dataset, one JSON object a line (fields: input, context, answers, all_classes); may be given several times",
    )
    parser.add_argument(
        "--dataset",
        metavar="NAME",
        help="which dataset the files hold (default: what a row's field 'dataset', or else the file's name, says)",
    )
    parser.add_argument("--limit", metavar="N", type=inputs.positive, help="only the first N samples of each file")
    parser.add_argument(
        "--max-length",
        metavar="L",
        type=inputs.positive,
        help="tokens of a prompt above which its middle is cut (default: what the model's positions and the new tokens leave)",
    )


def run(options: argparse.Namespace) -> None:
    def samples(prompts: Prompts, config: LlamaConfig) -> list[Sample]:
        found = []
        for file in options.data:
            found += longbench.from_file(
                file,
                prompts,
                config.max_position_embeddings,
                dataset=options.dataset,
                limit=options.limit,
                max_length=options.max_length,
                max_new_tokens=options.max_new_tokens,
            )
        return found

    settings = {"data": options.data, "max_length": options.max_length, "max_new_tokens": options.max_new_tokens}
    task_runs.evaluate(options, task_runs.Evaluation("longbench", longbench.TASK, longbench.RULES, samples, ("dataset", "words"), settings))

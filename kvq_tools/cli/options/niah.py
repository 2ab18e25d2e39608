"""The options of `kvq niah`."""

from __future__ import annotations

import argparse

from kvq_tools.cli.options import shared, tasks
from kvq_tools.evaluation.tasks.kinds import NEEDLE_KINDS, NEEDLE_TOKENS

DESCRIPTION = f"""\
Hides facts ("One of the special magic numbers for brave-river is: 4839201.") in
a long text and asks for some of them at the end, with RULER's prompts and
score: for every cache, and by the text's length and the fact's depth in it.

{"task":<12} {"haystack":<10} {"keys":<7} {"values":<9} {"facts":<7} asked for
""" + "\n".join(
    f"{name:<12} {kind.haystack:<10} {kind.keys:<7} {kind.values:<9}"
    f" {kind.needles * kind.values_each:<7} {kind.asked * kind.values_each}"
    for name, kind in NEEDLE_KINDS.items()
)

EPILOG = f"""\
examples:
  kvq niah embedded --task single_1 --suffix ': ' --cache dense \\
      --cache kivi:bits=2 --lengths 512,1024
  kvq niah path/to/model --task multikey_1 --text essays.txt --batch 8 \\
      --cache innerq:bits=2 --lengths 4096,16384 --dtype bfloat16
  kvq niah path/to/model --cache kivi:bits=2 --data niah_multikey_3.jsonl
      (with the fields input and outputs)

{shared.CACHE_GRAMMAR}"""


def configure(parser: argparse.ArgumentParser) -> None:
    tasks.add_arguments(parser, NEEDLE_TOKENS)
    parser.add_argument(
        "--task",
        choices=NEEDLE_KINDS,
        metavar="TASK",
        help="kind of needles and haystack, see above (default: single_1)",
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
    tasks.add_generator_arguments(
        parser, "a UTF-8 text to hide needles in, for tasks with the haystack 'text'"
    )

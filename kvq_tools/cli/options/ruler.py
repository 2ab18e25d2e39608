"""The options of `kvq ruler`."""

from __future__ import annotations

import argparse

from kvq_tools.cli.options import shared, tasks
from kvq_tools.evaluation.tasks.kinds import RULER_TOKENS

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
  kvq ruler smollm2 --task fwe --cache dense --cache kivi:bits=2 \\
      --lengths 512,1024
  kvq ruler path/to/model --task vt --cache innerq:bits=2 \\
      --lengths 4096,16384 --batch 8 --dtype bfloat16
  kvq ruler path/to/model --cache kivi:bits=2 --data ruler_cwe.jsonl
      (with the fields input and outputs)

{shared.CACHE_GRAMMAR}"""


def configure(parser: argparse.ArgumentParser) -> None:
    tasks.add_arguments(
        parser, None, "RULER's: " + ", ".join(f"{name} {new}" for name, new in RULER_TOKENS.items())
    )
    parser.add_argument("--task", choices=RULER_TOKENS, help="the task, see above (default: vt)")
    tasks.add_generator_arguments(parser)

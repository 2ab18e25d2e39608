"""The options of `kvq passkey`."""

from __future__ import annotations

import argparse

from kvq_tools.cli.options import shared, tasks
from kvq_tools.evaluation.tasks.kinds import PASSKEY_TOKENS

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

{shared.CACHE_GRAMMAR}"""


def configure(parser: argparse.ArgumentParser) -> None:
    tasks.add_arguments(parser, PASSKEY_TOKENS)
    tasks.add_generator_arguments(
        parser, "a UTF-8 text to hide the key in (default: dull sentences, repeated)"
    )

"""The options of `kvq methods`."""

from __future__ import annotations

import argparse

from kvq_tools.cli.options.shared import CACHE_GRAMMAR

DESCRIPTION = """\
Lists every cache method: what it does, its source, its options with defaults
and allowed values, its full-precision windows, and the average bits that it
stores per element of the quantized body (including scales, zero points and
padding, but not windows) at head_dim 128, and resident bytes: the cache, what
the method adds to the model, and the working memory of a step. Says whether a
kernel or XLA reads its cache on a GPU and on a CPU."""

EPILOG = f"""\
examples:
  kvq methods kivi
  kvq methods --json

{CACHE_GRAMMAR}"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="*", help="list these methods only")

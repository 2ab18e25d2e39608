"""The options of `kvq calibrate`."""

from __future__ import annotations

import argparse

from kvq_tools.cli.options import shared

SAMPLES, LENGTH = 16, 2048  # as in KVQuant

DESCRIPTION = f"""\
Fits the parameters that some caches need besides the weights (levels, ranges
and thresholds) to the keys and values that a model computes on a text, weighted
by how much its loss depends on them. Give the file to every command that runs
the cache: --calibration F.safetensors. It belongs to one model and to the
options of the method. You may change windows and skip_layers afterwards, but
not subtract_bias. A text like those that the model will read works best.

The model runs forward and backward over {SAMPLES} random samples of the text and
records keys, values, their gradients and moments of queries in a work
directory: 9.1 GB in bfloat16 for {SAMPLES} x {LENGTH} tokens of Llama 3.1 8B. Then the
keys or values of one layer at a time are fitted. Ctrl-C loses nothing that is
complete: the same command continues. The samples do not depend on the cache.
With --work the directory is kept, and you can calibrate other caches from it
without running the model again. The same seed gives the same file."""

EPILOG = f"""\
examples:
  kvq calibrate embedded --text notes.txt --cache kvquant:bits=2 \\
      --out notes.safetensors --samples 8 --length 512
  kvq generate embedded --prompt "It was" --cache kvquant:bits=2 \\
      --calibration notes.safetensors --temperature 0.6 --max-new-tokens 400
  kvq calibrate path/to/model --text wiki.txt --cache kvquant:bits=3 \\
      --out b3.safetensors --work samples
  kvq calibrate path/to/model --text wiki.txt --cache kvquant:bits=4 \\
      --out b4.safetensors --work samples                 (only fits)

{shared.CACHE_GRAMMAR}"""


def configure(parser: argparse.ArgumentParser) -> None:
    shared.add_model(parser)
    parser.add_argument(
        "--text", metavar="FILE", required=True, help="the UTF-8 text to draw samples from"
    )
    shared.add_cache(parser, "the cache to calibrate", default=None, required=True)
    parser.add_argument(
        "--out", metavar="F", required=True, help="the file to write, such as wiki.safetensors"
    )
    shared.add_samples(parser, SAMPLES, LENGTH, result="file")
    parser.add_argument(
        "--work",
        metavar="DIR",
        help="keep the samples here (default: OUT.work, deleted once the file is written)",
    )
    shared.add_fixed_dtype(parser, "weights, activations and gradients")

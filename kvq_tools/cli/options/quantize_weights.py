"""The options of `kvq quantize-weights`."""

from __future__ import annotations

import argparse

from kvq_models.calibration.weight_bits import BITS
from kvq_tools.cli.options import shared

SAMPLES, LENGTH = 16, 512

DESCRIPTION = """\
Rounds the weights of a model's projections to 2^bits values per output channel,
placed where the loss depends on them most (k-means weighted by squared
gradients on a text), and writes an ordinary Hugging Face checkpoint.

The checkpoint is dequantized: it has the size, dtype and speed of MODEL. With
--packed it holds codes of 4 bits, the values of each channel and what stays
unchanged: the same weights, which kvq alone can read, and keeps in these bits
on a CPU. Run every command of kvq on DIR, to see what quantized weights do to
the predictions, alone and together with a quantized cache. The embedding, the
head, norms and biases stay unchanged.

--sparse 0.0045 leaves 0.45 % of each matrix unchanged: the most sensitive
weights and the largest ones. Without --text, the gradients come from the short
passage that ships with kvq. A text like those that the model will read works
better. Calibrations of MODEL do not fit DIR."""

EPILOG = """\
examples:
  kvq quantize-weights smollm2 --bits 4 --text wiki.txt --out w4
  kvq quantize-weights smollm2 --bits 3 --sparse 0.0045 --text wiki.txt \\
      --out w3s
  kvq quantize-weights smollm2 --bits 4 --sparse 0.0045 --packed --out w4s
  kvq eval w3s --text notes.txt --cache dense --cache kivi:bits=4"""


def configure(parser: argparse.ArgumentParser) -> None:
    shared.add_model(parser)
    parser.add_argument("--bits", type=int, choices=BITS, required=True, help="bits per weight")
    parser.add_argument(
        "--out", metavar="DIR", required=True, help="the directory to write, new or empty"
    )
    parser.add_argument(
        "--sparse",
        metavar="F",
        type=float,
        default=0.0,
        help="fraction of the weights that stay unchanged (default: 0)",
    )
    parser.add_argument(
        "--packed", action="store_true", help="write codes of 4 bits; needs --bits 4"
    )
    parser.add_argument(
        "--text", metavar="FILE", help="a UTF-8 text for the gradients (default: a short passage)"
    )
    shared.add_samples(parser, SAMPLES, LENGTH, result="weights")

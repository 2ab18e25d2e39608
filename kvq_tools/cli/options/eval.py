"""The options of `kvq eval`."""

from __future__ import annotations

import argparse

from kvq_tools.cli.options import evaluation, shared

DESCRIPTION = """\
Reads a text with a model whose keys and values go through each cache SPEC, and
once without a cache. Prints
  perplexity, bits/byte   of the text: exp(mean -log q), and the bits per UTF-8
                          byte of the scored tokens
  KL                      mean KL(p || q) of the predicted distributions, p
                          without a cache and q through it, with full-precision
                          rows in --dtype
  top-1 agreement         how often the likeliest next token is the same; if it
                          is not, the cache flips it
  quantized tokens        among those that the last step of a window reads;
                          NONE: full precision in all but name
  cache bytes             of one sequence of --window tokens, windows included,
                          with full-precision rows in bfloat16

The text is read in windows of W tokens, one every S tokens, each with an empty
cache. A token is scored once, in the first window that contains it, so after
the first window at least W - S tokens come before it. With S = W windows do not
overlap, and the first token of each is not scored. Ctrl-C shows the numbers of
the windows that were read by then; a second press leaves at once.

--mode decode   token after token through the cache, as generation reads it;
                this is the reference
       chunked  prefill of --chunk tokens at a time: exact inside a chunk,
                through the cache for everything before it
       fake     one forward pass that quantizes every token, even the newest, as
                papers simulate it
Some caches take statistics from a prompt (innerq's key norm, squat's subspace).
If any of the given caches does, every window in mode decode starts with a
prompt of --prompt tokens, the same for all caches, and the title says so.
--prompt 0 is then refused. In mode chunked, statistics come from a window's
first chunk, and in mode fake from the whole window."""

EPILOG = f"""\
examples:
  kvq eval embedded --text notes.txt --cache kivi:bits=2 \\
      --cache innerq:bits=2 --window 1024
  kvq eval path/to/model --text wiki.txt --cache kivi:bits=4 --mode chunked \\
      --batch 8 --limit 100000 --dtype bfloat16 --json
  kvq eval embedded --text notes.txt --cache squat --window 1024 \\
      --stride 512 --prompt 512

{shared.CACHE_GRAMMAR}"""


def configure(parser: argparse.ArgumentParser) -> None:
    shared.add_model(parser)
    evaluation.add_request(parser)
    shared.add_mesh(parser)
    parser.add_argument(
        "--flips",
        action="store_true",
        help=(
            "with --json, also list the positions in the text where each cache flips the "
            "top-1 token"
        ),
    )
    parser.add_argument(
        "--protocol",
        action="store_true",
        help=(
            "keep the same tokens exact in all caches, score tokens that have --window tokens "
            "before them, once after an exact prompt and once with everything decoded, and say "
            "which caches the intervals tell apart"
        ),
    )

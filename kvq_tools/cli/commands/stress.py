"""`kvq stress`: write a checkpoint with the same dense outputs and a cache that is harder to
quantize."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvq_models.llama import checkpoint
from kvq_models.llama.model import Llama, forward
from kvq_tools.cli import inputs
from kvq_tools.cli.console import UserError, format_bytes, input_errors, print_json, progress
from kvq_tools.cli.tables import print_line
from kvq_tools.evaluation.stress import Outliers, Stress, check, stressed

PROBE_TOKENS = 256  # random tokens on which both models are compared
STORED_DTYPES = {"BF16": "bfloat16", "F16": "float16"}

DESCRIPTION = f"""\
Writes a Hugging Face checkpoint that computes what MODEL computes with a full-precision cache, and whose cache is harder to
quantize: what large models have and small ones lack. Compare `kvq` commands on MODEL and on DIR: whatever differs is the
cache's doing.

  --key-outliers 4x12    in every layer and KV head, 4 RoPE pairs of the keys are 12 times as large,
                         and the same pairs of the queries 12 times smaller. Exact: a rotation acts
                         inside a pair. With QK-norm (Qwen3) the factors go into the norms' weights,
                         so all heads have the same pairs.
  --one-dimension        those pairs are also turned until most of their keys, as the weights tell,
                         lie in one of the two channels. Exact. More than a factor and a turn no
                         pair can have: rotations by all positions come between.
  --value-outliers 4x12  4 channels of the values are 12 times as large, and the rows of o_proj that
                         read them smaller. Exact.
  --input-outliers 4x12  4 channels of each layer's input are 12 times as large, and the rows of the
                         projections that read them smaller. Exact. Keys and values stay as they
                         are: only caches of the input (xquant) can be hurt.
  --key-bias 100         k_proj.bias holds +-100 in some RoPE pairs, after the large key biases of
                         Qwen2.5. Scores see a constant wherever the queries are not zero, and they
                         are zero in no pair of a trained head; so heads become twice as wide: the
                         old channels keep their frequencies and stand between new ones. Exact but
                         for one factor, sqrt(2), which is rounded. Only caches in which old and new
                         channels share a scale or a norm can be hurt. A family without such a bias
                         is written as Llama with attention_bias; a model with QK-norm is refused.
                         --key-bias 0 only widens the heads: compare with that one, not with MODEL.
                         The remedy is a cache with subtract_bias=true.

They can be combined. Outliers hurt a cache whose scales serve other entries beside them; a scale of one channel or one pair takes the
factor up and leaves the codes, to the last bit where it is a power of two (docs/evaluation.md). The checkpoint keeps MODEL's dtype
where that loses nothing (bf16: factors that are powers of two), otherwise it is written in float32: then run it
with --dtype float32. At the end both models are run on {PROBE_TOKENS} random tokens with exact attention, and the largest difference of a
logit is printed: float32 rounding, in sums of another order."""

EPILOG = f"""\
examples:
  kvq stress embedded --out hard --key-outliers 2x12 --value-outliers 2x12
  kvq stress embedded --out biased --key-bias 100 --seed 1
  kvq eval hard --text notes.txt --cache int4 --cache kivi:bits=4      (and the same of embedded)

{inputs.CACHE_GRAMMAR}"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    inputs.add_model(parser)
    parser.add_argument(
        "--out",
        metavar="DIR",
        required=True,
        help="the directory to write; it must be new or empty",
    )
    parser.add_argument(
        "--key-outliers",
        metavar="CHANNELSxFACTOR",
        type=outliers,
        help="RoPE pairs of each KV head, and their factor",
    )
    parser.add_argument("--key-bias", metavar="X", type=float, help="magnitude of the constant")
    parser.add_argument(
        "--value-outliers",
        metavar="CHANNELSxFACTOR",
        type=outliers,
        help="channels of each KV head, and their factor",
    )
    parser.add_argument(
        "--input-outliers",
        metavar="CHANNELSxFACTOR",
        type=outliers,
        help="channels of each layer's input, and their factor",
    )
    parser.add_argument(
        "--one-dimension",
        action="store_true",
        help="turn the pairs of --key-outliers towards one of their two channels",
    )
    parser.add_argument(
        "--seed", type=inputs.seed, default=0, help="draws channels and signs (default: 0)"
    )


def outliers(text: str) -> Outliers:
    """Parse the value of --key-outliers, --value-outliers and --input-outliers, such as 4x12."""
    match = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)", text)
    if not match:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not CHANNELSxFACTOR; write 4x12 for 4 channels 12 times as large"
        )
    return Outliers(int(match[1]), float(match[2]))


def run(options: argparse.Namespace) -> None:
    out, asked = (
        Path(options.out),
        (
            options.key_outliers,
            options.value_outliers,
            options.key_bias,
            options.seed,
        ),
    )
    stress = Stress(*asked, options.input_outliers, options.one_dimension)
    config = inputs.read_config(options.model)
    with input_errors():
        check(config, stress)
    inputs.output_directory(options.out, empty=True)
    with progress(f"loading {options.model}"), input_errors():
        source = checkpoint.open_checkpoint(options.model)
        llama = checkpoint.load_weights(source, dtype="float32")
    with progress("changing weights"), input_errors():
        harder = stressed(llama, stress)
    with progress("comparing dense outputs"):
        change, largest = compared(llama, harder)
    if not math.isfinite(largest):
        raise UserError(
            f"the logits of {options.model!r} are not finite before any change; nothing is written"
        )
    if not math.isfinite(change):
        raise UserError(
            "the changed model's logits are not finite; nothing is written: ask for smaller factors"
            " or a smaller bias"
        )
    harder = in_stored_dtype(harder, source)
    with progress(f"writing {options.out}"), input_errors():
        checkpoint.save_checkpoint(harder, out, source.write_tokenizer)
    result = report(options, harder) | {"largest_logit_change": change, "largest_logit": largest}
    print_json("stress", result) if options.json else print_line(_line(result))


def compared(before: Llama, after: Llama) -> tuple[float, float]:
    """Return (the largest difference of a logit, the largest logit) with exact attention on random
    tokens."""
    length = min(PROBE_TOKENS, before.config.positions)
    tokens = (
        np.random.default_rng(0).integers(0, before.config.vocab_size, (1, length)).astype(np.int32)
    )
    logits = [np.asarray(jax.jit(forward)(llama, tokens)) for llama in (before, after)]
    return float(np.abs(logits[1] - logits[0]).max()), float(np.abs(logits[0]).max())


def in_stored_dtype(llama: Llama, source: checkpoint.Checkpoint) -> Llama:
    """Return the float32 model in the dtype of the checkpoint `source`, if it has one and no weight
    loses anything by it."""
    stored = {header.dtype for header in source.tensors.values()}
    dtype = STORED_DTYPES.get(stored.pop()) if len(stored) == 1 else None
    if dtype is None:
        return llama
    narrow = jax.tree.map(lambda leaf: leaf.astype(dtype), llama)
    same = jax.tree.map(lambda a, b: bool(jnp.array_equal(a.astype(jnp.float32), b)), narrow, llama)
    return narrow if all(jax.tree.leaves(same)) else llama


def report(options: argparse.Namespace, llama: Llama) -> dict[str, Any]:
    """Return the facts about the checkpoint that was written."""

    def asked(kind: Outliers | None) -> dict[str, float] | None:
        return None if kind is None else {"channels": kind.channels, "factor": kind.factor}

    return {
        "model": options.model,
        "out": options.out,
        "bytes": sum(file.stat().st_size for file in Path(options.out).iterdir()),
        "model_type": llama.config.model_type,
        "head_dim": llama.config.head_dim,
        "dtype": llama.embed[...].dtype.name,
        "key_outliers": asked(options.key_outliers),
        "value_outliers": asked(options.value_outliers),
        "input_outliers": asked(options.input_outliers),
        "one_dimension": options.one_dimension,
        "key_bias": options.key_bias,
        "seed": options.seed,
    }


def _line(done: dict[str, Any]) -> str:
    parts = [
        f"{kind['channels']} {places} times {kind['factor']:g}"
        for kind, places in (
            (
                done["key_outliers"],
                "RoPE pairs of keys per KV head"
                + (", turned towards one channel," if done["one_dimension"] else ""),
            ),
            (done["value_outliers"], "channels of values per KV head"),
            (done["input_outliers"], "channels of each layer's input"),
        )
        if kind is not None
    ]
    if done["key_bias"] is not None:
        parts.append(
            f"heads widened to {done['head_dim']} channels with a key bias of {done['key_bias']:g}"
        )
    return (
        f"[{done['out']}: {done['model_type']}, {done['dtype']}, {format_bytes(done['bytes'])};"
        f" {'; '.join(parts)}; seed {done['seed']}; largest change of a logit with exact attention"
        f" {done['largest_logit_change']:.1e}, largest logit {done['largest_logit']:.1f}]"
    )

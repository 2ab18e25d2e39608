"""The options that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from kvq_models.inference.engine.limits import MAX_SLOTS, SLOTS
from kvq_tools.cli.console import UserError
from kvq_tools.cli.options import values

MAX_SAMPLES = 65_536  # samples of a text are drawn at once
DTYPES = ("float32", "bfloat16")

MODEL_HELP = (
    "a local Hugging Face directory, a GGUF file, a Hub id (organisation/name[/FILE.gguf], with"
    " @REVISION for a branch, tag or commit), 'embedded' for the small model that ships with kvq,"
    " or a name that `kvq fetch` lists, such as 'smollm2', once it is fetched"
)

CACHE_GRAMMAR = """\
SPEC, the argument of --cache:
  METHOD                              one method for keys and values
  k=METHOD+v=METHOD[+cache:OPTIONS]   one for each; sink, recent, block,
                                      skip_layers and subtract_bias are options
                                      of the cache
  METHOD is NAME[:OPTION=VALUE,...]. A list of layers is written 0-2/31, and a
  value that differs by layer 4@0-2/2 (4 in layers 0 to 2, else 2). Examples:
    dense
    kivi:bits=2
    innerq:bits=2,mode=hybrid
    kivi:bits=4@0-1/2,recent=128,skip_layers=0
    k=kivi:bits=4+v=innerq:bits=2+cache:recent=96
  rotate=true quantizes keys and values after a Hadamard rotation. Most methods
  have it; it helps formats with one scale for many channels (int4, nf4, mxfp4).
  subtract_bias=true caches keys without the bias of k_proj and adds its share
  of the scores exactly (Qwen2, Qwen2.5).
  auto:bits=2.5 is waterfill with the widths that a plan of the model found.
  plan.json is the cache that `kvq plan --out plan.json` wrote.
  `kvq methods` lists all names and options."""


def add_number(
    parser: argparse.ArgumentParser,
    option: str,
    metavar: str,
    text: str,
    *,
    type: Callable[[str], float] = values.positive,
    default: float | None = None,
) -> None:
    """Add an option that takes a number: a positive integer, unless `type` reads another one. Its
    help is `text`, and the default if there is one."""
    shown = "" if default is None else " (default: %(default)s)"
    parser.add_argument(option, metavar=metavar, type=type, default=default, help=text + shown)


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)


def add_calibration(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add --calibration. `several` is for commands that take several caches."""
    text = "the file that `kvq calibrate` wrote, for a cache that needs one" + (
        "; can be repeated" if several else ""
    )
    parser.add_argument(
        "--calibration", metavar="F", action="append" if several else "store", help=text
    )


def add_implementation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--implementation",
        choices=("xla", "pallas", "native"),
        help=(
            "how the packed cache is read: by pallas kernels on a GPU, by native kernels on a "
            "CPU, or by xla (default: kernels if the cache has them, else xla)"
        ),
    )


def add_fixed_dtype(parser: argparse.ArgumentParser, of: str) -> None:
    """Add --dtype to a command whose default does not depend on the device."""
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help=f"dtype of {of} (default: %(default)s)"
    )


def add_dtype(
    parser: argparse.ArgumentParser, *, one_cache: bool = False, beside: str = ""
) -> None:
    """Add --dtype, --weights and --activations, which `load_model` reads. `one_cache`: --dtype also
    decides the rows of --cache (`rows_dtype`). `beside`: more help."""
    rows = "; rows of a quantized cache are bfloat16" if one_cache else ""
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help=(
            "dtype of weights, activations and full-precision rows (default: the fastest on this"
            f" device: float32 on a CPU, else bfloat16{rows}){beside}"
        ),
    )
    parser.add_argument(
        "--weights",
        choices=("packed", "dense"),
        help=(
            "keep matrices in the file's own bits (GGUF blocks, integers, FP8, NF4, 16 bits),"
            " or make arrays of --dtype of them (default: packed on a CPU with native kernels, but"
            " dense for small matrices of 16 bits)"
        ),
    )
    parser.add_argument(
        "--activations",
        choices=("float32", "int8"),
        default="float32",
        help=(
            "int8 rounds the inputs of packed weights to 8 bits: prompts and batches take about"
            " 0.5 to 0.85 of the time, single tokens the same (default: %(default)s, no rounding)"
        ),
    )


class _OneCache(argparse.Action):
    """Store --cache, and refuse a second one, which would silently replace the first."""

    stored = False

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, text: Any, *_: object
    ) -> None:
        if self.stored:
            raise UserError(
                f"{parser.prog} takes one --cache; to compare several, use kvq demo or kvq eval"
            )
        self.stored = True
        setattr(namespace, self.dest, text)


def add_cache(
    parser: argparse.ArgumentParser,
    text: str = "the cache (default: dense)",
    *,
    default: str | None = "dense",
    required: bool = False,
) -> None:
    """Add --cache to a command that runs one cache. `text` is its help."""
    parser.add_argument(
        "--cache", metavar="SPEC", action=_OneCache, default=default, required=required, help=text
    )


def add_saved(parser: argparse.ArgumentParser, text: str) -> None:
    """Add --from, a file of `kvq prefill`, and --cache, which it decides. `text` is its help."""
    parser.add_argument("--from", type=values.file_name, dest="saved", metavar="F", help=text)
    add_cache(parser, "the cache (default: dense; with --from, the one in the file)", default=None)


def add_caches(
    parser: argparse.ArgumentParser,
    text: str = "a cache; can be repeated",
    *,
    required: bool = False,
) -> None:
    """Add --cache to a command that compares caches. `text` is its help."""
    parser.add_argument("--cache", metavar="SPEC", action="append", required=required, help=text)


def add_prompt(parser: argparse.ArgumentParser, *, required: bool) -> Any:
    """Add the options that give a prompt, which exclude each other, and return their group."""
    prompt = parser.add_mutually_exclusive_group(required=required)
    prompt.add_argument("--prompt", metavar="P", help="the text to continue")
    prompt.add_argument(
        "--prompt-file", metavar="F", help="a UTF-8 file with the text to continue, or - for stdin"
    )
    prompt.add_argument(
        "--prompt-ids",
        metavar="IDS",
        type=values.token_ids,
        help="token ids such as 1,2,3; needs no tokenizer",
    )
    parser.add_argument(
        "--chat", action="store_true", help="wrap the prompt in the tokenizer's chat template"
    )
    return prompt


def add_samples(parser: argparse.ArgumentParser, samples: int, length: int, *, result: str) -> None:
    """Add the random samples of a text that the model runs on. They decide the `result`."""
    add_number(
        parser,
        "--samples",
        "N",
        "random samples of the text",
        type=values.integer(1, MAX_SAMPLES),
        default=samples,
    )
    add_number(
        parser,
        "--length",
        "W",
        f"tokens per sample (default: {length}, at most the positions of the model)",
    )
    text = f"seed of the samples: the same seed gives the same {result}"
    add_number(parser, "--seed", "SEED", text, type=values.seed, default=0)


def add_sequences(parser: argparse.ArgumentParser) -> None:
    """Add the number of sequences of a cache, and their length."""
    add_number(
        parser,
        "--context",
        "S",
        "tokens per sequence, such as 4096, 128K or 10M (default: the positions of the model)",
        type=values.token_count,
    )
    add_number(parser, "--batch", "B", "sequences", default=1)


def add_mesh(parser: argparse.ArgumentParser) -> None:
    """Add --mesh, which `placement_of` reads."""
    parser.add_argument(
        "--mesh",
        metavar="WAYS",
        help=(
            "split the model and its cache among devices: rows=R,heads=H,tokens=T, each "
            "optional, or auto (all devices, by heads as far as the cache allows, then by "
            "tokens); default: one device. To try it on a CPU, set "
            "XLA_FLAGS=--xla_force_host_platform_device_count=8. See docs/scale.md"
        ),
    )


def add_size(parser: argparse.ArgumentParser, *, capacity: bool = True) -> None:
    """Add the options that set an engine's size. `size_of` reads them."""
    add_number(
        parser,
        "--memory",
        "BYTES",
        "memory for the caches, such as 8GiB: uses as many slots as fit, at most "
        f"{MAX_SLOTS} (weights not counted)",
        type=values.byte_size,
    )
    add_number(
        parser,
        "--slots",
        "B",
        f"requests at a time (default: {SLOTS}, or as many as fit into --memory)",
    )
    if capacity:
        add_number(
            parser,
            "--capacity",
            "S",
            "tokens per slot (default: the positions that the model was trained for)",
        )


def add_generation(parser: argparse.ArgumentParser, *, max_new_tokens: int) -> None:
    """Add the options of generation that `generate` and `chat` share."""
    add_number(parser, "--max-new-tokens", "N", "stop after N tokens", default=max_new_tokens)
    add_number(
        parser,
        "--temperature",
        "T",
        "0 is greedy (default: what the model's generation_config.json asks for, else greedy, "
        "or 1 with --top-k, --top-p or --min-p)",
        type=float,
    )
    add_number(
        parser,
        "--top-k",
        "K",
        "sample from the K most probable tokens (0: all; default: the model's)",
        type=int,
    )
    add_number(
        parser,
        "--top-p",
        "P",
        "sample from the fewest tokens whose probabilities add up to P (default: the model's)",
        type=float,
    )
    add_number(
        parser,
        "--min-p",
        "P",
        "sample from tokens at least P times as probable as the best (default: the model's)",
        type=float,
    )
    add_number(
        parser, "--seed", "N", "the same seed gives the same text", type=values.seed, default=0
    )
    add_implementation(parser)
    add_dtype(parser, one_cache=True)

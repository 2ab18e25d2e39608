"""Parse and check the input that commands share: a model, caches, a prompt. Everything is checked
before any weight is read."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

import kvq_jax as kvq
from kvq_models.calibration import file as calibration_file
from kvq_models.calibration.needs import needs
from kvq_models.inference.engine.limits import CAPACITY_STEP
from kvq_models.llama import open_checkpoint
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.hf_directory import CONFIG_FILES, INDEX_FILE
from kvq_models.llama.hf_tokenizer import TOKENIZER_EXTRAS, TOKENIZER_FILES
from kvq_models.llama.weights_needed import check_weights
from kvq_models.named_models.names import located
from kvq_tools.cli.console import UserError, input_errors, warn
from kvq_tools.cli.planned import NamedCache
from kvq_tools.evaluation.defaults import CACHE_DTYPE

# the options that may name a file to read, and those that name one to write
INPUTS = ("cache", "calibration", "text", "other_text", "prompt_file", "prompts", "data")
OUTPUTS = ("out", "picture", "answers")
# what a model's directory has besides weights
MODEL_FILES = (*CONFIG_FILES, INDEX_FILE, *TOKENIZER_FILES, *TOKENIZER_EXTRAS)
DENSE = NamedCache("dense", kvq.parse("dense"))  # the cache if --cache is left out


def model_dtype(options: argparse.Namespace) -> str:
    """Return the dtype of weights and activations: --dtype, or the fastest on this device."""
    return options.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")


def rows_dtype(options: argparse.Namespace) -> str:
    """Return the dtype of the full-precision rows of --cache.

    Without --dtype, a cache that quantizes nothing has the model's dtype, so that it changes
    nothing, and the windows of other caches are bfloat16.
    """
    return model_dtype(options) if options.cache.spec.exact else options.dtype or CACHE_DTYPE


def read_config(model: str, *caches: NamedCache, warn_unmet: bool = True) -> LlamaConfig:
    """Read the model's configuration and check that every cache fits it. `warn_unmet`: warn of
    options that ask too much of this model."""
    with input_errors():
        config = open_checkpoint.read_config(model)
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


def check_calibration_option(options: argparse.Namespace, config: LlamaConfig) -> None:
    """Raise UserError if --cache needs a calibration that --calibration is not, or needs none."""
    file = options.calibration
    calibrations(config, [options.cache], [] if file is None else [file])


def _calibration(cache: NamedCache, config: LlamaConfig, files: Sequence[str]) -> str:
    """Return the first file that calibrates this cache."""
    name, spec = cache
    errors = []
    for file in files or (None,):
        try:
            calibration = calibration_file.check_calibration(spec, config, file)
        except (ValueError, OSError) as error:
            errors.append(str(error))
        else:
            used = spec if calibration is None else calibration_file.resolved(spec, calibration)
            if used != spec:
                warn(
                    f"{name} leaves open what {file} decides for this model; --cache '{used}' uses"
                    " it"
                )
            return str(file)
    raise ValueError("; ".join(errors))


def warn_if_nothing_quantized(
    caches: Sequence[NamedCache], config: LlamaConfig, capacity: int, read: int | None, where: str
) -> None:
    """Warn of quantized caches whose quantized tokens are never read: they measure the
    full-precision model.

    Args:
        capacity: tokens that each cache can hold.
        read: tokens in the cache at its last read, or None if windows do not matter.
        where: the setting in words, for the warning.
    """
    for name, spec in caches:
        if spec.exact:
            continue
        layout = kvq.cache.layout(spec, config, 1, capacity)
        if not any(plan.quantizes for plan in layout.plans):
            warn(
                f"{name}: no layer of this model quantizes anything, so this is the full-precision"
                " model up to rounding"
            )
        elif read is not None and not kvq.size.quantized_tokens(layout, read):
            warn(f"{name}: {where} nothing is read quantized, so this is the full-precision model")


def output_file(options: argparse.Namespace, name: str = "out") -> Path:
    """Check before any work that the file of an option can be written: it is not a directory,
    device or pipe, its own directory exists and can be written, and no other option names it."""
    path, option = getattr(options, name), f"--{name}"
    out = Path(path)
    with _names(option):
        if out.is_dir() or not out.absolute().parent.is_dir():
            raise UserError(f"{option} {path!r} must be a file in a directory that exists")
        if out.exists() and not out.is_file():
            raise UserError(
                f"{option} {path!r} is a device or a pipe, which keeps nothing; name a file"
            )
        for other, file in _named_files(options):
            if other != option and _same(path, file):
                raise UserError(
                    f"{option} {path!r} would replace a file of {other}; name another one"
                )
        _check_writable(out.resolve().parent, f"{option} {path!r}")
    return out


def _named_files(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield the files that a command reads or writes, each with its option as it is typed."""
    for name in (*INPUTS, *OUTPUTS):
        values = getattr(options, name, None)
        for value in values if isinstance(values, list) else [values]:
            file = value.text if isinstance(value, NamedCache) else value
            if file is not None and (name != "cache" or file.endswith(".json")):
                yield f"--{name.replace('_', '-')}", file
    if (model := getattr(options, "model", None)) is not None:
        with input_errors():
            place = Path(located(model))
        files = [place / file for file in MODEL_FILES], place.glob("model*.safetensors")
        yield from (("MODEL", str(file)) for file in (place, *itertools.chain(*files)))


def _same(path: str, other: str) -> bool:
    if os.path.exists(path) and os.path.exists(other):
        return os.path.samefile(path, other)
    return os.path.realpath(path) == os.path.realpath(other)


def output_directory(path: str, option: str = "--out", *, empty: bool = False) -> Path:
    """Check before any work that a directory can be created and written. Nothing is created
    yet."""
    if not path:  # which Path takes for the current directory
        raise UserError(f"{option} is empty; name a directory")
    out = Path(path)
    with _names(option):
        if empty and out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise UserError(
                f"{option} {path!r} exists and is not an empty directory; name a new one"
            )
        if empty and out.exists() and out.samefile(os.curdir):
            raise UserError(f"{option} {path!r} is the current directory; name a new one")
        if out.exists() and not out.is_dir():
            raise UserError(f"{option} {path!r} is a file; name a directory")
        absolute = out.absolute()
        above = next(folder for folder in (absolute, *absolute.parents) if folder.exists())
        _check_writable(above, f"{option} {path!r}")
    return out


@contextlib.contextmanager
def _names(option: str) -> Iterator[None]:
    """Turn an error of the system about the name in an option, such as a name that is too long,
    into a UserError."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{option} cannot be written: {reason}; give another name") from error


def _check_writable(folder: Path, what: str) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"{what} cannot be written: {error.strerror}; name another directory"
        ) from error


def warn_beyond(tokens: int, config: LlamaConfig, name: str = "") -> None:
    """Warn if a model gets more tokens than it was trained for. `name` says whose tokens these
    are."""
    if tokens > config.max_position_embeddings:
        warn(
            f"{name}{tokens} tokens go beyond the {config.max_position_embeddings} positions that"
            " the model was trained for"
        )


def rounded_capacity(tokens: int) -> int:
    """Return the capacity of a cache for this many tokens. There are few different ones, because
    each is a program to compile."""
    return -(-tokens // CAPACITY_STEP) * CAPACITY_STEP

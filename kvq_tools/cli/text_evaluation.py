"""The arguments of `kvq eval` and `kvq report`: a text, caches, and how they are evaluated on
it."""

from __future__ import annotations

import argparse

import kvq_jax as kvq
from kvq_models.llama.config import LlamaConfig
from kvq_tools.cli import inputs, text_input
from kvq_tools.cli.console import UserError, input_errors
from kvq_tools.evaluation.results import BUCKETS
from kvq_tools.evaluation.settings import (
    BATCH,
    CHUNK,
    MODES,
    MOST_WINDOW,
    PROMPT,
    STEP,
    Settings,
    check_request,
)
from kvq_tools.evaluation.text import TokenizedText, tokenize


def add_request(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add the text, the caches and the evaluation's settings. `checked` reads them."""
    parser.add_argument(
        "--text", metavar="FILE", required=required, help="the UTF-8 text to predict"
    )
    parser.add_argument(
        "--cache",
        metavar="SPEC",
        type=inputs.named_cache,
        action="append",
        required=required,
        help="a cache; can be repeated",
    )
    inputs.add_calibration(parser, several=True)
    _add_settings(parser)
    inputs.add_dtype(
        parser, beside="; in bfloat16, --cache dense shows the effect of rounding alone"
    )


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Add how a text is cut into windows and read."""
    parser.add_argument(
        "--window",
        metavar="W",
        type=inputs.positive,
        help=(
            "tokens per window (default: the model's max_position_embeddings, at most "
            f"{MOST_WINDOW})"
        ),
    )
    parser.add_argument(
        "--stride",
        metavar="S",
        type=inputs.positive,
        help="tokens from one window to the next (default: half a window)",
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="decode",
        help="how the cache is used (default: %(default)s)",
    )
    parser.add_argument(
        "--chunk",
        metavar="C",
        type=inputs.positive,
        help=f"tokens per chunk in --mode chunked (default: {CHUNK})",
    )
    parser.add_argument(
        "--prompt",
        metavar="P",
        type=inputs.count,
        help=(
            "in --mode decode, prefill the first P tokens of each window without scoring them "
            f"(default: 0, or {PROMPT} and at most the overlap of two windows if one of the "
            "caches takes statistics from a prompt)"
        ),
    )
    parser.add_argument(
        "--step",
        metavar="T",
        type=inputs.positive,
        help=(
            "tokens per step in --mode decode; fused GPU kernels serve 1, larger steps are "
            f"faster (default: {STEP})"
        ),
    )
    parser.add_argument(
        "--batch",
        metavar="B",
        type=inputs.positive,
        default=BATCH,
        help="windows at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--limit",
        metavar="TOKENS",
        type=inputs.positive,
        help="read only the first tokens of the text",
    )
    parser.add_argument(
        "--buckets",
        metavar="N",
        type=inputs.positive,
        default=BUCKETS,
        help="parts of a window, for numbers by position (default: %(default)s)",
    )


def checked(
    options: argparse.Namespace,
) -> tuple[LlamaConfig, TokenizedText, Settings, list[str | None]]:
    """Read and check everything that needs no weights: (config, text, settings, calibration of each
    cache)."""
    for name, mode in (("chunk", "chunked"), ("prompt", "decode"), ("step", "decode")):
        if getattr(options, name) is not None and options.mode != mode:
            raise UserError(f"--{name} is for --mode {mode}, not {options.mode}")
    options.dtype = inputs.model_dtype(options)
    whole = text_input.read_text(options.text)
    specs = [spec for _, spec in options.cache]
    config = inputs.read_config(options.model, *options.cache)
    files = inputs.calibrations(config, options.cache, options.calibration or [])
    tokenizer = text_input.need_tokenizer(options.model, "read the text")
    text = tokenize(tokenizer, whole)
    text = text if options.limit is None else text.first(options.limit)
    with input_errors():
        settings = check_request(
            config,
            text.ids,
            specs,
            window=options.window,
            stride=options.stride,
            mode=options.mode,
            batch=options.batch,
            chunk=options.chunk or CHUNK,
            prompt=options.prompt,
            step=options.step or STEP,
        )
    return config, text, settings, files


def warn_if_exact(name: str, cache: kvq.cache.Cache, settings: Settings) -> None:
    """Warn if nothing is quantized in windows of the cache's capacity."""
    window, newest = cache.capacity, settings.read_tokens(cache.capacity)
    chunks = f" and chunks of {settings.chunk}" if settings.mode == "chunked" else ""
    inputs.warn_if_exact(
        name,
        cache,
        None if settings.mode == "fake" else newest,
        f"in windows of {window} tokens{chunks}",
    )

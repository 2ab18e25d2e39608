"""The arguments of `kvq eval` and `kvq report`: a text, caches, and how they are evaluated on
it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from kvq_models.llama.config import LlamaConfig
from kvq_tools.cli import inputs, text_input
from kvq_tools.cli.console import UserError, input_errors
from kvq_tools.cli.planned import NamedCache
from kvq_tools.evaluation.defaults import CHUNK, STEP
from kvq_tools.evaluation.settings import Settings, check_request
from kvq_tools.evaluation.text import TokenizedText, tokenize


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
    if (options.step or 1) > settings.window:  # all of a longer one would be padding
        raise UserError(
            f"--step {options.step} is more than the window of {settings.window} tokens; give fewer"
        )
    return config, text, settings, files


def warn_if_nothing_quantized(
    caches: Sequence[NamedCache], config: LlamaConfig, window: int, settings: Settings
) -> None:
    """Warn of caches that quantize nothing in windows of `window` tokens."""
    newest = None if settings.mode == "fake" else settings.read_tokens(window)
    chunks = f" and chunks of {settings.chunk}" if settings.mode == "chunked" else ""
    where = f"in windows of {window} tokens{chunks}"
    inputs.warn_if_nothing_quantized(caches, config, window, newest, where)

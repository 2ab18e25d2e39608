"""Continue one prompt through a cache: a prompt of the command line, or one that `kvq prefill`
saved with its cache."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from typing import Any

import jax
import numpy as np

import kvq_jax as kvq
from kvq_jax.cache.cache import Cache
from kvq_models.inference.generation import STREAM_STEPS
from kvq_models.inference.sampling import Sampling
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import Llama
from kvq_models.llama.packed_loading import holds_packed, in_words
from kvq_tools.cli import (
    generation_report,
    handover,
    inputs,
    interruption,
    one_cache,
    one_prompt,
    sampling_options,
    text_input,
)
from kvq_tools.cli.console import UserError, check_finite, counted, print_json, progress
from kvq_tools.cli.continuation import Continuation
from kvq_tools.cli.handover import SavedPrompt
from kvq_tools.cli.reading import reading
from kvq_tools.cli.tables import print_line
from kvq_tools.cli.timed import TimedGeneration

SEGMENT_SECONDS = 0.5  # most that a text without --stream takes to end after Ctrl-C


@dataclasses.dataclass(frozen=True)
class GenerationRequest:
    """A checked request. Of the user's input, only the weights can still be wrong.

    `saved` is the file of --from, or None if the prompt is read here. The first `known` tokens of
    the prompt are those of the file.
    """

    config: LlamaConfig
    tokenizer: Any
    prompt: list[int]
    known: int
    capacity: int
    sampling: Sampling
    saved: SavedPrompt | None
    placement: kvq.Placement | None


def run(options: argparse.Namespace) -> None:
    """Continue the prompt, print the text, and report what was done."""
    request = _checked(options)
    llama, cache, logits = _cache(options, request)
    unread = len(request.prompt) - request.known
    with progress("compiling"):
        generation = TimedGeneration(
            llama,
            cache,
            request.prompt,
            max_new_tokens=options.max_new_tokens,
            sampling=request.sampling,
            eos_ids=llama.config.eos_token_ids,
            seed=options.seed,
            implementation=options.implementation,
            known=request.known,
            logits=logits,
            drafts=options.draft or 0,
            reading=reading(unread, request.config.num_hidden_layers) if unread else None,
        )
    continuation = Continuation(request.tokenizer, request.prompt, llama.config.eos_token_ids)
    ids, cache, finite, pressed = _generated(generation, continuation, options.stream)
    facts = generation_report.report(
        generation, cache, request.config, request.prompt, ids, options.implementation
    ) | {
        "model": options.model,
        "dtype": inputs.model_dtype(options),
        "weights": "packed" if holds_packed(llama) else "dense",
        "activations": options.activations,
        "sampling": dataclasses.asdict(request.sampling) | {"seed": options.seed},
        "calibration": options.calibration,
        "saved_tokens": request.known,
        "drafts": options.draft,
        "steps": generation.steps,
        "mesh": None if request.placement is None else str(request.placement),
    }
    if options.json:
        text = None if request.tokenizer is None else continuation.text(ids)
        print_json("generate", facts | {"text": text, "prompt_ids": request.prompt, "tokens": ids})
    else:
        print(continuation.push(ids, last=True))
        print_line(generation_report.footer(facts, options.cache.text, in_words(llama)))
    advise_chat(options, request.tokenizer, request.saved, facts)
    check_finite([] if finite else [options.cache.text])
    if pressed:
        new = counted(options.max_new_tokens, "tokens")
        raise KeyboardInterrupt(f"the text has {len(ids)} of at most {new}")


def _checked(options: argparse.Namespace) -> GenerationRequest:
    """Check everything that needs no weights, and complete options.cache."""
    config, saved = one_cache.chosen(options)
    sampling = sampling_options.checked_sampling(options, sampling_options.model_sampling(config))
    if options.draft is not None and sampling.temperature:
        raise UserError(
            "--draft is for greedy decoding: give --temperature 0, and leave out --top-k, --top-p"
            " and --min-p"
        )
    if options.draft is not None and options.mesh is not None:
        raise UserError("--draft is for a cache on one device: leave out --mesh")
    tokenizer, known, prompt, capacity = _prompt(options, config, saved)
    placement = one_cache.checked_placement(options, config, capacity, saved)
    return GenerationRequest(config, tokenizer, prompt, known, capacity, sampling, saved, placement)


def _prompt(
    options: argparse.Namespace, config: LlamaConfig, saved: SavedPrompt | None
) -> tuple[Any, int, list[int], int]:
    """Return (tokenizer, tokens that --from holds, the whole prompt, capacity)."""
    if saved is None:
        tokenizer, prompt, _ = one_prompt.prompt_from_options(options, config)
        return tokenizer, 0, prompt, _capacity(options, config, len(prompt))
    tokenizer, known, prompt = one_prompt.read_question(options, config, saved)
    need = len(prompt) + options.max_new_tokens
    if need > saved.layout.capacity:
        new = counted(options.max_new_tokens, "new tokens")
        raise UserError(
            f"{len(prompt)} prompt + {new} are {need}, and the cache"
            f" in {options.saved!r} has room for {saved.layout.capacity}: give kvq prefill a"
            " --capacity, or --max-new-tokens here"
        )
    return tokenizer, known, prompt, saved.layout.capacity


def _capacity(options: argparse.Namespace, config: LlamaConfig, prompt: int) -> int:
    need = prompt + options.max_new_tokens
    if options.capacity is not None and options.capacity < need:
        new = counted(options.max_new_tokens, "new tokens")
        raise UserError(f"{prompt} prompt + {new} are {need}, over --capacity {options.capacity}")
    inputs.warn_beyond(need, config)
    if options.capacity is None:
        return inputs.rounded_capacity(need)
    return options.capacity


def _cache(
    options: argparse.Namespace, request: GenerationRequest
) -> tuple[Llama, Cache, jax.Array | None]:
    """Return (the model with the parameters that the cache needs, the cache, and the logits after
    the prompt if the cache holds all of it)."""
    saved = request.saved
    llama, new_cache = one_cache.loaded(options, request.capacity, request.placement, saved)
    cache = new_cache()
    if saved is None:
        return llama, cache, None
    if request.known < len(saved.prompt):
        cache = handover.shortened(llama, cache, request.known)
    whole = request.known == len(request.prompt)
    return llama, cache, jax.device_put(saved.logits) if whole else None


def advise_chat(
    options: argparse.Namespace, tokenizer: Any, saved: SavedPrompt | None, facts: dict[str, Any]
) -> None:
    """Name the option for a chat on stderr if a text outside of one had an empty answer."""
    opening = saved and saved.opening
    if options.chat or options.prompt_ids is not None or (opening and opening.chat):
        return
    ended_at_once = facts["new_tokens"] == 1 and facts["finish"] == "ended"
    advice = "give kvq prefill --chat" if saved else "try --chat"
    text_input.advise_chat(tokenizer, advice, ended_at_once=ended_at_once)


def _generated(
    generation: TimedGeneration, continuation: Continuation, show: bool
) -> tuple[list[int], Cache, bool, bool]:
    """Return (new token ids, the cache after them, whether all logits were finite, whether Ctrl-C
    ended it). With `show`, print text as it comes."""
    segments = (
        generation.segments(STREAM_STEPS) if show else generation.segments(1, SEGMENT_SECONDS)
    )
    so_far = first = next(segments)  # before it there is no text that a press could lose
    with interruption.noted() as pressed:
        for so_far in itertools.chain([first], segments):
            if show:
                print(continuation.push(so_far.rows()[0]), end="", flush=True)
            if pressed():
                break
        finite = bool(np.asarray(so_far.finite)[0])
        return so_far.rows()[0], so_far.cache, finite, pressed()

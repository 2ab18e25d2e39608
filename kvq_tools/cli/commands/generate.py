"""`kvq generate`: continue a prompt through a cache, and report what was done."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

import jax
import numpy as np

import kvq_jax as kvq
from kvq_jax.attention.dispatch import Implementation
from kvq_jax.cache.cache import Cache
from kvq_models.inference import decoding
from kvq_models.inference.generation import STREAM_STEPS
from kvq_models.inference.method_parameters import prepare
from kvq_models.inference.sampling import Sampling
from kvq_models.llama.checkpoint import load_llama
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import Llama
from kvq_tools.cli import (
    batch,
    device_memory,
    engines,
    handover,
    inputs,
    mesh,
    sampling_options,
    text_input,
)
from kvq_tools.cli.console import (
    UserError,
    bar,
    check_finite,
    format_bytes,
    input_errors,
    print_json,
    progress,
)
from kvq_tools.cli.continuation import Continuation
from kvq_tools.cli.handover import SavedPrompt
from kvq_tools.cli.one_prompt import add_prompt, read_prompt
from kvq_tools.cli.tables import print_line
from kvq_tools.cli.timed import TimedGeneration

CAPACITY_STEP = 64

DESCRIPTION = """\
Continues a prompt with a Llama-family checkpoint whose keys and values go
through the cache SPEC, prints the text, and ends with one line about what was
done: the cache and its bytes, the bytes of a bf16 cache, tokens, times
(compilation apart) and speed. Decoding is greedy unless you give --temperature,
--top-k, --top-p or --min-p."""

EPILOG = f"""\
examples:
  kvq generate embedded --prompt "It was a bright" --cache kivi:bits=2 \\
      --max-new-tokens 60 --stream
  kvq generate path/to/Llama-3.2-1B-Instruct --chat --temperature 0.7 \\
      --top-p 0.9 --prompt "Name three rivers." --cache innerq:bits=2
  kvq generate embedded --prompts prompts.jsonl --out answers.jsonl \\
      --cache kivi:bits=4 --memory 1GiB
  kvq generate smollm2 --from report.safetensors --stream
  kvq generate path/to/Llama-3.1-8B --prompt-file book.txt \\
      --cache kivi:bits=2 --mesh heads=4,tokens=2
  kvq generate path/without/tokenizer --prompt-ids 1,306,763 --json

With --prompts, each line of the file is a quoted text or an object:
  {{"prompt": TEXT}}
  {{"prompt_ids": [1, 2]}}
  {{"messages": [{{"role": "user", "content": TEXT}}]}}
An object may also have "id" (default: the line's number), "max_new_tokens",
"temperature", "top_k", "top_p", "min_p" and "seed". Answers are written as they
come. Run the command again to continue where it stopped.

{inputs.CACHE_GRAMMAR}"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    inputs.add_model(parser)
    prompt = add_prompt(parser, required=False)
    prompt.add_argument(
        "--prompts",
        metavar="F",
        help="a file with one prompt per line, as JSON; several are generated at a time",
    )
    parser.add_argument(
        "--out",
        metavar="F",
        help=(
            "the file for the answers to --prompts, one per line; prompts that it already "
            "answers are skipped"
        ),
    )
    parser.add_argument(
        "--from",
        dest="handed",
        metavar="F",
        help=(
            "continue from a file of `kvq prefill`; a prompt, if given, must be the one in the file"
        ),
    )
    parser.add_argument(
        "--cache",
        metavar="SPEC",
        type=inputs.cache_spec,
        help="the cache (default: dense; with --from, the one in the file)",
    )
    inputs.add_calibration(parser)
    sampling_options.add_sampling(parser, max_new_tokens=128)
    parser.add_argument(
        "--capacity",
        metavar="S",
        type=inputs.positive,
        help=(
            "tokens that the cache can hold (default: prompt and new tokens, rounded up to a "
            "multiple of 64)"
        ),
    )
    engines.add_size(parser, capacity=False)
    mesh.add(parser)
    parser.add_argument("--stream", action="store_true", help="print text as it comes")
    parser.add_argument(
        "--draft",
        metavar="N",
        type=inputs.positive,
        help=(
            "prompt-lookup decoding: draft up to N tokens per step from earlier text; output "
            "is unchanged (default: none)"
        ),
    )


@dataclasses.dataclass(frozen=True)
class GenerationRequest:
    """A checked request. Of the user's input, only the weights can still be wrong."""

    config: LlamaConfig
    tokenizer: Any
    prompt: list[int]
    capacity: int
    sampling: Sampling
    handed: SavedPrompt | None
    placement: kvq.Placement | None


def run(options: argparse.Namespace) -> None:
    _check_which(options)
    options.cache = options.cache or (kvq.parse("dense") if options.handed is None else None)
    if options.prompts is not None:
        batch.run(options)
        return
    request = _checked(options)
    with progress(f"loading {options.model}"), input_errors():
        llama, _ = load_llama(
            options.model, dtype=inputs.model_dtype(options), mesh=request.placement
        )
    llama, cache, logits = _cache(options, request, llama)
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
            logits=logits,
            drafts=options.draft or 0,
        )
    continuation = Continuation(request.tokenizer, request.prompt, llama.config.eos_token_ids)
    streams = options.stream and not options.json
    ids, cache, finite = _generated(
        generation, continuation, STREAM_STEPS if streams else options.max_new_tokens, streams
    )
    done = _report(generation, cache, request, ids, options.implementation) | {
        "model": options.model,
        "dtype": inputs.model_dtype(options),
        "sampling": dataclasses.asdict(request.sampling) | {"seed": options.seed},
        "calibration": options.calibration,
        "drafts": options.draft,
        "steps": generation.steps,
        "mesh": None if request.placement is None else str(request.placement),
    }
    if options.json:
        text = None if request.tokenizer is None else continuation.text(ids)
        print_json("generate", done | {"text": text, "prompt_ids": request.prompt, "tokens": ids})
    else:
        print(continuation.push(ids, last=True))
        print_line(footer(done))
    check_finite([] if finite else [str(cache.spec)])


def _check_which(options: argparse.Namespace) -> None:
    """Refuse options for many prompts with one prompt, and the other way round."""
    many, given = (
        options.prompts is not None,
        {
            name: getattr(options, name)
            for name in ("out", "slots", "memory", "stream", "mesh", "draft")
        },
    )
    for name in ("stream", "mesh", "draft") if many else ("out", "slots", "memory"):
        if given[name]:
            raise UserError(
                f"--{name} is for {'one prompt' if many else 'many prompts: give --prompts'}"
            )
    given_prompt = [options.prompt, options.prompt_file, options.prompt_ids]
    if not many and options.handed is None and not any(one is not None for one in given_prompt):
        raise UserError(
            "one of the arguments --prompt --prompt-file --prompt-ids --prompts --from is required"
        )
    if many and options.handed is not None:
        raise UserError("--from is for one prompt, the one in the file")
    if options.handed is not None and options.chat and options.prompt is options.prompt_file:
        raise UserError("--chat is for a prompt, and --from has tokens")
    if options.handed is not None and options.mesh is not None:
        raise UserError(
            "--mesh is for a prompt that is read here: the cache of --from is one device's"
        )
    if options.handed is not None and options.capacity is not None:
        raise UserError("--from takes the capacity of the file; give --capacity to kvq prefill")
    if many and options.out is None:
        raise UserError("--prompts needs --out, the file that the answers go to")


def _checked(options: argparse.Namespace) -> GenerationRequest:
    """Check everything that needs no weights."""
    sampling = sampling_options.checked_sampling(options)
    if options.draft is not None and sampling.temperature:
        raise UserError(
            "--draft is for greedy decoding: leave --temperature, --top-k, --top-p and --min-p out"
        )
    if options.draft is not None and options.mesh is not None:
        raise UserError("--draft is for a cache on one device: leave --mesh out")
    config = inputs.read_config(options.model, *filter(None, [options.cache]))
    handed = None if options.handed is None else handover.described(options.handed, config)
    if handed is not None:
        if options.cache not in (None, handed.layout.spec):
            raise UserError(
                f"{options.handed!r} holds the cache {str(handed.layout.spec)!r}, and --cache is"
                f" {str(options.cache)!r}"
            )
        options.cache = handed.layout.spec
    inputs.calibrations(
        config, [options.cache], [options.calibration] if options.calibration else []
    )
    tokenizer, prompt, capacity = _prompt(options, config, handed)
    rows = inputs.rows_dtype(options)
    placement = mesh.placement_of(options.mesh, [options.cache], config, 1, capacity, rows)
    request = GenerationRequest(config, tokenizer, prompt, capacity, sampling, handed, placement)
    layout = (
        handed.layout if handed else kvq.layout(options.cache, config, 1, capacity, rows, placement)
    )
    device_memory.check_memory(layout)
    with input_errors():
        decoding.implementations(layout, options.implementation)
    return request


def _prompt(
    options: argparse.Namespace, config: LlamaConfig, handed: SavedPrompt | None
) -> tuple[Any, list[int], int]:
    """Return (tokenizer, prompt, capacity)."""
    if handed is not None and all(
        option is None for option in (options.prompt, options.prompt_file, options.prompt_ids)
    ):
        tokenizer, prompt = text_input.load_tokenizer(options.model), handed.prompt
    else:
        tokenizer, prompt = read_prompt(options, config)
    if handed is None:
        return tokenizer, prompt, _capacity(options, config, len(prompt))
    handover.check_same(handed, prompt)
    need = len(prompt) + options.max_new_tokens
    if need > handed.layout.capacity:
        raise UserError(
            f"{len(prompt)} prompt + {options.max_new_tokens} new tokens are {need}, and the cache"
            f" in {options.handed!r} has room for {handed.layout.capacity}: give kvq prefill a"
            " --capacity, or --max-new-tokens here"
        )
    return tokenizer, prompt, handed.layout.capacity


def _cache(
    options: argparse.Namespace, request: GenerationRequest, llama: Llama
) -> tuple[Llama, Cache, jax.Array | None]:
    """Return (the model with the parameters that the cache needs, the cache, and the logits after
    the prompt if the cache holds it)."""
    handed = request.handed
    model_fingerprint = "" if handed is None else kvq.fingerprint(llama)
    with input_errors():
        llama = prepare(llama, options.cache, options.calibration, progress=bar)
        if handed is None:
            rows = inputs.rows_dtype(options)
            return (
                llama,
                device_memory.new_cache(
                    options.cache, llama.config, request.capacity, rows, request.placement
                ),
                None,
            )
    return (
        llama,
        handover.load(handed, llama, model_fingerprint, request.config),
        jax.device_put(handed.logits),
    )


def _capacity(options: argparse.Namespace, config: LlamaConfig, prompt: int) -> int:
    need = prompt + options.max_new_tokens
    if options.capacity is not None and options.capacity < need:
        raise UserError(
            f"{prompt} prompt + {options.max_new_tokens} new tokens are {need}, over --capacity"
            f" {options.capacity}"
        )
    inputs.warn_beyond(need, config)
    if options.capacity is None:
        return min(inputs.round_up(need, CAPACITY_STEP), config.sliding_window or sys.maxsize)
    with input_errors():
        config.check_window(options.capacity)
    return options.capacity


def _generated(
    generation: TimedGeneration, continuation: Continuation, steps: int, show: bool
) -> tuple[list[int], Cache, bool]:
    """Return (new token ids, the cache after them, whether all logits were finite). With `show`,
    print text as it comes."""
    ids: list[int] = []
    cache, finite = None, True
    for so_far in generation.segments(steps):
        ids, cache = np.asarray(so_far.tokens)[0, : int(so_far.lengths[0])].tolist(), so_far.cache
        finite = bool(so_far.finite[0])
        if show:
            print(continuation.push(ids), end="", flush=True)
    assert cache is not None, "max_new_tokens is at least 1"
    return ids, cache, finite


def _report(
    generation: TimedGeneration,
    cache: Cache,
    request: GenerationRequest,
    ids: list[int],
    implementation: Implementation,
) -> dict[str, Any]:
    """Return what was really done, read from the cache after the run."""
    stored, dense = kvq.nbytes(cache), kvq.dense_nbytes(request.config, 1, cache.capacity)
    dropped, kept = kvq.dropped_outliers(cache)
    read_by = decoding.implementations(cache, implementation)
    obstacles = [
        reason
        for reason, name in zip(decoding.obstacles(cache), read_by, strict=True)
        if name == "xla"
    ]
    return {
        "cache": str(cache.spec),
        "capacity": cache.capacity,
        "cache_bytes": stored,
        "bf16_bytes": dense,
        "ratio": dense / stored,
        "windows": {name: getattr(cache.spec, name) for name in ("sink", "recent", "block")},
        "bits_per_element": kvq.bits_per_element(
            cache.spec, request.config, cache.capacity, cache.dtype
        ),
        "quantized_tokens": kvq.quantized_tokens(cache, int(cache.lengths[0])),
        "outliers": {"exact": kept, "without_slot": dropped},
        "prompt_tokens": len(request.prompt),
        "new_tokens": len(ids),
        "finish": "ended" if ids[-1] in request.config.eos_token_ids else "max-new-tokens",
        "rows_dtype": cache.dtype,
        "prefill_seconds": generation.prefill_seconds,
        "decode_seconds": generation.decode_seconds,
        "compile_seconds": generation.compile_seconds,
        "tokens_per_second": len(ids) / generation.decode_seconds,
        "implementation": "+".join(sorted(set(read_by))),
        "xla_because": (
            None
            if implementation == "xla"
            else "; ".join(dict.fromkeys(filter(None, obstacles))) or None
        ),
        "skip_layers": list(cache.spec.skip_layers),
    }


_END = {"ended": ", the last one the end token", "max-new-tokens": ""}


def _sampled(sampling: dict[str, Any]) -> str:
    rule = Sampling(**{name: value for name, value in sampling.items() if name != "seed"})
    return sampling_options.sampling_in_words(rule) + (
        f", seed {sampling['seed']}" if rule.temperature else ""
    )


def footer(done: dict[str, Any]) -> str:
    """Return the report as one line."""
    live, outliers = done["prompt_tokens"] + done["new_tokens"], done["outliers"]
    sparse = (
        f"{outliers['exact']} outliers in full precision, {outliers['without_slot']} more had no"
        " slot; "
        if any(outliers.values())
        else ""
    )
    split = f" on a mesh of {done['mesh']}" if done["mesh"] else ""
    drafted = (
        f" in {done['steps']} steps with drafts of up to {done['drafts']}" if done["drafts"] else ""
    )
    because = f" (no kernel: {done['xla_because']})" if done["xla_because"] else ""
    return (
        f"[cache {done['cache']}: {format_bytes(done['cache_bytes'])} for {done['capacity']}"
        f" tokens, bf16 {format_bytes(done['bf16_bytes'])}, ratio {done['ratio']:.2f},"
        f" {done['bits_per_element']:.2f} bits per element; {done['quantized_tokens']} of {live}"
        f" tokens quantized; {sparse}{done['prompt_tokens']} prompt + {done['new_tokens']} new"
        f" tokens{drafted}{_END[done['finish']]}; {_sampled(done['sampling'])}; weights"
        f" {done['dtype']}, full-precision rows {done['rows_dtype']}; prefill"
        f" {done['prefill_seconds']:.3f} s, decode {done['decode_seconds']:.3f} s,"
        f" {done['tokens_per_second']:.1f} tokens/s (compilation, {done['compile_seconds']:.1f} s,"
        f" not counted); implementation {done['implementation']}{because}{split}; layers skipped:"
        f" {', '.join(map(str, done['skip_layers'])) or 'none'}]"
    )

"""Run many prompts of a file through one engine. Answers are written as they come, and an
interrupted run continues where it stopped."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from kvq_jax.files.json_text import parse_json
from kvq_models.calibration.fingerprint import partial_fingerprint_of
from kvq_models.inference.engine.engine import Engine
from kvq_models.inference.engine.engine_size import EngineSize
from kvq_models.inference.engine.requests import Ended, Request, Token
from kvq_models.inference.sampling import Sampling
from kvq_models.llama import checkpoint
from kvq_models.llama.config import LlamaConfig
from kvq_tools import chat_template, json_lines
from kvq_tools.cli import (
    answers_file,
    console,
    engines,
    inputs,
    interruption,
    sampling_options,
    text_input,
)
from kvq_tools.cli.continuation import Continuation
from kvq_tools.cli.tables import print_line

QUEUE = 64  # requests that wait for a slot
SETTINGS = {
    "temperature": (int, float),
    "top_k": int,
    "top_p": (int, float),
    "min_p": (int, float),
    "max_new_tokens": int,
    "seed": int,
}
PROMPTS = ("prompt", "prompt_ids", "messages")
_FINISH = {"ended": "ended", "length": "max-new-tokens", "not-finite": "not-finite"}


@dataclasses.dataclass(frozen=True)
class PromptLine:
    """A line of the file. `key` is a digest of the request and of everything else that decides its
    answer. `plain` says that the prompt is a text outside of the chat template."""

    id: str | int
    key: str
    request: Request
    plain: bool


@dataclasses.dataclass
class Tally:
    """Counts over the answers of a run. `ended_at_once`: True if any answer to a plain prompt was
    an end token alone."""

    answers: int = 0
    new_tokens: int = 0
    not_finite: int = 0
    ended_at_once: bool = False
    seconds: float = 0.0

    def add(self, item: PromptLine, ids: list[int], reason: str) -> None:
        """Count an answer."""
        self.answers += 1
        self.new_tokens += len(ids)
        self.not_finite += reason == "not-finite"
        self.ended_at_once |= item.plain and len(ids) == 1 and reason == "ended"


def run(options: argparse.Namespace) -> None:
    """Answer the prompts of --prompts that --out does not have yet."""
    out_file = inputs.output_file(options)
    config = inputs.read_config(options.model, options.cache)
    inputs.check_calibration_option(options, config)
    tokenizer = text_input.load_tokenizer(options.model)
    items = read_items(options, config, tokenizer)
    size: EngineSize | None = None
    tally = Tally()
    with answers_file.opened(out_file) as (before, out):
        pending = _pending(options.out, items, before)
        if pending:
            size = _engine_size(options, config, pending)
            engine = _compiled_engine(options, size, pending)
            _answer(engine, pending, out, tokenizer, config, tally)
    result = _result(options, len(items), len(pending), size, tally)
    if options.json:
        console.print_json("batch", result)
    else:
        print_line(_in_words(result, options.cache.text))
    advice = "try --chat and another --out"
    text_input.advise_chat(tokenizer, advice, ended_at_once=tally.ended_at_once)
    count = tally.not_finite
    console.check_finite([f"{options.cache.text} ({count} answers)"] if count else [])


def _engine_size(
    options: argparse.Namespace, config: LlamaConfig, pending: list[PromptLine]
) -> EngineSize:
    """Return the size of an engine that can hold each prompt with its answer."""
    need = max(len(item.request.prompt) + item.request.max_new_tokens for item in pending)
    size = engines.size_of(options, config, inputs.rounded_capacity(need))
    if need > size.capacity:
        raise console.UserError(
            f"the longest prompt and its new tokens are {need} tokens, and the capacity is"
            f" {size.capacity}"
        )
    inputs.warn_beyond(need, config)
    return size


def _compiled_engine(
    options: argparse.Namespace, size: EngineSize, pending: list[PromptLine]
) -> Engine:
    longest = max(len(item.request.prompt) for item in pending)
    engine = engines.loaded(options, size, QUEUE, longest=longest)
    with console.progress("compiling"):
        engine.warm_up()
    return engine


def _answer(
    engine: Engine,
    pending: list[PromptLine],
    out: BinaryIO,
    tokenizer: Any,
    config: LlamaConfig,
    tally: Tally,
) -> None:
    """Answer the prompts, write each answer once it ends, and count them."""
    started = time.monotonic()
    with interruption.advised("run the same command again to continue"):
        shown = console.bar(pending, "generating answers")
        for _, (item, ids, reason) in zip(shown, answered(engine, pending), strict=True):
            if not tally.answers:
                out.truncate()  # an answer that was cut, after those that are whole
            text = None
            if tokenizer is not None:
                prompt, ends = list(item.request.prompt), config.eos_token_ids
                text = Continuation(tokenizer, prompt, ends).text(ids)
            _write(out, item, ids, reason, text)
            tally.add(item, ids, reason)
    tally.seconds = time.monotonic() - started


def _result(
    options: argparse.Namespace, prompts: int, answers: int, size: EngineSize | None, tally: Tally
) -> dict[str, Any]:
    """Return what --json prints about a run that answered some of the prompts."""
    speed = tally.new_tokens / tally.seconds if tally.new_tokens else None
    return {
        "model": options.model,
        "cache": str(options.cache.spec),
        "prompts": prompts,
        "answered_before": prompts - answers,
        "answered": answers,
        "new_tokens": tally.new_tokens,
        "seconds": tally.seconds,
        "tokens_per_second": speed,
        "slots": size.slots if size else None,
        "capacity": size.capacity if size else None,
        "cache_bytes": size.cache_bytes if size else None,
        "out": options.out,
    }


def answered(
    engine: Engine, items: list[PromptLine]
) -> Iterator[tuple[PromptLine, list[int], str]]:
    """Yield (item, its tokens, why it ended) as answers end."""
    waiting = list(reversed(items))
    running: dict[int, PromptLine] = {}
    drawn: dict[int, list[int]] = {}
    while waiting or not engine.idle:
        while waiting and engine.waiting < engine.queue_limit:
            item = waiting.pop()
            ticket = engine.submit(item.request)
            running[ticket], drawn[ticket] = item, []
        for event in engine.advance():
            if isinstance(event, Token):
                drawn[event.ticket].append(event.token)
            elif isinstance(event, Ended):
                yield running.pop(event.ticket), drawn.pop(event.ticket), event.reason


def read_items(
    options: argparse.Namespace, config: LlamaConfig, tokenizer: Any
) -> list[PromptLine]:
    """Read and check every line before any work is done. UserError names the line."""
    base = sampling_options.checked_sampling(options, sampling_options.model_sampling(config))
    lines: list[tuple[str | int, Request, bool]] = []
    for number, line in enumerate(text_input.read_text(options.prompts).split("\n"), start=1):
        if not line.strip():
            continue
        default_id = number - 1  # lines count from 0 in ids, from 1 in messages
        try:
            fields = parse_json(line)
            if isinstance(fields, str):
                fields = {"prompt": fields}
            request = _request(fields, options, config, tokenizer, base)
            need = len(request.prompt) + request.max_new_tokens
            request.check(config.vocab_size, options.capacity or max(need, 1))
            prompt_id = fields.get("id", default_id)
            if not isinstance(prompt_id, str | int) or isinstance(prompt_id, bool):
                raise ValueError(f"id must be a text or an integer, got {prompt_id!r}")
            text_input.check_text(str(prompt_id), "the id")
        except json.JSONDecodeError as error:
            raise console.UserError(
                f"{options.prompts}, line {number}: write a text in quotes or an object, as JSON"
                f" ({error})"
            ) from error
        except (console.UserError, ValueError) as error:
            raise console.UserError(f"{options.prompts}, line {number}: {error}") from error
        if "seed" not in fields:  # which asks for the numbers that one prompt gets
            request = dataclasses.replace(request, choice=_stream(prompt_id))
        lines.append((prompt_id, request, not options.chat and "prompt" in fields))
    if not lines:
        raise console.UserError(f"{options.prompts!r} has no prompts; write one on each line")
    ((prompt_id, count),) = Counter(name for name, *_ in lines).most_common(1)
    if count > 1:
        raise console.UserError(
            f"{options.prompts!r} has {count} prompts with the id {prompt_id!r}"
        )
    settings = _settings(options)
    return [
        PromptLine(name, _digest([settings, dataclasses.astuple(request)])[:16], request, plain)
        for name, request, plain in lines
    ]


def _stream(prompt_id: str | int) -> int:
    """Return the stream of random numbers of a prompt, which no other line decides."""
    return int(_digest(prompt_id)[:8], 16) >> 1  # an int32


def _settings(options: argparse.Namespace) -> list[Any]:
    """Return what decides an answer besides its request. A model's place does not: its weights
    do."""
    with console.input_errors():
        stored = checkpoint.open_checkpoint(options.model)
        weights = partial_fingerprint_of(stored)
        calibration = Path(options.calibration).read_bytes() if options.calibration else b""
    return [
        weights,
        options.weights,
        options.implementation,
        options.activations,
        str(options.cache.spec),
        inputs.model_dtype(options),
        inputs.rows_dtype(options),
        hashlib.sha256(calibration).hexdigest(),
    ]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _request(
    fields: Any, options: argparse.Namespace, config: LlamaConfig, tokenizer: Any, base: Sampling
) -> Request:
    if not isinstance(fields, dict):
        raise ValueError("a line is a text in quotes or an object")
    unknown = sorted(set(fields) - {"id", *PROMPTS, *SETTINGS})
    if unknown:
        raise ValueError(
            f"unknown key {unknown[0]!r}; there are id, {', '.join((*PROMPTS, *SETTINGS))}"
        )
    kinds = [name for name in PROMPTS if name in fields]
    if len(kinds) != 1:
        raise ValueError(f"give one of {', '.join(PROMPTS)}")
    for name, kind in SETTINGS.items():
        if name in fields and (
            not isinstance(fields[name], kind) or isinstance(fields[name], bool)
        ):
            raise ValueError(
                f"{name} must be {'an integer' if kind is int else 'a number'}, got"
                f" {fields[name]!r}"
            )
    rules = ("temperature", "top_k", "top_p", "min_p")
    rule = dataclasses.replace(base, **{name: fields[name] for name in rules if name in fields})
    new = fields.get("max_new_tokens", options.max_new_tokens)
    if new < 1:
        raise ValueError(f"max_new_tokens={new} must be at least 1")
    prompt = _prompt(kinds[0], fields[kinds[0]], options.chat, tokenizer)
    seed, ends = fields.get("seed", options.seed), config.eos_token_ids
    return Request(prompt, new, rule, seed, end_ids=ends, logprobs=False)


def _prompt(kind: str, value: Any, chat: bool, tokenizer: Any) -> tuple[int, ...]:
    if kind == "prompt_ids":
        if not isinstance(value, list) or not all(
            isinstance(token, int) and not isinstance(token, bool) for token in value
        ):
            raise ValueError("prompt_ids must be a list of integers")
        return tuple(value)
    if tokenizer is None:
        raise ValueError("the model has no tokenizer; give prompt_ids")
    if kind == "prompt":
        if not isinstance(value, str):
            raise ValueError(f"prompt must be a text, got {value!r}")
        text_input.check_not_empty(value)
        return tuple(text_input.encode(tokenizer, value, chat=chat))
    texts = isinstance(value, list) and all(
        isinstance(message, dict)
        and set(message) == {"role", "content"}
        and all(isinstance(text, str) for text in message.values())
        for message in value
    )
    if not texts or not value:
        raise ValueError("messages must be a list of objects with role and content, both texts")
    return tuple(chat_template.encoded(tokenizer, text_input.render_chat(tokenizer, value)))


def _pending(path: str, items: list[PromptLine], before: dict[str | int, str]) -> list[PromptLine]:
    for item in items:
        if before.get(item.id, item.key) != item.key:
            raise console.UserError(
                f"{path!r} has an answer with the id {item.id!r} to another prompt, or of other"
                " settings; name another file"
            )
    return [item for item in items if item.id not in before]


def _write(out: BinaryIO, item: PromptLine, ids: list[int], reason: str, text: str | None) -> None:
    answer = {
        "id": item.id,
        "key": item.key,
        "text": text,
        "tokens": ids,
        "finish": _FINISH[reason],
        "prompt_tokens": len(item.request.prompt),
        "new_tokens": len(ids),
    }
    with console.input_errors():
        json_lines.append(out, answer)


def _in_words(result: dict[str, Any], cache: str) -> str:
    before = f", {result['answered_before']} were there" if result["answered_before"] else ""
    if not result["answered"]:
        return f"[{console.counted(result['prompts'], 'prompts')}{before}; nothing to do]"
    return (
        f"[{result['answered']} of {result['prompts']} prompts answered{before};"
        f" {console.counted(result['new_tokens'], 'new tokens')} in"
        f" {result['seconds']:.1f} s, {result['tokens_per_second'] or 0:.1f} tokens/s;"
        f" {console.counted(result['slots'], 'slots')} of {result['capacity']} tokens"
        f" with {cache}, {console.format_bytes(result['cache_bytes'])}; {result['out']}]"
    )

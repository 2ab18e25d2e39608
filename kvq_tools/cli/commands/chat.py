"""`kvq chat`: a conversation in the terminal, on one cache."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import sys
from collections.abc import Iterator
from typing import Any

import kvq_jax as kvq
from kvq_tools.cli import console, inputs, interruption, one_cache, sampling_options, text_input
from kvq_tools.cli.continuation import Continuation
from kvq_tools.cli.conversation import AnswerSettings, Conversation
from kvq_tools.cli.handover import SavedPrompt
from kvq_tools.cli.options.chat import COMMANDS, MAX_DEFAULT_CAPACITY
from kvq_tools.cli.tables import print_line

PROMPT = "> "
QUIT, HELP, RESET = "/quit", "/help", "/reset"


def run(options: argparse.Namespace) -> None:
    settings, tokenizer, capacity, placement, saved = _checked(options)
    llama, new_cache = one_cache.loaded(options, capacity, placement, saved)
    conversation = Conversation(llama, tokenizer, new_cache, settings, options.system, saved)
    terminal = sys.stdin.isatty()
    turns: list[dict[str, Any]] = []
    if terminal:
        console.note(f"{options.model} with cache {options.cache.text}; /help lists the commands")
    with _printed_at_the_end(options, capacity, turns):
        for line in _lines(terminal):
            try:
                command = line.strip()
                if command == QUIT:
                    break
                if command == HELP:
                    print(COMMANDS, file=sys.stderr)
                elif command == RESET:
                    conversation.reset()
                    console.note("a new conversation")
                elif terminal and _mistyped(command):
                    console.note(f"{command} is not a command; {HELP} lists them")
                elif command:
                    cache = None if options.json else options.cache.text
                    said = line[1:] if line.startswith("//") else line
                    turns.append(_turn(conversation, tokenizer, said, cache))
            except console.UserError as error:
                if not terminal:
                    raise
                console.note(str(error))
    console.check_finite([] if conversation.finite else [options.cache.text])


@contextlib.contextmanager
def _printed_at_the_end(
    options: argparse.Namespace, capacity: int, turns: list[dict[str, Any]]
) -> Iterator[None]:
    """Print the object of --json at the end of the chat. If an error or Ctrl-C ends it, the object
    has the turns that were complete by then, if there are any."""
    result = {
        "model": options.model,
        "cache": str(options.cache.spec),
        "capacity": capacity,
        "turns": turns,
    }
    try:
        yield
    except (console.UserError, KeyboardInterrupt):
        if options.json and turns:
            console.print_json("chat", result)
        raise
    if options.json:
        console.print_json("chat", result)


def _checked(
    options: argparse.Namespace,
) -> tuple[AnswerSettings, Any, int, kvq.Placement | None, SavedPrompt | None]:
    """Check everything that needs no weights, and complete options.cache. Returns (settings,
    tokenizer, capacity, placement, the file of --from)."""
    text_input.check_stdin()
    config, saved = one_cache.chosen(options)
    sampling = sampling_options.checked_sampling(options, sampling_options.model_sampling(config))
    tokenizer = text_input.need_tokenizer(options.model, "read messages")
    opening = [] if options.system is None else [{"role": "system", "content": options.system}]
    text_input.render_chat(tokenizer, [*opening, {"role": "user", "content": "Hello"}])
    if saved is None:
        capacity = options.capacity or min(MAX_DEFAULT_CAPACITY, config.positions)
        inputs.warn_beyond(capacity, config)
    else:
        _check_saved(options, saved)
        capacity = saved.layout.capacity
    placement = one_cache.checked_placement(options, config, capacity, saved)
    settings = AnswerSettings(
        options.max_new_tokens, sampling, options.seed, options.implementation
    )
    return settings, tokenizer, capacity, placement, saved


def _check_saved(options: argparse.Namespace, saved: SavedPrompt) -> None:
    """Raise UserError for options that the file of --from has decided."""
    for name in ("capacity", "mesh"):
        if getattr(options, name) is not None:
            raise console.UserError(
                f"leave out --{name}: kvq prefill has already made the cache of --from"
            )
    if saved.opening is None:
        raise console.UserError(
            f"{saved.path!r} holds token ids without their text: give kvq prefill a text to chat"
            " about it"
        )
    if saved.opening.chat and options.system is not None:
        raise console.UserError(
            f"leave out --system: {saved.path!r} holds the beginning of the chat"
        )


def _lines(terminal: bool) -> Iterator[str]:
    """Yield the lines that the user types, or those of a pipe, until the end."""
    if terminal:
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # input() then has a history and can be edited
    elif isinstance(sys.stdin, io.TextIOWrapper):
        # as the prompts of other commands, whatever the locale
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="strict")
    while True:
        try:
            line = _typed() if terminal else sys.stdin.readline()
        except EOFError:
            line = ""
        except KeyboardInterrupt:
            if not terminal:
                raise
            interruption.caught()
            print("\nkvq: /quit or Ctrl-D leaves", file=sys.stderr)
            continue
        except UnicodeDecodeError as error:
            raise console.UserError(
                f"the input is not UTF-8 text; convert it to UTF-8: {error}"
            ) from error
        except OSError as error:
            if terminal:
                raise
            raise text_input.unreadable_stdin(error) from error
        if not line:
            return
        yield line.rstrip("\r\n")


def _typed() -> str:
    """Return a line from the terminal. The prompt before it never becomes part of the output."""
    if sys.stdout.isatty():
        return input(PROMPT) + "\n"
    print(PROMPT, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline()


def _mistyped(line: str) -> bool:
    """Return True if a typed line looks like a command: one word after a single slash."""
    return line.startswith("/") and not line.startswith("//") and len(line.split()) == 1


def _turn(
    conversation: Conversation, tokenizer: Any, message: str, cache: str | None
) -> dict[str, Any]:
    """Answer a message. Unless `cache`, the cache as the user typed it, is None, print the answer
    as it comes, and then the line about the cache."""
    turn = conversation.turn(message)
    again = len(conversation.ids) - turn.kept
    if again and conversation.begun:
        console.warn(
            "the chat template rewrites earlier turns: the cache drops"
            f" {console.counted(again, 'tokens')} at its end and reads the new text"
        )
    continuation = Continuation(
        tokenizer, [*conversation.ids[: turn.kept], *turn.tokens], conversation.end_ids
    )
    ids: list[int] = []
    with interruption.noted() as stopped:
        if conversation.needs_compiling(turn):
            with console.progress("compiling"):
                conversation.prepare(turn)
        for ids in conversation.answer(turn, stopped):
            if cache is not None:
                print(continuation.push(ids), end="", flush=True)
    contents = contents_of(conversation)
    if cache is not None:
        print(continuation.push(ids, last=True))
        print_line(cache_line(contents, cache) + _NOTES[conversation.finish])
    return {
        "user": message,
        "answer": conversation.messages[-1]["content"],
        "prefilled_tokens": len(turn.tokens),
        "new_tokens": len(ids),
        "finish": conversation.finish,
        "holds": contents,
    }


_NOTES = {
    "ended": "",
    "max-new-tokens": " (the answer stopped at --max-new-tokens)",
    "full": " (the cache is full: /reset starts a new conversation)",
    "stopped": " (stopped)",
}


def contents_of(conversation: Conversation) -> dict[str, Any]:
    """Return the contents of the cache: its tokens, and the bytes that this cache and a bf16 cache
    need for them."""
    cache, tokens = conversation.cache, int(conversation.cache.lengths[0])
    exact = kvq.cache.layout(cache.spec, cache.dims, 1, max(tokens, 1), cache.dtype)
    quantized = kvq.size.quantized_tokens(cache, tokens)
    return {
        "cache": str(cache.spec),
        "tokens": tokens,
        "capacity": cache.capacity,
        "quantized_tokens": quantized,
        "full_precision_tokens": tokens - quantized,
        "bytes": kvq.size.nbytes(exact),
        "bf16_bytes": kvq.size.dense_nbytes(cache.dims, 1, max(tokens, 1)),
        "reserved_bytes": kvq.size.nbytes(cache),
    }


def cache_line(contents: dict[str, Any], cache: str) -> str:
    """Return the contents of the cache as one line."""
    size, dense = (console.format_bytes(contents[key]) for key in ("bytes", "bf16_bytes"))
    return (
        f"[cache {cache}: {contents['tokens']} of {contents['capacity']} tokens,"
        f" {contents['full_precision_tokens']} in full precision,"
        f" {contents['quantized_tokens']} quantized; {size}, in bf16 {dense}, ratio"
        f" {contents['bf16_bytes'] / contents['bytes']:.2f}]"
    )

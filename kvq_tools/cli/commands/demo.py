"""`kvq demo`: compare several caches on a small model, in about a minute."""

from __future__ import annotations

import argparse
import dataclasses
import os
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import numpy as np

import kvq_jax as kvq
from kvq_models.inference import decoding
from kvq_models.inference.sampling import Sampling
from kvq_models.llama.checkpoint import load_llama
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import Llama
from kvq_tools.cli import cache_sizes, console, inputs, layer_times, text_input
from kvq_tools.cli.continuation import Continuation
from kvq_tools.cli.model_loading import prepared
from kvq_tools.cli.options.demo import CACHES
from kvq_tools.cli.planned import NamedCache
from kvq_tools.cli.tables import number, print_table
from kvq_tools.cli.timed import TimedGeneration
from kvq_tools.evaluation.defaults import CACHE_DTYPE
from kvq_tools.evaluation.results import exp, finite
from kvq_tools.evaluation.text import passage

MODEL_DTYPE = "float32"
MIN_TOKENS = 32  # least length of a text, so that both halves are meaningful
SAMPLING = Sampling(temperature=0.7, top_p=0.9)  # a small model repeats itself if it is greedy


@dataclasses.dataclass(frozen=True)
class DemoTask:
    """The task of every cache: continue `prompt` by `new_tokens`, then predict `rest`."""

    prompt: list[int]
    rest: list[int]
    new_tokens: int
    capacity: int


def run(options: argparse.Namespace) -> None:
    caches = options.cache or [NamedCache(text, kvq.parse(text)) for text in CACHES]
    text = passage() if options.text is None else text_input.read_text(options.text)
    config = inputs.read_config(options.model, *caches)
    files = inputs.calibrations(config, caches, options.calibration or [])
    tokenizer = text_input.need_tokenizer(options.model, "read the text")
    task = make_task(
        text_input.encode(tokenizer, text), config, options.context, options.new_tokens
    )
    capacity = task.capacity
    inputs.warn_if_nothing_quantized(
        caches, config, capacity, capacity - 1, f"in {capacity} tokens"
    )
    with console.loading(options.model), console.input_errors():
        llama, _ = load_llama(options.model, dtype=MODEL_DTYPE)
        models = prepared(llama, [spec for _, spec in caches], files)
    started = time.perf_counter()
    with console.progress(f"compiling for {len(caches)} caches"):
        runs = [
            DemoRun(name, spec, model, task)
            for (name, _), (model, spec) in zip(caches, models, strict=True)
        ]
        generations = _compiled(runs)
    compile_seconds = time.perf_counter() - started
    measured = []
    for each, generation in zip(runs, generations, strict=True):
        with console.progress(f"running {each.name}"):
            measured.append(each.run(generation, Continuation(tokenizer, task.prompt)))
    result = {
        "model": options.model,
        "text": options.text or "passage.txt",
        "context": len(task.prompt) + len(task.rest),
        "capacity": task.capacity,
        "prompt_tokens": len(task.prompt),
        "scored_tokens": len(task.rest) - 1,
        "new_tokens": task.new_tokens,
        "prompt_end": tokenizer.decode(task.prompt[-48:]),
        "bf16_bytes": kvq.size.dense_nbytes(config, 1, task.capacity),
        "compile_seconds": compile_seconds,
        "sampling": dataclasses.asdict(SAMPLING) | {"seed": 0},
        "caches": _with_agreement(measured),
        "layer": _layer_times(caches),
    }
    if options.json:
        console.print_json("demo", result)
    else:
        _print(result)
    console.check_finite([row["name"] for row in measured if row["perplexity"] is None])


def make_task(ids: list[int], config: LlamaConfig, context: int, new_tokens: int) -> DemoTask:
    """Split a text of at most `context` tokens in the middle."""
    ids = ids[: min(context, config.positions)]
    text_input.check_tokens(ids, config)
    if len(ids) < MIN_TOKENS:
        raise console.UserError(
            f"the demo needs a text and a context of at least {MIN_TOKENS} tokens, but has"
            f" {len(ids)}"
        )
    prompt, rest = ids[: len(ids) // 2], ids[len(ids) // 2 :]
    if new_tokens > len(rest):
        raise console.UserError(
            f"--new-tokens {new_tokens} is more than the {len(rest)} tokens that follow the prompt"
            " within the context"
        )
    return DemoTask(prompt, rest, new_tokens, len(ids))


@dataclasses.dataclass(frozen=True)
class DemoRun:
    """One cache of the demo."""

    name: str
    spec: kvq.cache.CacheSpec
    llama: Llama
    task: DemoTask

    @property
    def rows_dtype(self) -> str:
        """Return the dtype of full-precision rows: the model's in a dense cache."""
        return MODEL_DTYPE if self.spec.exact else CACHE_DTYPE

    def new_cache(self) -> kvq.cache.Cache:
        return kvq.init_cache(self.spec, self.llama.config, 1, self.task.capacity, self.rows_dtype)

    def compile(self) -> TimedGeneration:
        """Compile everything that `run` needs."""
        rest, lengths = decoding.checked_tokens(
            self.llama, self.new_cache(), [self.task.rest], None
        )
        decoding.score_program.lower(self.llama, self.new_cache(), rest, lengths).compile()
        return TimedGeneration(
            self.llama,
            self.new_cache(),
            self.task.prompt,
            max_new_tokens=self.task.new_tokens,
            sampling=SAMPLING,
        )

    def run(self, generation: TimedGeneration, continuation: Continuation) -> dict[str, Any]:
        task = self.task
        tokens = np.asarray(generation.run().tokens)[0].tolist()
        _, cache = decoding.prefill(self.llama, self.new_cache(), np.array([task.prompt]))
        logprobs, cache = decoding.score(self.llama, cache, np.array([task.rest]))
        # the first token of the rest is read but not scored
        perplexity = exp(-float(jnp.mean(logprobs[0, 1:])))
        return {
            "name": self.name,
            "cache": str(self.spec),
            "perplexity": finite(perplexity),
            **cache_sizes.of(self.spec, self.llama.config, task.capacity, self.rows_dtype),
            "quantized_tokens": kvq.size.quantized_tokens(cache, task.capacity - 1),
            "tokens_per_second": task.new_tokens / generation.decode_seconds,
            "prefill_seconds": generation.prefill_seconds,
            "implementation": "+".join(sorted(set(decoding.implementations(cache)))),
            "windows": cache_sizes.windows(self.spec),
            "text": continuation.text(tokens),
            "tokens": tokens,
        }


def _compiled(runs: list[DemoRun]) -> list[TimedGeneration]:
    """Compile several runs at a time: XLA compiles without holding Python's lock."""
    pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1))
    try:
        return list(pool.map(DemoRun.compile, runs))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C does not wait for compilations


def _layer_times(caches: list[NamedCache]) -> dict[str, Any] | None:
    """Return the times of a layer through each cache that it can have by itself, or None if that is
    only one."""
    compared = layer_times.possible(caches)
    if len(compared) < 2:
        return None
    with console.progress(f"timing a layer of {layer_times.MODEL}"):
        return layer_times.times(compared, MODEL_DTYPE)


def _with_agreement(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows, each with the number of tokens that it generates before it first differs
    from the dense cache, or None if no row is dense."""
    dense = next((row["tokens"] for row in rows if row["cache"] == "dense"), None)

    def agreeing(tokens: list[int]) -> int | None:
        return None if dense is None else text_input.common_prefix(tokens, dense)

    return [row | {"tokens_as_dense": agreeing(row["tokens"])} for row in rows]


def _print(result: dict[str, Any]) -> None:
    print(f"The prompt, {result['prompt_tokens']} tokens of {result['text']}, ends:\n")
    print(_paragraph("..." + result["prompt_end"]))
    for row in result["caches"]:
        print(f"\n{row['name']} {_agreement(row, result['new_tokens'])}:\n")
        print(_paragraph(row["text"]))
    print()
    rows = [
        {
            "cache": row["name"],
            "perplexity": number(row["perplexity"], ".3f"),
            "first tokens as dense": (
                "-"
                if row["tokens_as_dense"] is None
                else f"{row['tokens_as_dense']} of {result['new_tokens']}"
            ),
            **cache_sizes.size_cells(row, result["capacity"] - 1),
            "tokens/s": f"{row['tokens_per_second']:.0f}",
            "read by": row["implementation"],
        }
        for row in result["caches"]
    ]
    title = (
        f"{result['model']}: perplexity of {result['scored_tokens']} tokens after the prompt; bytes"
        f" at {result['capacity']} tokens, windows included (bf16:"
        f" {console.format_bytes(result['bf16_bytes'])}); tokens/s without compilation, which took"
        f" {result['compile_seconds']:.0f} s for all"
    )
    print_table(title, rows, texts=("cache", "read by"))
    if result["layer"] is not None:
        layer_times.print_times(result["layer"])


def _agreement(row: dict[str, Any], new_tokens: int) -> str:
    same = row["tokens_as_dense"]
    if same is None or row["cache"] == "dense":
        return "continues"
    if same == new_tokens:
        return "continues as dense does, token for token"
    return f"continues as dense does for {console.counted(same, 'tokens')}, then differently"


def _paragraph(text: str) -> str:
    return textwrap.fill(
        console.printable(" ".join(text.split())),
        width=100,
        initial_indent="    ",
        subsequent_indent="    ",
    )

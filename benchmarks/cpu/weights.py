"""Time packed weights of a GGUF file against dense ones: products, steps, prompts, loading.

    taskset -c 0 python -m benchmarks.cpu.weights --model smollm2 --json weights_smollm2_cpu.json

Times are CPU times of the process. Both kinds of weights take turns, so that what else the machine
does hits both alike. Prompts and steps go through one cache. A step of 8 sequences is one program.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvq_jax as kvq
from benchmarks.markdown import head, table
from benchmarks.report_file import Report, arguments, cores, header
from kvq_models import decode_step, prefill, prepare
from kvq_models.llama import hf_names
from kvq_models.llama.checkpoint import Checkpoint, load_weights, open_checkpoint
from kvq_models.llama.model import Llama
from kvq_models.llama.packed_loading import Weights
from kvq_models.llama.packed_weights import logits_of

WEIGHTS: tuple[Weights, ...] = ("dense", "packed")


@dataclasses.dataclass(frozen=True)
class WeightsRow:
    """One task with one kind of weights. tokens: rows of a product, sequences of a step, tokens of
    a prompt, 0 for loading."""

    task: str
    tokens: int
    weights: str
    samples_ms: tuple[float, ...]

    @property
    def least_ms(self) -> float:
        return min(self.samples_ms)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsReport(Report):
    model: str
    cache: str
    cores: int
    nbytes: dict[str, int]
    rows: tuple[WeightsRow, ...]


Task = Callable[[], object]  # does the work once, and waits for it


@jax.jit
def _products(llama: Llama, by_width: dict[int, jax.Array]) -> jax.Array:
    """Return a sum over the products of all matrices, each with the rows of its width."""
    total = jnp.zeros((), jnp.float32)
    for path, weight in hf_names.weights(llama).items():
        if path.endswith("_proj.kernel"):
            total += jnp.sum(by_width[weight.spec.shape[0]] @ weight.leaf)
    rows = by_width[llama.config.hidden_size][None]
    matrix = llama.embed[...] if llama.head is None else llama.head.kernel[...]
    return total + jnp.max(logits_of(rows, matrix, tied=llama.head is None))


def products(llama: Llama, rows: int) -> Task:
    widths = {w.spec.shape[0] for w in hf_names.weights(llama).values() if w.transpose}
    generator = np.random.default_rng(0)
    by_width = {
        width: jnp.asarray(generator.normal(size=(rows, width)).astype(np.float32))
        for width in {*widths, llama.config.hidden_size}
    }
    return lambda: jax.block_until_ready(_products(llama, by_width))


@functools.partial(jax.jit, donate_argnums=1)
def _greedy(
    llama: Llama, cache: kvq.cache.Cache, token: jax.Array
) -> tuple[jax.Array, kvq.cache.Cache]:
    logits, cache = decode_step(llama, cache, token)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache


def steps(llama: Llama, spec: str, prompt: np.ndarray, room: int) -> Task:
    """Return the decode steps after prompts [B, T]. There is room for `room` steps."""
    cache = kvq.init_cache(spec, llama.config, len(prompt), prompt.shape[1] + room, "float32")
    logits, cache = prefill(llama, cache, prompt)
    state: list[Any] = [jnp.argmax(logits, axis=-1).astype(jnp.int32), cache]

    def step() -> object:
        state[:] = _greedy(llama, state[1], state[0])
        return jax.block_until_ready(state[0])

    return step


def prompts(llama: Llama, spec: str, prompt: np.ndarray) -> Task:
    def read() -> object:
        cache = kvq.init_cache(spec, llama.config, 1, prompt.shape[1] + 1, "float32")
        return jax.block_until_ready(prefill(llama, cache, prompt)[0])

    return read


def timed(task: str, tokens: int, ways: dict[str, Task], rounds: int) -> Iterator[WeightsRow]:
    """Yield the times of each way. They take turns, and the first call of each does not count."""
    samples: dict[str, list[float]] = {way: [] for way in ways}
    for work in ways.values():
        work()
    for _ in range(rounds):
        for way, work in ways.items():
            start = time.process_time()
            work()
            samples[way].append(round(1e3 * (time.process_time() - start), 3))
    for way, times in samples.items():
        row = WeightsRow(task, tokens, way, tuple(times))
        print(f"    {task:9s} {tokens:5d} {way:7s} {row.least_ms:9.2f} ms", file=sys.stderr)
        yield row


def measured(
    checkpoint: Checkpoint, ids: np.ndarray, options: argparse.Namespace
) -> Iterator[WeightsRow]:
    def loading(weights: Any) -> Task:
        return lambda: jax.block_until_ready(
            jax.tree.leaves(load_weights(checkpoint, dtype="float32", weights=weights))
        )

    yield from timed("load", 0, {w: loading(w) for w in WEIGHTS}, min(options.rounds, 3))
    models = {
        w: prepare(load_weights(checkpoint, dtype="float32", weights=w), options.cache)
        for w in WEIGHTS
    }
    for rows in (1, 4, 8):
        ways = {w: products(llama, rows) for w, llama in models.items()}
        yield from timed("products", rows, ways, options.rounds)
    for batch in (1, options.slots):
        prompt = np.stack([np.resize(np.roll(ids, i), 128) for i in range(batch)])
        ways = {w: steps(m, options.cache, prompt, options.rounds + 2) for w, m in models.items()}
        yield from timed("step", batch, ways, options.rounds)
    for length in options.prompt:
        prompt = np.resize(ids, (1, length))
        ways = {w: prompts(m, options.cache, prompt) for w, m in models.items()}
        yield from timed("prompt", length, ways, min(options.rounds, 5))


def page(report: WeightsReport, file: pathlib.Path) -> str:
    sizes = ", ".join(f"{kind} {size / 1e6:.0f} MB" for kind, size in report.nbytes.items())
    lines = [
        *head(report, file, f"{report.cores} cores; weights: {sizes}."),
        f"CPU time of the process, the least of all calls; cache {report.cache}. `products` are all"
        " matrices of a step with that many rows, `step` decodes a token of that many sequences"
        " after 128 tokens, `prompt` reads that many tokens, `load` opens no file, but reads and"
        " places all weights. Dense weights are fp32 and multiplied by XLA.",
    ]
    pairs: dict[tuple[str, int], dict[str, WeightsRow]] = {}
    for row in report.rows:
        pairs.setdefault((row.task, row.tokens), {})[row.weights] = row
    rows = [
        (
            task,
            str(tokens or ""),
            *(f"{ways[w].least_ms:.2f}" for w in WEIGHTS),
            f"{ways['packed'].least_ms / ways['dense'].least_ms:.2f}",
            "" if not tokens else f"{1e3 * tokens / ways['packed'].least_ms:.0f}",
        )
        for (task, tokens), ways in pairs.items()
    ]
    columns = ("task", "rows", "dense, ms", "packed, ms", "ratio", "packed, rows/s")
    return "\n\n".join([*lines, table(columns, rows)])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu.weights",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or a name of one")
    parser.add_argument("--cache", default="kivi:bits=4", help="the cache of prompts and steps")
    parser.add_argument(
        "--text",
        metavar="FILE",
        type=pathlib.Path,
        default=pathlib.Path("README.md"),
        help="its tokens are the prompts, repeated",
    )
    parser.add_argument(
        "--prompt", type=int, nargs="+", default=(128, 1024), metavar="N", help="tokens of prompts"
    )
    parser.add_argument("--slots", type=int, default=8, help="sequences of the larger batch")
    parser.add_argument("--rounds", type=int, default=20, help="calls of each")
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the raw samples here; `python -m benchmarks.results_page` makes a page of them",
    )
    args = parser.parse_args(argv)
    checkpoint = open_checkpoint(args.model)
    ids = np.asarray(checkpoint.tokenizer().encode(args.text.read_text("utf-8")), np.int32)
    rows = tuple(measured(checkpoint, ids, args))
    sizes = {
        w: kvq.size.nbytes(load_weights(checkpoint, dtype="float32", weights=w)) for w in WEIGHTS
    }
    report = WeightsReport(
        title="Packed weights on a CPU",
        **header(("benchmarks.cpu.weights", *arguments(argv))),
        model=args.model,
        cache=args.cache,
        cores=cores(),
        nbytes=sizes,
        rows=rows,
    )
    if args.json:
        report.write(args.json)
    print(page(report, pathlib.Path(args.json or "weights.json")))


if __name__ == "__main__":
    main()

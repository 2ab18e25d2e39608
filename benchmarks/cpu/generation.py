"""Time decode steps of one checkpoint by kvq, transformers and llama.cpp, each with its caches.

    python -m benchmarks.cpu.generation --model smollm2 --json generation_cpu.json

Decoding is greedy, of one sequence. All read the same prompt, then take turns, a step each, and go
on with their own tokens. All use fp32 weights and all cores. Quantized caches of transformers need
the packages optimum-quanto and hqq. llama.cpp needs llama-cpp-python and a GGUF file. If a package
is missing, its rows are left out and the output says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvq_jax as kvq
from benchmarks.cpu import llama_cpp_steps
from benchmarks.markdown import head, table
from benchmarks.report_file import Report, arguments, cores, header
from kvq_models import decode_step, load_llama, prefill, prepare, save_llama
from kvq_models.llama.model import Llama
from kvq_models.named_models.names import located

CACHES = ("dense", "kivi:bits=4", "kivi:bits=2", "innerq:bits=2")
PACKAGES = {"quanto": "optimum.quanto", "hqq": "hqq"}  # backends of transformers' QuantizedCache
BITS = (4, 2)


@dataclasses.dataclass(frozen=True)
class GenerationRow:
    """One way to decode after `prompt` tokens."""

    way: str
    prompt: int
    samples_ms: tuple[float, ...]

    @property
    def tokens_per_second(self) -> float:
        return 1e3 / float(np.mean(self.samples_ms))

    @property
    def median_ms(self) -> float:
        return float(np.median(self.samples_ms))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationReport(Report):
    model: str
    transformers: str
    torch: str
    llama_cpp: str | None
    cores: int
    missing: tuple[str, ...]
    rows: tuple[GenerationRow, ...]


Step = Callable[[], object]  # generates one more token, and waits for it


def ours(llama: Llama, spec: str, prompt: np.ndarray, steps: int) -> Step:
    """Return the steps of kvq's decode loop after a prompt."""
    model = prepare(llama, spec)
    cache = kvq.init_cache(spec, llama.config, 1, len(prompt) + steps + 1, "float32")
    logits, cache = prefill(model, cache, prompt[None])
    program = jax.jit(_greedy, donate_argnums=1)
    token_and_cache: list[Any] = [jnp.argmax(logits, axis=-1).astype(jnp.int32), cache]

    def step() -> object:
        token_and_cache[:] = program(model, token_and_cache[1], token_and_cache[0])
        return jax.block_until_ready(token_and_cache[0])

    return step


def _greedy(
    llama: Llama, cache: kvq.cache.Cache, token: jax.Array
) -> tuple[jax.Array, kvq.cache.Cache]:
    logits, cache = decode_step(llama, cache, token)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache


def theirs(directory: pathlib.Path, prompt: np.ndarray) -> Iterator[tuple[str, Step]]:
    """Yield the steps of transformers' model with each cache that can be had."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.cache_utils import DynamicCache, QuantizedCache

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    caches: dict[str, Callable[[], Any]] = {
        "transformers, dense": functools.partial(DynamicCache, config=model.config)
    }
    for backend in PACKAGES:
        if installed(backend):
            for bits in BITS:
                caches[f"transformers, {backend} {bits} bits"] = functools.partial(
                    QuantizedCache, backend, model.config, nbits=bits
                )
    for name, make in caches.items():
        with torch.inference_mode():
            cache = make()
            last_token = [
                model(
                    torch.tensor(prompt[None].astype(np.int64)),
                    past_key_values=cache,
                    logits_to_keep=1,
                ).logits.argmax(-1)
            ]

        def step(cache: Any = cache, last_token: list[Any] = last_token) -> object:
            with torch.inference_mode():
                last_token[0] = model(last_token[0], past_key_values=cache).logits.argmax(-1)
            return last_token[0]

        yield name, step


def installed(backend: str) -> bool:
    try:
        return importlib.util.find_spec(PACKAGES[backend]) is not None
    except ModuleNotFoundError:  # of the package above
        return False


def _for_llama_cpp(model: str | os.PathLike[str], directory: pathlib.Path) -> pathlib.Path | None:
    """Return a file with fp32 weights that llama.cpp reads, or None if it is not installed, or the
    model is no GGUF file."""
    source = pathlib.Path(model)
    if llama_cpp_steps.version() is None or source.suffix != ".gguf":
        return None
    llama_cpp_steps.write_float32(source, directory / "float32.gguf")
    return directory / "float32.gguf"


def timed(ways: dict[str, Step], prompt: int, steps: int) -> Iterator[GenerationRow]:
    """Yield the times of `steps` steps of each way. They take turns, and the first step of each
    does not count."""
    samples: dict[str, list[float]] = {way: [] for way in ways}
    for step in ways.values():
        step()
    for _ in range(steps):
        for way, step in ways.items():
            start = time.perf_counter()
            step()
            samples[way].append(round(1e3 * (time.perf_counter() - start), 3))
    for way, times in samples.items():
        yield GenerationRow(way, prompt, tuple(times))


def page(report: GenerationReport, file: pathlib.Path) -> str:
    versions = [f"transformers {report.transformers}", f"torch {report.torch}"]
    versions += [f"llama-cpp-python {report.llama_cpp}"] if report.llama_cpp else []
    lines = [
        *head(report, file, f"{report.cores} cores; {', '.join(versions)}."),
        "One sequence, fp32 weights, greedy. All ways take turns, a step each. Tokens a second"
        " follow from the mean of all steps, also of those that quantize; the ratio is to kvq's"
        " dense cache at the same prompt."
        + (
            " llama.cpp attends by its flash attention, which quantized values need."
            if report.llama_cpp
            else ""
        )
        + "".join(f" Not installed, so not measured: {name}." for name in report.missing),
    ]
    rows = []
    for row in report.rows:
        base = next(r for r in report.rows if r.prompt == row.prompt)
        speed = row.tokens_per_second
        rows.append(
            (
                str(row.prompt),
                row.way,
                f"{speed:.1f}",
                f"{speed / base.tokens_per_second:.2f}",
                f"{row.median_ms:.1f}",
            )
        )
    return "\n\n".join(
        [*lines, table(("prompt", "cache", "tokens/s", "ratio", "median ms a token"), rows)]
    )


def parser_of_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu.generation",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--model", default="smollm2", help="a name or a directory, as `kvq generate` takes it"
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        type=pathlib.Path,
        default=pathlib.Path("README.md"),
        help="its tokens are the prompt, repeated",
    )
    parser.add_argument(
        "--prompt",
        type=int,
        nargs="+",
        default=(1024, 4096),
        metavar="N",
        help="tokens of the prompt",
    )
    parser.add_argument(
        "--steps", type=int, default=64, metavar="M", help="tokens that each way generates"
    )
    parser.add_argument(
        "--cache",
        metavar="SPEC",
        nargs="+",
        default=CACHES,
        help="caches of kvq; the first is the baseline",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the raw samples here; `python -m benchmarks.results_page` makes a page of them",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of_options()
    args = parser.parse_args(argv)
    if importlib.util.find_spec("torch") is None:
        parser.error("transformers' models need torch: pip install 'kvq-jax[parity]'")
    import torch
    import transformers

    llama, tokenizer = load_llama(args.model, dtype="float32", weights="dense")
    ids = np.asarray(tokenizer.encode(args.text.read_text(encoding="utf-8")), np.int32)
    rows: list[GenerationRow] = []
    with tempfile.TemporaryDirectory() as directory:
        save_llama(llama, directory)
        in_float32 = _for_llama_cpp(located(args.model), pathlib.Path(directory))
        for length in args.prompt:
            prompt = np.resize(ids, length)
            print(f"{length} tokens: reading the prompt in each way", file=sys.stderr)
            ways = {f"kvq, {spec}": ours(llama, spec, prompt, args.steps) for spec in args.cache}
            ways |= dict(theirs(pathlib.Path(directory), prompt))
            if in_float32 is not None:
                caches = llama_cpp_steps.CACHES
                ways |= {
                    f"llama.cpp, {cache}": llama_cpp_steps.Steps(
                        in_float32, prompt, args.steps, cache
                    )
                    for cache in caches
                }
            for row in timed(ways, length, args.steps):
                print(f"    {row.way:32s} {row.tokens_per_second:6.1f} tokens/s", file=sys.stderr)
                rows.append(row)
    with_llama_cpp = in_float32 is not None
    report = GenerationReport(
        title=f"Tokens a second of {args.model}, kvq against transformers"
        + (" and llama.cpp" if with_llama_cpp else ""),
        **header(("benchmarks.cpu.generation", *arguments(argv))),
        model=args.model,
        transformers=transformers.__version__,
        torch=torch.__version__,
        llama_cpp=llama_cpp_steps.version() if with_llama_cpp else None,
        cores=cores(),
        missing=(
            *(PACKAGES[name] for name in PACKAGES if not installed(name)),
            *(
                []
                if with_llama_cpp
                else [f"{llama_cpp_steps.PACKAGE} (or the model is no GGUF file)"]
            ),
        ),
        rows=tuple(rows),
    )
    if args.json:
        report.write(args.json)


if __name__ == "__main__":
    main()

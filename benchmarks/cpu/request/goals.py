"""The goals of a request on a CPU, and whether a run met them.

    decode     ms a token over llama.cpp's best of the same prompt: at most 1, from 4K tokens on 0.5
    prompts    tokens/s over transformers' in float32: at least 2; over llama.cpp's best: at least 1
    attention  in a dense cache. Of a prompt: at least 0.7 of the speed of one plain product; of a
               token: at most the time of two products and a softmax in XLA
    short      tokens/s after 128 tokens on two cores: 200 of SmolLM2, 40 of the 1B shapes

Each is judged for the packed cache with float32 activations, and again with int8 activations, which
are an option.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from benchmarks.cpu.request.plan import ATTENTION, KVQ, LLAMA_CPP, PRODUCTS, SMOLLM2, TRANSFORMERS
from benchmarks.cpu.request.random_file import LLAMA_1B
from benchmarks.markdown import table

if TYPE_CHECKING:
    from benchmarks.cpu.request.report import RequestRow

OURS = "kivi:bits=4", "kivi:bits=4, int8 activations"
EXACT = f"{ATTENTION}dense"
LONG = 4096  # tokens, from which on a step is to take half of llama.cpp's time
STEP, LONG_STEP = 1.0, 0.5
PROMPT_OVER_FLOAT32, PROMPT_OVER_LLAMA_CPP = 2.0, 1.0
OVER_PRODUCT, OVER_PRODUCTS = 0.7, 1.0
SHORT, SHORT_CORES = 128, 2
TOKENS_PER_SECOND = {SMOLLM2: 200, LLAMA_1B: 40}
HEAD = ("goal", "model", "cores", "prompt", "kvq", "measured", "asked", "")

Line = tuple[str, ...]


def goals(rows: Sequence[RequestRow]) -> str:
    """Render the table of goals, or nothing if no row of kvq can be compared with another."""
    ours = [row for row in rows if row.system == KVQ and row.way in (*OURS, EXACT)]
    lines = [line for row in ours for line in _of(row, rows)]
    if not lines:
        return ""
    met = sum(line[-1] == "met" for line in lines)
    return f"{met} of {len(lines)} are met.\n\n{table(HEAD, sorted(lines, key=_order))}"


def _of(row: RequestRow, rows: Sequence[RequestRow]) -> Iterator[Line]:
    beside = [
        other
        for other in rows
        if (other.model, other.cores, other.prompt) == (row.model, row.cores, row.prompt)
    ]
    if row.way == EXACT:
        yield from _of_attention(row, beside)
        return
    llama_cpp = [other for other in beside if other.system == LLAMA_CPP]
    float32 = [other for other in beside if other.system == TRANSFORMERS and other.way == "float32"]
    if llama_cpp:
        ratio = row.step_ms / min(other.step_ms for other in llama_cpp)
        asked = LONG_STEP if row.prompt >= LONG else STEP
        yield _at_most(row, "ms a token over llama.cpp's best", ratio, asked)
    for goal, others, asked in (
        ("prompt's speed over llama.cpp's best", llama_cpp, PROMPT_OVER_LLAMA_CPP),
        ("prompt's speed over transformers' in float32", float32, PROMPT_OVER_FLOAT32),
    ):
        if others:
            ratio = min(other.first_ms for other in others) / row.first_ms
            yield _at_least(row, goal, ratio, asked)
    if (row.prompt, row.cores) == (SHORT, SHORT_CORES):
        yield _at_least(row, "tokens a second", 1e3 / row.step_ms, TOKENS_PER_SECOND[row.model])


def _of_attention(row: RequestRow, beside: Sequence[RequestRow]) -> Iterator[Line]:
    for other in beside:
        if other.way == PRODUCTS:
            speed = other.first_ms / row.first_ms
            yield _at_least(row, "attention's speed over a plain product's", speed, OVER_PRODUCT)
            step = row.step_ms / other.step_ms
            yield _at_most(row, "attention of a token over its two products", step, OVER_PRODUCTS)


def _at_most(row: RequestRow, goal: str, value: float, asked: float) -> Line:
    return _line(row, goal, value, f"at most {asked:g}", value <= asked)


def _at_least(row: RequestRow, goal: str, value: float, asked: float) -> Line:
    return _line(row, goal, value, f"at least {asked:g}", value >= asked)


def _line(row: RequestRow, goal: str, value: float, asked: str, met: bool) -> Line:
    cells = (goal, row.model, str(row.cores), str(row.prompt), row.way.removeprefix(ATTENTION))
    return (*cells, f"{value:.2f}", asked, "met" if met else "missed")


def _order(line: Line) -> tuple[str, str, int, int]:
    goal, model, cores, prompt, *_ = line
    return goal, model, int(cores), int(prompt)

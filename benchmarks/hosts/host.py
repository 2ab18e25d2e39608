"""The sizes of the measured models, and what a host does with one of them."""

from __future__ import annotations

import abc
import ast
import importlib.metadata
import inspect
import io
import pathlib
import textwrap
import tokenize
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

import kvq_jax as kvq

LAYERS, HEADS, KV_HEADS, HEAD_DIM, WIDTH, VOCAB = 2, 8, 2, 64, 256, 256
WITH_WINDOWS, WINDOW = 6, 128  # layers of Gemma 3, all but the last with windows of WINDOW tokens
BATCH, PROMPT, PADDING, STEPS = 2, 160, 60, 32  # of the texts that are compared
STREAMS = 2  # sequences of a timed step
ROOT = pathlib.Path(__file__).parents[2]

Generated = tuple[np.ndarray, np.ndarray]
Step = Callable[[Any], tuple[Array, Any]]


class Host(abc.ABC):
    """A random model of a project, with the project's own cache or one of kvq's.

    Attributes:
        name: the project and the model.
        package: the distribution, of which the report names the version.
        adapter: the file of kvq_hosts, or None if there is none.
        your_code: the functions that a user of the host writes for a cache of kvq.
        kv_heads, layers: of the model.
    """

    name: str
    package: str
    adapter: str | None
    your_code: tuple[Callable[..., Any], ...]
    kv_heads: int = KV_HEADS
    layers: int = LAYERS

    @abc.abstractmethod
    def generate(self, spec: str | None) -> Generated:
        """Return the tokens [B, T] that the host's own greedy sampler makes, and their logits
        [B, T, V], through a cache of kvq, or through the host's own if `spec` is None."""

    @abc.abstractmethod
    def step(self, spec: str | None, rows: list[tuple[Array, Array]], capacity: int) -> Any:
        """Return (step, state, cache) of caches that hold `rows`.

        Args:
            spec: a cache of kvq, or None for the host's own.
            rows: keys and values [B, S, K, H] of each layer.
            capacity: the tokens that a cache has room for, a power of two.

        Returns:
            `step(state)` decodes one token and returns (logits [B, V], state). `cache` is the
            pytree of which the bytes count.
        """

    @property
    def version(self) -> str:
        return f"{self.package} {importlib.metadata.version(self.package)}"

    @property
    def adapter_lines(self) -> int:
        """The lines of code of the adapter, without its documentation."""
        return len(code_lines((ROOT / self.adapter).read_text())) if self.adapter else 0

    @property
    def your_lines(self) -> int:
        """The lines of code that a user writes, without the signatures of functions."""
        return sum(map(body_lines, self.your_code))


def plan_of(spec: str, capacity: int, kv_heads: int = KV_HEADS) -> kvq.cache.CachePlan:
    """Return the plan of each layer of a model whose layers are alike."""
    dims = kvq.CacheDims(LAYERS, HEADS, kv_heads, HEAD_DIM, WIDTH)
    return kvq.layer_plan(spec, dims, layer=0, capacity=capacity, dtype="float32")


def prompts(padded: bool) -> np.ndarray:
    """Return prompts [B, T], of which the second is padded on the left by zeros, or none."""
    tokens = np.random.default_rng(0).integers(1, VOCAB, (BATCH, PROMPT), np.int32)
    tokens[1:, : PADDING if padded else 0] = 0
    return tokens


def random_rows(tokens: int, kv_heads: int, layers: int) -> list[tuple[Array, Array]]:
    """Return random keys and values [B, S, K, H] of each layer."""
    shape = (STREAMS, tokens, kv_heads, HEAD_DIM)
    keys = jax.random.split(jax.random.key(1), (layers, 2))
    return [(jax.random.normal(k, shape), jax.random.normal(v, shape)) for k, v in keys]


def appended(plan: kvq.cache.CachePlan, rows: tuple[Array, Array]) -> kvq.cache.LayerCache:
    """Return the cache of one layer that holds the rows."""
    return jax.jit(plan.append)(plan.init(len(rows[0])), *rows)


def code_lines(source: str) -> set[int]:
    """Return the numbers of the lines that hold code: no comment, docstring or empty line."""
    empty = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in empty
        for line in range(token.start[0], token.end[0] + 1)
    }
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return lines


def body_lines(function: Callable[..., Any]) -> int:
    """Return the lines of code of a function without its signature."""
    source = textwrap.dedent(inspect.getsource(function))
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.FunctionDef)
    return sum(line >= definition.body[0].lineno for line in code_lines(source))

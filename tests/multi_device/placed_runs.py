"""What the tests of placements share: the placements of a method, layers run on them and on one
device, and what compilers made."""

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.cache.cache import CacheDims
from kvq_jax.placement.allowed import parse, unsplittable
from tests.exhaustive import some
from tests.kvq_jax.layer_runs import Sequences, live, parameters_of, quick_jit, sequences
from tests.methods_table import METHOD_CASES

CAPACITY = 90
BATCH = 2
PROMPTS = np.array([60, 23], np.int32)
STEPS = 12

KIVI = "k=kivi+v=int4:group_size=32+cache:recent=12,block=16"
INNERQ = "k=innerq+v=mxfp4+cache:sink=4,recent=8,block=16"
CROSS_LAYER = "xquant_cl:base_layer=0,sink=2,recent=3,block=16"

# Compiling takes nearly all of these tests' time, so two methods share a cache where each can have
# a side of it.
SPECS = (
    KIVI,
    INNERQ,
    CROSS_LAYER,
    "xquant:sink=2,recent=3,block=16",
    "k=kvquant:outliers=0.04+v=gear:group_size=16+cache:sink=5,recent=3,block=16",
    "zipcache:probes=8,sink=2,recent=3,block=16",
    "dense:sink=2,recent=3,block=16",
    "k=turboquant+v=fp8:scale=head+cache:sink=2,recent=3,block=16",
    "k=polarquant:group_size=16+v=waterfill:bits=3+cache:sink=2,recent=3,block=16",
    "k=kvarn:group_size=16+v=oscar_omni:group_size=16+cache:sink=2,recent=3,block=16",
    "oscar_spectral:sink=2,recent=3,block=16",
    "optr:steps=1,sink=2,recent=3,block=16",
    "k=block_gtq+v=pq:code_bits=6,group_size=4+cache:sink=2,recent=3,block=16",
    # groups of values span heads
    "k=squat:rank=3,lam=0.01+v=nf4:group_size=64+cache:recent=12,block=16",
    "k=squat_pre:rank=6,rotate=true+v=nvfp4+cache:sink=2,recent=5,block=16,subtract_bias=true",
)
# of each kind of statistics, of outliers, of rows that sides, layers or heads share, and of values
# that a matrix product makes; the others run with --exhaustive
USUAL = (
    *(KIVI, INNERQ, CROSS_LAYER),
    *(spec for spec in SPECS if any(name in spec for name in ("kvquant", "zipcache", "squat"))),
)
# where a matrix product makes what is stored
PRODUCTS = ("xquant", "squat", "rotate", "kvarn", "block_gtq")


def specs() -> pytest.MarkDecorator:
    """Parametrizes a test over USUAL, and with --exhaustive over SPECS and the whole table of
    methods. Tests of one cache come side by side."""
    rest = [case.spec for case in METHOD_CASES if case.spec not in SPECS]
    return pytest.mark.parametrize("spec", some((*SPECS, *rest), USUAL), scope="module")


def dims_of(spec: str, head_dim: int = 32) -> CacheDims:
    return CacheDims(1 + ("xquant_cl" in spec), 4, 2, head_dim, 4 * head_dim)


def as_far_as_allowed(spec: str) -> str:
    """Return the placement on 8 devices that splits all that the method lets be split.

    With PRODUCTS, only tokens are split: products of fewer rows or heads are rounded differently.
    """
    if any(name in spec for name in PRODUCTS):
        return "tokens=4"
    plans = kvq.cache.layout(spec, dims_of(spec), BATCH, CAPACITY, "float32").plans
    whole_heads = any(unsplittable(plan, 2) for plan in plans)
    return "rows=2,tokens=4" if whole_heads else "rows=2,heads=2,tokens=2"


@dataclasses.dataclass(frozen=True)
class Run:
    """A cache after a prompt and some steps, the attention of its tokens, and the program of a
    step, lowered and compiled."""

    cache: kvq.cache.Cache
    outputs: np.ndarray
    parameters: tuple[Any, ...]
    lowered: Any
    step: Any


def step_of_layers(implementation: Any) -> Callable[..., Any]:
    """Return a function that takes T tokens through all layers of a cache; each layer gets the same
    inputs."""

    def step(
        cache: kvq.cache.Cache, inputs: kvq.types.LayerInputs, parameters: Any, prefill: bool
    ) -> tuple[jax.Array, kvq.cache.Cache]:
        tokens = inputs.positions.shape[1]
        lengths = jnp.sum(inputs.valid, axis=1, dtype=jnp.int32)
        options = dict(prefill=prefill, parameters=parameters, implementation=implementation)
        begun = kvq.begin(cache, tokens, lengths, **options)
        rows = {name: getattr(inputs, name) for name in ("q_pre", "k_pre", "x", "rope")}
        rows["residual"] = inputs.x
        outputs = []
        for _ in cache.layers:
            out, begun = kvq.append_and_attend(begun, inputs.q_rot, inputs.k_rot, inputs.v, **rows)
            outputs.append(out)
        return jnp.stack(outputs), kvq.finish(begun)

    return step


@functools.cache
def program(implementation: Any) -> Callable[..., Any]:
    """Return `step_of_layers`, to be compiled once for all runs of the same sizes."""
    return quick_jit(
        step_of_layers(implementation), static_argnames="prefill", donate_argnames="cache"
    )


def run(
    spec: str,
    placement: kvq.Placement | None,
    implementation: Any = "xla",
    head_dim: int = 32,
    more: int = 0,
) -> Run:
    """Fill a cache of ragged rows: a prompt, then single tokens, during which blocks age in every
    row; these by an `implementation`.

    more: tokens of the prompts and of the capacity."""
    cache = kvq.init_cache(
        spec, dims_of(spec, head_dim), BATCH, CAPACITY + more, "float32", placement=placement
    )
    own, prompts = parameters_for(spec, head_dim), PROMPTS + more
    text = texts(head_dim, more)
    prompt = text.window(np.zeros(BATCH, np.int32), prompts, int(prompts.max()), padding=0.0)
    first, cache = program("xla")(cache, prompt, own, prefill=True)
    outputs = [np.where(np.asarray(prompt.valid)[None, :, None, :, None], np.asarray(first), 0)]
    lowered = compiled = None
    for i in range(STEPS):
        inputs = text.window(prompts + i, prompts + i + 1, 1)
        lowered = lowered or program(implementation).lower(cache, inputs, own, prefill=False)
        compiled = compiled or lowered.compile()
        out, cache = compiled(cache, inputs, own)
        outputs.append(np.asarray(out))
    return Run(cache, np.concatenate(outputs, axis=3), own, lowered, compiled)


@functools.cache
def texts(head_dim: int, more: int = 0) -> Sequences:
    return sequences(BATCH, dims_of(KIVI, head_dim), CAPACITY + more)


def parameters_for(spec: str, head_dim: int = 32) -> tuple[Any, ...]:
    layout = kvq.cache.layout(spec, dims_of(spec, head_dim), BATCH, CAPACITY, "float32")
    return tuple(map(parameters_of, layout.plans))


@functools.cache
def on_one_device(spec: str) -> Run:
    return run(spec, None)


@functools.cache
def on(spec: str, mesh: str) -> Run:
    return run(spec, parse(mesh))


def standing(cache: kvq.cache.Cache) -> list[Any]:
    """Return the entries of each layer that stand for a token, and the rows' lengths."""
    lengths = np.asarray(cache.lengths)
    layers = zip(cache.plans, cache.layers, strict=True)
    return [lengths, *(live(plan, state, lengths) for plan, state in layers)]


def differing(first: Any, second: Any, tolerance: float = 0) -> list[str]:
    """Return the paths of arrays that are not equal: bit for bit, or floats within a tolerance of
    the array's largest entry.

    Rows that a matrix product makes are rounded differently where it has another shape.
    """

    def same(one: Any, other: Any) -> bool:
        one, other = np.asarray(one), np.asarray(other)
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if tolerance and one.size and np.issubdtype(one.dtype, np.floating):
            return bool(np.abs(one - other).max() <= tolerance * np.abs(one).max())
        return one.tobytes() == other.tobytes()

    pairs = zip(jax.tree_util.tree_leaves_with_path(first), jax.tree.leaves(second), strict=True)
    return [
        f"{jax.tree_util.keystr(path)}: {np.shape(one)} and {np.shape(other)}"
        for (path, one), other in pairs
        if not same(one, other)
    ]


def speaks_of_devices(lowered: Any) -> bool:
    """Return True where the text of a lowered program says how arrays are split, or runs something
    on shards."""
    return re.search(r"sharding|\bsdy\.|manual_computation|SPMD", lowered.as_text()) is not None


def collectives(compiled: Any) -> list[tuple[int, str]]:
    """Return (bytes of the largest operand, operation) of every collective of a compiled
    program."""
    found = []
    for line in compiled.as_text().splitlines():
        match = re.search(
            r"= (.*?)"
            r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(-start)?\(",
            line,
        )
        if match:
            shapes = re.findall(r"[a-z]+(\d*)\[([\d,]*)\]", match[1])  # pred[2] has no bits
            sizes = (math.prod(map(int, shape.split(","))) if shape else 1 for _, shape in shapes)
            widths = (int(bits or 8) // 8 for bits, _ in shapes)
            found.append((max(map(operator.mul, sizes, widths)), match[2]))
    return found


def bytes_on(device: jax.Device, tree: Any) -> int:
    """Return the bytes that a device holds of the arrays of a tree."""
    shards = (s for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards)
    return sum(s.data.nbytes for s in shards if s.device == device)

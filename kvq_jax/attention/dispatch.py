"""The choice between XLA and kernels, which read a layer's body in a decode step and, on a GPU,
quantize the blocks that age into it.

None       on a GPU the fused kernel, on a CPU the native one, where nothing stands in its way
           (`unsupported`), else XLA
"xla"      the streaming path, everywhere
"pallas"   the fused kernels for GPUs; ValueError with the reason where they cannot run
"native"   the C++ kernel for CPUs; ValueError with the reason where it cannot run
a Launch   the fused kernels, launched with these options whatever the device: for tests
           (interpret=True) and compilation ahead of time

Fused kernels are imported only when one is needed: the Triton route of Pallas is deprecated since
JAX 0.11, and XLA does without it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
import types
from collections.abc import Sequence
from typing import Literal, TypeAlias

import jax

from cpu_kernels.library import instruction_set, unavailable
from kvq_jax.arrays import stored as stored_arrays
from kvq_jax.attention import arithmetic, native, streaming
from kvq_jax.codecs.base import Codec
from kvq_jax.codecs.kernel_readers import Reader
from kvq_jax.layer.plan import LayerPlan, LayerState, Sides
from kvq_jax.types.array_types import LayerInputs, LengthsB, PositionsBT, QueryBNTH, RowsBKTH, Tree
from pallas_kernels.launch import LAUNCH, Launch

Implementation: TypeAlias = Literal["xla", "pallas", "native"] | Launch | None
Chosen: TypeAlias = Launch | Literal["native"] | None  # a kernel, or None for XLA
Kernels: TypeAlias = Literal["pallas", "native"]
MOST_NATIVE_TOKENS = 32  # new tokens of a row in one step
# the first compute capability with the tensor-core types and asynchronous loads that the kernels
# use
OLDEST = 8.0


def unsupported(
    plan: LayerPlan, query_heads: int, tokens: int, kernels: Kernels = "pallas"
) -> str | None:
    """Return, in one line, why none of these kernels can serve this layer's decode steps; None
    where one can. The device is not considered."""
    return (
        _unsupported_native(plan, tokens)
        if kernels == "native"
        else _unsupported_fused(plan, query_heads, tokens)
    )


def _unsupported_native(plan: LayerPlan, tokens: int) -> str | None:
    if tokens > MOST_NATIVE_TOKENS:
        return f"{tokens} new tokens in one step; CPU kernels take up to {MOST_NATIVE_TOKENS}"
    if plan.joint:
        return (
            f"{type(plan.k).__name__} reads keys and values from the same rows, which no CPU kernel"
            " does"
        )
    for name, codec in zip("kv", (plan.k, plan.v), strict=True):
        body = codec.native_body()
        if isinstance(body, str):
            return f"{name}: {body}"
        if body.rotated and plan.regions.shards > 1:
            return (
                f"{name}: keys before RoPE in a body that is dealt out to shards; kernels rotate"
                " runs of neighbouring tokens"
            )
    return None


def _unsupported_fused(plan: LayerPlan, query_heads: int, tokens: int) -> str | None:
    if reason := no_triton():
        return reason
    if tokens != 1:
        return f"{tokens} new tokens in one step; kernels take one"
    channels = plan.head_dim
    most = 16 if channels <= 128 else 8  # what a program's registers hold
    if query_heads // plan.heads > most:
        return (
            f"{query_heads // plan.heads} query heads for each KV head; kernels take up to {most}"
            f" at head dim {channels}"
        )
    readers: list[Reader] = []
    for name, codec in zip("kv", (plan.k, plan.v), strict=True):
        reader = codec.kernel_reader()
        if isinstance(reader, str):
            return f"{name}: {reader}"
        readers.append(reader)
        specs = jax.tree.leaves(codec.body(1, plan.heads, plan.regions.held_capacity))
        together = (axis.per for spec in specs for axis in spec.axes if axis.name == "kv_heads")
        shared = next((heads for heads in together if heads not in (1, plan.heads)), None)
        if shared:
            return f"{name}: groups of {shared} heads; kernels serve groups of one head or of all"
    if len({reader.parts for reader in readers}) > 1:
        return "runs of channels of several widths on one side alone; kernels read them on both"
    if plan.regions.shards > 1 and not readers[0].reads_shards:
        return (
            "k: keys in runs of channels in a body that is dealt out to shards; kernels rotate"
            " neighbouring tokens"
        )
    tile = max(reader.least_tile for reader in readers)
    if plan.regions.held_capacity < tile:
        return f"the body holds {plan.regions.held_capacity} tokens, fewer than one tile of {tile}"
    return None


@functools.cache
def no_triton() -> str | None:
    """Return, in one line, why kernels cannot be imported; None where they can."""
    try:
        importlib.import_module("jax.experimental.pallas.triton")
    except ImportError:
        said = (
            "kernels need jax.experimental.pallas.triton, which cannot be imported from JAX"
            f" {jax.__version__}"
        )
        return f"{said}: JAX 0.10.2 to 0.12 have it (pip install 'jax<0.13')"
    return None


def no_device(kernels: Kernels = "pallas") -> str | None:
    """Return, in one line, why this process cannot run these kernels; None where it can."""
    backend = jax.default_backend()
    if kernels == "native":
        return (
            unavailable()
            if backend == "cpu"
            else f"native kernels need a CPU, this process runs on {backend}"
        )
    if backend != "gpu":
        return f"kernels need a GPU, this process runs on {backend}"
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", ""))  # such as 9.0; for AMD gfx942
    if not re.fullmatch(r"\d+\.\d+", capability) or float(capability) < OLDEST:
        return (
            f"kernels need an NVIDIA GPU of compute capability {OLDEST} or later, this is"
            f" {device.device_kind} ({capability})"
        )
    return None


def choose(
    implementation: Implementation, plan: LayerPlan, query_heads: int, tokens: int
) -> Chosen:
    """Return the kernel to use, or None for XLA. Raises ValueError where a named implementation
    cannot run."""
    if implementation is None:
        kernels = _kernels_here()
        if obstacle(kernels, plan, query_heads, tokens):
            return None
        return _launch(plan, query_heads) if kernels == "pallas" else "native"
    if implementation == "xla":
        return None
    if isinstance(implementation, Launch):
        if reason := unsupported(plan, query_heads, tokens):
            raise ValueError(f"no kernel for this cache: {reason}")
        return implementation
    if implementation not in ("pallas", "native"):
        raise ValueError(f"{implementation=}: choose 'xla', 'pallas' or 'native'")
    if reason := unsupported(plan, query_heads, tokens, implementation) or no_device(
        implementation
    ):
        raise ValueError(f"{implementation=} cannot run: {reason}")
    return _launch(plan, query_heads) if implementation == "pallas" else "native"


def _launch(plan: LayerPlan, query_heads: int) -> Launch:
    """Return the options of kernels that can serve this layer: in assembly where its self-test has
    passed on this kind of device."""
    return (
        LAUNCH
        if LAUNCH.interpret
        else dataclasses.replace(LAUNCH, arithmetic=arithmetic.arithmetic_of(plan, query_heads))
    )


def obstacle(kernels: Kernels | None, plan: LayerPlan, query_heads: int, tokens: int) -> str | None:
    """Return, in one line, why these kernels (default: those for this process's device) do not read
    this layer; None where they do."""
    kernels = kernels or _kernels_here()
    return no_device(kernels) or unsupported(plan, query_heads, tokens, kernels)


def _kernels_here() -> Kernels:
    return "native" if jax.default_backend() == "cpu" else "pallas"


def kernels_here() -> str:
    """Return, in one line, the kernels that this process can run, or why it can run none."""
    kernels = _kernels_here()
    if reason := no_device(kernels):
        return f"none: {reason}"
    return f"native, compiled for {instruction_set()}" if kernels == "native" else "pallas"


def arithmetic_here(plans: Sequence[LayerPlan], query_heads: int) -> str:
    """Say, in one line, how fused kernels compute for the layers of these plans that they serve,
    and what the self-test found."""
    if reason := no_device("pallas"):
        return f"not tested: {reason}"
    return arithmetic.described(
        [plan for plan in plans if not unsupported(plan, query_heads, 1)], query_heads
    )


def name_of(chosen: Chosen) -> str:
    """Return the name of what `choose` chose."""
    return "xla" if chosen is None else "native" if chosen == "native" else "pallas"


def attend(
    plan: LayerPlan,
    params: Tree,
    before: LayerState,
    after: LayerState,
    body: Sides,
    inputs: LayerInputs,
    limits: PositionsBT,
    windows: Tree,
    chosen: Chosen,
) -> QueryBNTH:
    """Attend as `streaming.attend` does, with NaN past the capacity; what `choose` chose reads the
    body. before, after: the state without and with the new tokens. windows: what `append_token`
    found in them."""
    if isinstance(chosen, Launch):
        return _fused().attend(plan, params, after, body, inputs, limits, windows, chosen)
    if chosen == "native":
        out = native.attend(plan, params, before, after, body, inputs, limits)
    else:
        out = streaming.attend(plan, params, before, body, inputs, limits)
    return streaming.without_lost(plan, inputs.positions, out)


def quantize(
    codec: Codec,
    params: Tree,
    stats: Tree,
    rows: RowsBKTH,
    positions: PositionsBT,
    *,
    prefill: bool,
    chosen: Chosen,
) -> Tree:
    """Quantize whole blocks of rows at these positions, by the fused quantize-and-pack kernel where
    fused kernels are `chosen` and the codec has one.

    The codes are those of `codec.quantize`, except where an element lies midway between two levels,
    or nearly: there XLA may choose the other one (pallas_kernels/quantize/kernel.py).
    """
    job = codec.kernel_job(stats, prefill=prefill) if isinstance(chosen, Launch) else None
    if not isinstance(chosen, Launch) or job is None:
        return codec.quantize_at(params, stats, rows, positions, prefill=prefill)
    return _fused().quantize(codec, job, rows, chosen)


def store_blocks(
    block: Tree, stored: Tree, values: Tree, first: LengthsB, count: LengthsB, chosen: Chosen
) -> Tree:
    """Write blocks as `arrays.stored.store_blocks` does, by the C++ kernel where that is
    `chosen`."""
    store = native.store_blocks if chosen == "native" else stored_arrays.store_blocks
    return store(block, stored, values, first, count)


def append_token(
    plan: LayerPlan,
    params: Tree,
    state: LayerState,
    rows: Sequence[RowsBKTH],
    start: LengthsB,
    total: LengthsB,
    inputs: LayerInputs,
    limits: PositionsBT | None,
    chosen: Chosen,
) -> tuple[LayerState | None, tuple[bool, ...], Tree]:
    """Return the state with the token in the windows that each row has where total > start; which
    bodies have what leaves them; and, with limits, what `attend` takes of the windows: all in one
    launch. None and none where no fused kernels are chosen.
    """
    if not isinstance(chosen, Launch):
        return None, (False,) * len(plan.codecs), None
    return _fused().append_token(plan, params, state, rows, start, total, inputs, limits, chosen)


def _fused() -> types.ModuleType:
    """Import the module that calls kernels. That fails without Triton, so nothing above imports
    it."""
    from kvq_jax.attention import fused

    return fused

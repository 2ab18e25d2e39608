"""Choose the code that reads a layer's body in a decode step, attends to a prompt and, on a GPU,
quantizes the blocks that age into the body.

A caller asks for one of

    None       the fused kernels on a GPU and the native kernel on a CPU if they serve the layer
               (`unsupported`), else XLA. The platform is the one that the program is compiled for
    "xla"      the streaming path, everywhere
    "pallas"   the fused kernels for GPUs; ValueError, with the reason, if they cannot run
    "native"   the C++ kernel for CPUs; ValueError, with the reason, if it cannot run
    a Launch   the fused kernels with these options on any device, for tests (interpret=True) and
               for compilation ahead of time

`choose` turns that into a `Route`, once for a layer and call. Fused kernels are imported only if
one is launched: XLA and CPUs do without Pallas.
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
from cpu_kernels.library import prompts_attended as prompts_attended
from kvq_jax.arrays import stored as stored_arrays
from kvq_jax.attention import arithmetic, cudnn, native, prompt, streaming
from kvq_jax.codecs.codec import Codec, TokensAt
from kvq_jax.codecs.kernel_readers import Reader
from kvq_jax.codecs.kernels import KernelJob
from kvq_jax.layer.plan import LayerPlan, LayerState, Sides
from kvq_jax.types.array_types import LayerInputs, LengthsB, PositionsBT, QueryBNTH, RowsBKTH, Tree
from pallas_kernels.launch import LAUNCH, Launch

Kernels: TypeAlias = Literal["pallas", "native"]


@dataclasses.dataclass(frozen=True)
class Route:
    """The implementation that reads and writes the body of one layer in one call.

    Attributes:
        name: "xla", "native" or "pallas".
        launch: the options of the fused kernels, for "pallas".
        prompts: the code that attends to prompts. Each leaves to XLA what it does not serve.
        only_on: the platform that it serves, if a program may also be compiled for others. XLA
            serves those. None if it serves every platform that the program is compiled for.
    """

    name: Literal["xla", "native", "pallas"]
    launch: Launch | None = None
    prompts: Literal["xla", "native", "cudnn"] = "xla"
    only_on: Literal["cpu", "cuda"] | None = None


XLA = Route("xla")
NATIVE = Route("native", prompts="native")
NATIVE_PROMPTS = Route("xla", prompts="native", only_on="cpu")
CUDNN_PROMPTS = Route("xla", prompts="cudnn", only_on="cuda")
Implementation: TypeAlias = Literal["xla", "pallas", "native"] | Launch | None

MAX_NATIVE_TOKENS = 32  # new tokens of a row in one step
OLDEST = 8.0  # the first compute capability with the tensor-core types and asynchronous loads


def unsupported(
    plan: LayerPlan, query_heads: int, tokens: int, kernels: Kernels = "pallas"
) -> str | None:
    """Return, in one line, why none of these kernels can serve this layer's decode steps, or None
    if one can. The device is not considered."""
    if plan.lse:
        return "kernels return no log-sum-exp"
    if kernels == "native":
        return _unsupported_native(plan, tokens)
    return _unsupported_fused(plan, query_heads, tokens)


def _unsupported_native(plan: LayerPlan, tokens: int) -> str | None:
    if tokens > MAX_NATIVE_TOKENS:
        return f"{tokens} new tokens in one step; CPU kernels take up to {MAX_NATIVE_TOKENS}"
    if plan.joint:
        return (
            f"{type(plan.k).__name__} reads keys and values from the same rows, which no CPU kernel"
            " does"
        )
    for name, codec in zip("kv", (plan.k, plan.v), strict=True):
        body = codec.kernels.native()
        if isinstance(body, str):
            return f"{name}: {body}"
        if body.rotated and plan.regions.shards > 1:
            return (
                f"{name}: keys before RoPE in a body that is dealt out to shards; kernels rotate"
                " runs of neighbouring tokens"
            )
    return None


def _unsupported_fused(plan: LayerPlan, query_heads: int, tokens: int) -> str | None:
    if (reason := triton_unsupported(plan)) and (
        other := arithmetic.mosaic_unsupported(plan, query_heads)
    ):
        return f"{reason}. Mosaic GPU does not read it here: {other}"
    if tokens != 1:
        return f"{tokens} new tokens in one step; kernels take one"
    channels = plan.head_dim
    maximum = 16 if channels <= 128 else 8  # as many as fit a program's registers
    if query_heads // plan.heads > maximum:
        return (
            f"{query_heads // plan.heads} query heads for each KV head; kernels take up to"
            f" {maximum} at head dim {channels}"
        )
    readers: list[Reader] = []
    for name, codec in zip("kv", (plan.k, plan.v), strict=True):
        reader = codec.kernels.reader()
        if isinstance(reader, str):
            return f"{name}: {reader}"
        readers.append(reader)
        if plan.attention.window is not None and not reader.reads_windows:
            return (
                f"{name}: outliers or runs of channels in a layer with a window; kernels read"
                " neither there"
            )
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
    tile = max(reader.min_tile for reader in readers)
    if plan.regions.held_capacity < tile:
        return f"the body holds {plan.regions.held_capacity} tokens, fewer than one tile of {tile}"
    return None


@functools.cache
def no_triton() -> str | None:
    """Return, in one line, why this JAX has no kernels by Triton, or None if it has them."""
    try:
        importlib.import_module("jax.experimental.pallas.triton")
    except ImportError:
        return (
            "kernels need jax.experimental.pallas.triton, which cannot be imported from JAX"
            f" {jax.__version__}: JAX 0.10.2 to 0.12 have it (pip install 'jax<0.13')"
        )
    return None


def triton_unsupported(plan: LayerPlan) -> str | None:
    """Return, in one line, why Triton's kernels do not read this layer's body, or None if they read
    whatever kernels do."""
    if reason := no_triton():
        return reason
    for name, codec in zip("kv", plan.codecs, strict=False):
        reader = codec.kernels.reader()
        if not isinstance(reader, str) and reader.off_triton:
            return f"{name}: {reader.off_triton}"
    return None


def no_device(kernels: Kernels = "pallas") -> str | None:
    """Return, in one line, why this process cannot run these kernels, or None if it can."""
    backend = jax.default_backend()
    if kernels == "native":
        if backend == "cpu":
            return unavailable()
        return f"native kernels need a CPU, this process runs on {backend}"
    if backend != "gpu":
        return f"kernels need a GPU, this process runs on {backend}"
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", ""))  # such as 9.0; for AMD gfx942
    if not re.fullmatch(r"\d+\.\d+", capability) or float(capability) < OLDEST:
        return (
            f"kernels need an NVIDIA GPU of compute capability {OLDEST} or later, this is"
            f" {device.device_kind} ({capability})"
        )
    if jax.__version_info__ >= (0, 11) and not device.device_kind.startswith("NVIDIA"):
        # Pallas reads the architecture from the name, and raises for virtual GPUs ("GRID A100-10C")
        return (
            f"JAX {jax.__version__} compiles kernels for GPUs whose name begins with NVIDIA, this"
            f" is {device.device_kind}; JAX 0.10 compiles them for virtual GPUs too"
        )
    return None


def choose(implementation: Implementation, plan: LayerPlan, query_heads: int, tokens: int) -> Route:
    """Return the route of a layer. Raise ValueError, with the reason, if a named implementation
    cannot run."""
    if implementation is None:
        return _automatic(plan, query_heads, tokens)
    if implementation == "xla":
        return XLA
    if isinstance(implementation, Launch):
        reason = unsupported(plan, query_heads, tokens)
        if implementation.route == "triton":
            reason = reason or triton_unsupported(plan)
        if reason:
            raise ValueError(f"no kernel for this cache: {reason}")
        return _by_kernels(implementation)
    if implementation not in ("pallas", "native"):
        raise ValueError(f"{implementation=}: choose 'xla', 'pallas' or 'native'")
    if reason := obstacle(implementation, plan, query_heads, tokens):
        raise ValueError(f"{implementation=} cannot run: {reason}")
    return NATIVE if implementation == "native" else _by_kernels(_launch(plan, query_heads))


def _by_kernels(launch: Launch) -> Route:
    return Route("pallas", launch, prompts="xla" if launch.interpret else "cudnn")


def _automatic(plan: LayerPlan, query_heads: int, tokens: int) -> Route:
    kernels = _kernels_here()
    if no_device(kernels):
        return XLA
    if obstacle(kernels, plan, query_heads, tokens):
        return NATIVE_PROMPTS if kernels == "native" else CUDNN_PROMPTS
    # A process may also compile for other platforms than its first device's, such as for a GPU or a
    # TPU that it does not have, or for its CPU.
    if kernels == "native":
        return dataclasses.replace(NATIVE, only_on="cpu")
    route = _by_kernels(_launch(plan, query_heads))
    return route if LAUNCH.interpret else dataclasses.replace(route, only_on="cuda")


def _launch(plan: LayerPlan, query_heads: int) -> Launch:
    """Return the options of kernels that can serve this layer: in assembly, and by Mosaic GPU, if
    their self-tests have passed on this kind of device."""
    if LAUNCH.interpret:
        return LAUNCH
    return dataclasses.replace(
        LAUNCH,
        arithmetic=arithmetic.arithmetic_of(plan, query_heads),
        route=arithmetic.route_of(plan, query_heads),
    )


def obstacle(kernels: Kernels | None, plan: LayerPlan, query_heads: int, tokens: int) -> str | None:
    """Return, in one line, why these kernels (default: the ones for this process's device) do not
    read this layer, or None if they do."""
    kernels = kernels or _kernels_here()
    reason = no_device(kernels) or unsupported(plan, query_heads, tokens, kernels)
    if reason or kernels == "native" or not (missing := triton_unsupported(plan)):
        return reason
    if LAUNCH.interpret:
        return missing if LAUNCH.route == "triton" else None
    other = arithmetic.mosaic_unavailable(plan, query_heads)
    return other and f"{missing}. Mosaic GPU does not read it on this GPU: {other}"


def _kernels_here() -> Kernels:
    return "native" if jax.default_backend() == "cpu" else "pallas"


def kernels_here() -> str:
    """Return, in one line, the kernels that this process can run, or why it can run none."""
    kernels = _kernels_here()
    if reason := no_device(kernels):
        return f"none: {reason}"
    return f"native, compiled for {instruction_set()}" if kernels == "native" else "pallas"


def arithmetic_here(plans: Sequence[LayerPlan], query_heads: int) -> str:
    """Return, in one line, the arithmetic of fused kernels in the layers of these plans that they
    serve, and the result of the self-test."""
    if reason := no_device("pallas"):
        return f"not tested: {reason}"
    served = [plan for plan in plans if not unsupported(plan, query_heads, 1)]
    return arithmetic.describe_arithmetic(served, query_heads)


def route_here(plans: Sequence[LayerPlan], query_heads: int) -> str:
    """Return, in one line, the route of fused kernels to a GPU in the layers of these plans that
    they serve, and why."""
    if reason := no_device("pallas"):
        return f"not tested: {reason}"
    served = [plan for plan in plans if not unsupported(plan, query_heads, 1)]
    return arithmetic.describe_routes(served, query_heads)


def attend(
    plan: LayerPlan,
    params: Tree,
    before: LayerState,
    after: LayerState,
    body: Sides,
    inputs: LayerInputs,
    limits: PositionsBT,
    windows: Tree,
    route: Route,
) -> QueryBNTH:
    """Attend as `streaming.attend` does, with NaN past the capacity, and let the route read the
    body.

    before, after: the state without and with the new tokens.
    windows: the attention over the windows, if `append_token` computed it.
    """
    if route.launch:
        return _fused().attend(plan, params, after, body, inputs, limits, windows, route.launch)
    if route.name == "native":
        out = native.attend(plan, params, before, after, body, inputs, limits)
    else:
        out = streaming.attend(plan, params, before, body, inputs, limits)
    return streaming.without_lost(plan, inputs, out, before.floor)


def attend_prompt(
    plan: LayerPlan,
    params: Tree,
    before: LayerState,
    body: Sides,
    inputs: LayerInputs,
    limits: PositionsBT,
    route: Route,
) -> QueryBNTH:
    """Attend as `streaming.attend` does, with NaN past the capacity, for the tokens of a prompt,
    which all see the same body. before: the state without them."""
    by = {"xla": streaming.attend, "native": prompt.attend, "cudnn": cudnn.attend}
    out = by[route.prompts](plan, params, before, body, inputs, limits)
    return streaming.without_lost(plan, inputs, out, before.floor)


def quantize(
    codec: Codec, params: Tree, stats: Tree, rows: RowsBKTH, at: TokensAt, route: Route
) -> Tree:
    """Quantize whole blocks of rows, by the fused quantize-and-pack kernel if the route and the
    codec have one.

    The codes equal the ones from `codec.quantize`, except for elements at or near the midpoint of
    two levels: XLA may choose the other level (pallas_kernels/quantize/kernel.py).
    """
    if route.launch:
        job = codec.kernels.writer(params, stats, at.prefill)
        if isinstance(job, KernelJob):
            return _fused().quantize(codec, job, rows, route.launch)
    return codec.quantize(params, stats, rows, at)


def store_blocks(
    block: Tree, stored: Tree, values: Tree, first: LengthsB, count: LengthsB, route: Route
) -> Tree:
    """Write blocks as `arrays.stored.store_blocks` does, by the C++ kernel if it is chosen."""
    native_writes = route.name == "native"
    store = native.store_blocks if native_writes else stored_arrays.store_blocks
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
    route: Route,
) -> tuple[LayerState | None, tuple[bool, ...], Tree]:
    """Append the new token of each row with total > start, in one launch.

    Returns:
        The new state, or None if no fused kernel is chosen.
        Whether each body was written too.
        The attention over the windows, for `attend`, if `limits` is given.
    """
    if not route.launch:
        return None, (False,) * len(plan.codecs), None
    return _fused().append_token(
        plan, params, state, rows, start, total, inputs, limits, route.launch
    )


def _fused() -> types.ModuleType:
    """Import the module that calls GPU kernels, which XLA and CPUs do without."""
    from kvq_jax.attention import fused

    return fused

"""The choice between XLA and fused kernels, which read a layer's body in a decode step and quantize the blocks that age into it.

None       a kernel where the process runs on a GPU and `unsupported` finds no obstacle, else XLA
"xla"      the streaming path, everywhere
"pallas"   the kernel; ValueError with the reason where it cannot run
a Launch   the kernel, launched with these options whatever the device: for tests (interpret=True) and compilation ahead of time

Kernels are imported only when one is needed: the Triton route of Pallas is deprecated since JAX 0.11, and XLA does without it.
"""

from __future__ import annotations

import functools
import importlib
import re
import types
from typing import Literal, TypeAlias

import jax

from kvq_jax.array_types import LayerInputs, PositionsBT, QueryBNTH, RowsBKTH, Tree
from kvq_jax.attention import streaming
from kvq_jax.codecs.base import Codec
from kvq_jax.layer.plan import LayerPlan, LayerState, Sides
from pallas_kernels.launch import LAUNCH, Launch
from pallas_kernels.tiles.layout import SPAN

Implementation: TypeAlias = Literal["xla", "pallas"] | Launch | None
OLDEST = 8.0  # the first compute capability with the tensor-core types and asynchronous loads that the kernels use


def unsupported(plan: LayerPlan, query_heads: int, tokens: int) -> str | None:
    """Return, in one line, why no kernel can serve this layer's decode steps; None where one can. The device is not considered."""
    if reason := no_triton():
        return reason
    if tokens != 1:
        return f"{tokens} new tokens in one step; kernels take one"
    channels = plan.head_dim
    most = 16 if channels <= 128 else 8  # what a program's registers hold
    if query_heads // plan.heads > most:
        return f"{query_heads // plan.heads} query heads for each KV head; kernels take up to {most} at head dim {channels}"
    for name, codec in zip("kv", (plan.k, plan.v), strict=True):
        reader = codec.kernel_reader()
        if isinstance(reader, str):
            return f"{name}: {reader}"
        specs = jax.tree.leaves(codec.body(1, plan.heads, plan.regions.body_capacity))
        together = (axis.per for spec in specs for axis in spec.axes if axis.name == "kv_heads")
        shared = next((heads for heads in together if heads not in (1, plan.heads)), None)
        if shared:
            return f"{name}: groups of {shared} heads; kernels serve groups of one head or of all"
    if plan.regions.body_capacity < SPAN:
        return f"the body holds {plan.regions.body_capacity} tokens, fewer than one tile of {SPAN}"
    return None


@functools.cache
def no_triton() -> str | None:
    """Return, in one line, why kernels cannot be imported; None where they can."""
    try:
        importlib.import_module("jax.experimental.pallas.triton")
    except ImportError:
        return f"kernels need jax.experimental.pallas.triton, which cannot be imported from JAX {jax.__version__}"
    return None


def no_device() -> str | None:
    """Return, in one line, why this process's device cannot run kernels; None where it can."""
    if jax.default_backend() != "gpu":
        return f"kernels need a GPU, this process runs on {jax.default_backend()}"
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", ""))  # such as 9.0; for AMD gfx942
    if not re.fullmatch(r"\d+\.\d+", capability) or float(capability) < OLDEST:
        return f"kernels need an NVIDIA GPU of compute capability {OLDEST} or later, this is {device.device_kind} ({capability})"
    return None


def choose(implementation: Implementation, plan: LayerPlan, query_heads: int, tokens: int) -> Launch | None:
    """Return the options to launch the kernel with, or None for XLA. Raises ValueError where a named implementation cannot run."""
    if implementation == "xla" or (implementation is None and no_device()):
        return None
    reason = unsupported(plan, query_heads, tokens)
    if isinstance(implementation, Launch):
        if reason:
            raise ValueError(f"no kernel for this cache: {reason}")
        return implementation
    if implementation not in (None, "pallas"):
        raise ValueError(f"{implementation=}: choose 'xla' or 'pallas'")
    reason = reason or no_device()
    if implementation == "pallas" and reason:
        raise ValueError(f"implementation='pallas' cannot run: {reason}")
    return None if reason else LAUNCH


def attend(
    plan: LayerPlan,
    params: Tree,
    windows: LayerState,
    body: Sides,
    inputs: LayerInputs,
    limits: PositionsBT,
    launch: Launch | None,
) -> QueryBNTH:
    """Attend as `streaming.attend` does; a kernel reads the body if `launch` (from `choose`) is given."""
    read_body = streaming.read_chunks if launch is None else functools.partial(_fused().read_body, launch)
    return streaming.attend(plan, params, windows, body, inputs, limits, read_body)


def quantize(codec: Codec, params: Tree, stats: Tree, rows: RowsBKTH, *, prefill: bool, launch: Launch | None) -> Tree:
    """Quantize whole blocks of rows, by the fused quantize-and-pack kernel where `launch` asks for kernels and the codec has one.

    The codes are those of `codec.quantize`, except where an element lies midway between two levels, or nearly: there XLA may choose the
    other one (pallas_kernels/quantize/kernel.py).
    """
    job = None if launch is None else codec.kernel_job(stats, prefill=prefill)
    if launch is None or job is None:
        return codec.quantize(params, stats, rows, prefill=prefill)
    return _fused().quantize(codec, job, rows, launch)


def _fused() -> types.ModuleType:
    """Import the module that calls kernels. That fails without Triton, so nothing above imports it."""
    from kvq_jax.attention import fused

    return fused

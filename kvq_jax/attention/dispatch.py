"""Which implementation reads the body of a layer in a decode step, and quantizes what ages into it: XLA, or a fused kernel.

None       a kernel where the process runs on a GPU and `unsupported` finds no obstacle, else XLA
"xla"      the streaming path, everywhere
"pallas"   the kernel; ValueError with the reason where it cannot run
a Launch   the kernel, launched in just this way, whatever the device: for tests (interpret=True) and compilation ahead of time
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import TYPE_CHECKING, Literal, TypeAlias

import jax
from jaxtyping import Array

from kvq_jax.array_types import LayerInputs, PositionsBT, QueryBNTH, RowsBKTH, Tree
from kvq_jax.arrays.grouped_array import GroupedArray
from kvq_jax.attention import online_softmax, streaming
from kvq_jax.codecs.base import Codec
from pallas_kernels.decode_attention.kernel import decode_attention
from pallas_kernels.launch import LAUNCH, Launch
from pallas_kernels.quantize.kernel import quantize_rows
from pallas_kernels.readers.base import Side
from pallas_kernels.readers.grouped import Grouped
from pallas_kernels.readers.rotary import Rotated
from pallas_kernels.tiles.tile import SPAN

if TYPE_CHECKING:
    from kvq_jax.layer.plan import LayerPlan, LayerState, Sides

Implementation: TypeAlias = Literal["xla", "pallas"] | Launch | None
OLDEST = 8.0  # compute capability of NVIDIA's GPUs whose tensor cores and asynchronous loads the kernels use


def unsupported(plan: LayerPlan, query_heads: int, tokens: int) -> str | None:
    """Why no kernel can serve this layer's decode steps, in one line; None where one can. Says nothing of the device."""
    if tokens != 1:
        return f"{tokens} new tokens in one step; kernels take one"
    channels = plan.head_dim
    most = 16 if channels <= 128 else 8  # what a program's registers hold
    if query_heads // plan.heads > most:
        return f"{query_heads // plan.heads} query heads for each KV head; kernels take up to {most} at head dim {channels}"
    for name, codec in zip("kv", (plan.k, plan.v), strict=True):
        side = codec.kernel_side()
        if isinstance(side, str):
            return f"{name}: {side}"
        specs = jax.tree.leaves(codec.body(1, plan.heads, plan.regions.body_capacity))
        together = (axis.per for spec in specs for axis in spec.axes if axis.name == "kv_heads")
        shared = next((heads for heads in together if heads not in (1, plan.heads)), None)
        if shared:
            return f"{name}: groups of {shared} heads; kernels serve groups of one head or of all"
    if plan.regions.body_capacity < SPAN:
        return f"the body holds {plan.regions.body_capacity} tokens, fewer than one tile of {SPAN}"
    return None


def no_device() -> str | None:
    """Why this process's device runs no kernels, in one line; None where it does."""
    if jax.default_backend() != "gpu":
        return f"kernels need a GPU, this process runs on {jax.default_backend()}"
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", ""))  # 9.0, and of other makers gfx942, say
    if not re.fullmatch(r"\d+\.\d+", capability) or float(capability) < OLDEST:
        return f"kernels need an NVIDIA GPU of compute capability {OLDEST} or later, this is {device.device_kind} ({capability})"
    return None


def choose(implementation: Implementation, plan: LayerPlan, query_heads: int, tokens: int) -> Launch | None:
    """How to launch the kernel, or None for XLA. ValueError where a named implementation cannot run."""
    if implementation == "xla":
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
    how: Launch | None,
) -> QueryBNTH:
    """`streaming.attend`; the body is read by the kernel where `how` (from `choose`) launches it."""
    reader = streaming.read_chunks if how is None else functools.partial(_read_packed, how)
    return streaming.attend(plan, params, windows, body, inputs, limits, reader)


def quantize(codec: Codec, params: Tree, stats: Tree, rows: RowsBKTH, *, prefill: bool, how: Launch | None) -> Tree:
    """`codec.quantize`, by the fused quantize-and-pack kernel where `how` launches kernels and the codec has one. The codes are the same,
    except where an element lies midway between two levels, or nearly: there XLA may choose the other one
    (pallas_kernels/quantize/kernel.py)."""
    job = None if how is None else codec.kernel_job(stats, prefill=prefill)
    if how is None or job is None:
        return codec.quantize(params, stats, rows, prefill=prefill)
    format, scheme, divisor = job
    side = codec.kernel_side()
    side = side.inner if isinstance(side, Rotated) else side
    assert isinstance(side, Grouped), "codecs with a kernel to quantize have uniform groups"
    packed = quantize_rows(rows, side, scheme, format.bits, divisor=divisor, how=how)
    return GroupedArray(packed.words, packed.scale, packed.zero, format)


def _read_packed(
    how: Launch, view: streaming.View, queries: streaming.Queries, rows: Array, part: online_softmax.Part
) -> online_softmax.Part:
    plan = view.plan
    query = plan.k.query(view.params[0], view.stats[0], rows)
    key_side, value_side = (codec.kernel_side() for codec in plan.codecs)
    assert isinstance(key_side, Side), "`choose` found the kernel unsupported"
    assert isinstance(value_side, Side), "`choose` found the kernel unsupported"
    keys, values = (codec.kernel_arrays(p, b) for codec, p, b in zip(plan.codecs, view.params, view.body, strict=True))
    if isinstance(key_side, Rotated):
        if view.rope is None:
            raise ValueError("keys cached before RoPE need the model's rope to be read: it is None")
        key_side = dataclasses.replace(key_side, sink=plan.regions.sink)
        keys = [*keys, view.rope.inverse_frequencies, view.rope.attention_factor]
    found = decode_attention(
        query,
        (key_side, keys),
        (value_side, values),
        queries.limits[:, 0],
        capacity=plan.regions.body_capacity,
        how=how,
    )
    return online_softmax.merge(part, online_softmax.Part(*found))

"""Layers with sliding windows for tests: sequences with sinks, layers whose body wraps around, and
the codes that such a body still holds."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvq_jax as kvq
from kvq_jax.layer.attention import Attention
from kvq_jax.layer.plan import LayerPlan, LayerState
from tests.kvq_jax.layer_runs import CAPACITY, DIMS, STEP, Sequences, sequences

WINDOW = 20  # sequences are four and a half of these long
SPECIAL = Attention(window=WINDOW, scale=0.3, soft_cap=4.0, sinks=True)
SINKS = np.linspace(-1, 3, DIMS.num_attention_heads).astype(np.float32)


class WithSinks(Sequences):
    """Sequences of a layer whose attention has sinks."""

    def window(self, *arguments: Any, **options: Any) -> kvq.types.LayerInputs:
        return dataclasses.replace(super().window(*arguments, **options), sinks=jnp.asarray(SINKS))


@functools.cache
def tokens_with_sinks(seed: int = 0) -> WithSinks:
    plain = sequences(seed=seed)
    return WithSinks(*(getattr(plain, field.name) for field in dataclasses.fields(plain)))


def windowed_plan(spec: str, attention: Attention = SPECIAL, slack: int = STEP) -> LayerPlan:
    """Return the plan of a layer with this attention. It has no sink, as windowed layers. With a
    slack beyond the capacity, a windowed layer's body does not wrap around."""
    dims = dataclasses.replace(DIMS, attention=(attention,) * DIMS.num_hidden_layers)
    without_sink = dataclasses.replace(kvq.parse(spec), sink=0)
    plan = kvq.cache.layout(without_sink, dims, 8, CAPACITY, "float32").plans[-1]
    if plan.regions.window is not None:
        plan = dataclasses.replace(plan, regions=dataclasses.replace(plan.regions, slack=slack))
        assert plan.regions.wraps == (slack < CAPACITY)
    return plan


def empty(
    spec: str, attention: Attention = SPECIAL, slack: int = STEP
) -> tuple[LayerPlan, LayerState]:
    """Return a `windowed_plan` and the layer's part of a new cache."""
    plan = windowed_plan(spec, attention, slack)
    return plan, plan.init(8, "float32")


def held_codes(
    plan: LayerPlan, state: LayerState, lengths: np.ndarray, slack: int = STEP
) -> dict[str, np.ndarray]:
    """Return what a body has of the blocks that one with this window and slack still holds, by
    array, row and block."""
    block, found = plan.regions.block, {}
    held = dataclasses.replace(plan.regions, window=WINDOW, slack=slack).block_slots
    slots = plan.regions.block_slots
    for name, codec, stored in zip(plan.names, plan.codecs, state.body, strict=True):
        specs = jax.tree_util.tree_leaves_with_path(codec.body(1, 1, block))
        for (path, spec), array in zip(specs, jax.tree.leaves(stored), strict=True):
            entries = spec["tokens"].size
            values = np.moveaxis(np.asarray(array), (0, spec.axis("tokens")), (0, 1))
            for row, length in enumerate(lengths):
                newest = plan.regions.aged_tokens(int(length)) // block
                for at in range(max(newest - held, 0), newest):
                    first = at % slots * entries
                    key = f"body.{name}{jax.tree_util.keystr(path)}[{row}, {at}]"
                    found[key] = values[row, first : first + entries]
    return found

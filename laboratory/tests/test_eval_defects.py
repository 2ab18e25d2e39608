"""Steps of the default length show a defect that steps of whole blocks hide.

The defect is in a layer's plan, whose regions every cache uses, so all programs are compiled with
it.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

import kvq_jax as kvq
from kvq_jax.layer.regions import Regions
from kvq_tools import evaluate
from kvq_tools.evaluation.defaults import STEP
from tests.kvq_models.checkpoints import random_llama, tiny_config

SPEC = kvq.parse("kivi:bits=4,recent=8,block=8")


class OneBlockLate(Regions):
    """Blocks age when the ring has already lost their first tokens. Static sizes are as they should
    be."""

    def body(self, n):
        found = super().body(n)
        return found if isinstance(n, int) else jnp.maximum(found - self.block, 0)


class LateSpec(kvq.cache.CacheSpec):
    """A spec whose layers age one block too late."""

    def layer(self, *arguments):
        plan = super().layer(*arguments)
        return dataclasses.replace(plan, regions=remade(OneBlockLate, plan.regions))


def remade(kind, base):
    """Return the same dataclass with other behaviour. Programs are compiled for its class."""
    return kind(**{field.name: getattr(base, field.name) for field in dataclasses.fields(base)})


def test_steps_of_the_default_length_see_what_steps_of_whole_blocks_hide():
    """At the end of a block the ring still holds the rows that this defect loses inside it. Odd
    steps end everywhere in a block."""
    llama = random_llama(tiny_config(num_hidden_layers=1, head_dim=16))
    ids = np.random.default_rng(0).integers(0, llama.config.vocab_size, 200)

    def divergence(spec: kvq.cache.CacheSpec, step: int) -> float:
        return evaluate(llama, spec, ids, window=64, stride=32, batch=8, step=step).mean_kl

    sound = divergence(SPEC, STEP)
    for step, seen in ((STEP, True), (4 * SPEC.block, False)):
        late = divergence(remade(LateSpec, SPEC), step)
        assert (late > 10 * sound) is seen, f"{step=}: KL {late} beside {sound}"

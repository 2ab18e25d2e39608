"""A wrong cache is caught: each defect, planted in an otherwise correct 4-bit cache, moves the
numbers by the factor stated here.

The defects are in a layer's plan, whose codecs and regions every cache uses, so all programs are
compiled with them.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.codecs.grouped import GroupedCodec
from kvq_jax.layer.regions import Regions
from kvq_jax.types.rope import rotate
from kvq_tools import evaluate_caches
from kvq_tools.evaluation.defaults import STEP
from tests.kvq_models.checkpoints import random_llama, tiny_config

SPEC = kvq.parse("kivi:bits=4,recent=8,block=8")


class KeysStoredAsValues(GroupedCodec):
    def rows(self, params, inputs):
        return inputs.k_rot


class ScaleOfTheNextGroup(GroupedCodec):
    """The groups of one channel of one head have their neighbours' scale."""

    def quantize(self, params, stats, rows, at):
        body = super().quantize(params, stats, rows, at)
        return dataclasses.replace(
            body, scale=body.scale.at[:, 0, :, 0].set(body.scale[:, 0, :, 1])
        )


class OnePositionOn(GroupedCodec):
    """Keys are rotated as if they stood one token later."""

    def rows(self, params, inputs):
        return rotate(super().rows(params, inputs), jnp.ones_like(inputs.positions), inputs.rope)


class OneBlockLate(Regions):
    """Blocks age when the ring has already lost their first tokens. Static sizes are as they should
    be."""

    def body(self, n):
        found = super().body(n)
        return found if isinstance(n, int) else jnp.maximum(found - self.block, 0)


def remade(kind, base):
    """Return the same dataclass with other behaviour. Programs are compiled for its class."""
    return kind(**{field.name: getattr(base, field.name) for field in dataclasses.fields(base)})


DEFECTS = {
    "none": lambda plan: plan,
    "V read as K": lambda plan: dataclasses.replace(plan, v=remade(KeysStoredAsValues, plan.v)),
    "a scale shifted by one group": lambda plan: dataclasses.replace(
        plan, k=remade(ScaleOfTheNextGroup, plan.k)
    ),
    "ageing off by one block": lambda plan: dataclasses.replace(
        plan, regions=remade(OneBlockLate, plan.regions)
    ),
    "RoPE off by one position": lambda plan: dataclasses.replace(
        plan, k=remade(OnePositionOn, plan.k)
    ),
}
# at least so many times the KL of the correct cache, and at most this agreement; the correct
# cache's is 89 %
CAUGHT = {
    "V read as K": (100, 0.2),
    "a scale shifted by one group": (1.6, 0.87),
    "ageing off by one block": (30, 0.5),
    "RoPE off by one position": (10, 0.7),
}


@dataclasses.dataclass(frozen=True)
class PlantedSpec(kvq.cache.CacheSpec):
    """A spec whose layers have a defect."""

    defect: str = "none"

    def layer(self, *arguments):
        return DEFECTS[self.defect](super().layer(*arguments))


def planted(defect):
    return PlantedSpec(
        **{field.name: getattr(SPEC, field.name) for field in dataclasses.fields(SPEC)},
        defect=defect,
    )


@pytest.fixture(scope="module")
def scene():
    llama = random_llama(tiny_config(num_hidden_layers=1, head_dim=16))
    return llama, np.random.default_rng(0).integers(0, llama.config.vocab_size, 200)


def run(scene, defects, **options):
    llama, ids = scene
    found = evaluate_caches(
        [(llama, planted(defect)) for defect in defects],
        ids,
        window=64,
        stride=32,
        batch=8,
        **options,
    )
    return dict(zip(defects, found, strict=True))


@pytest.fixture(scope="module")
def single_steps(scene):
    return run(scene, list(DEFECTS), step=1)


def test_the_sound_cache_is_near_the_exact_model(single_steps):
    sound = single_steps["none"]
    assert sound.mean_kl == pytest.approx(0.0056, rel=0.1)
    assert sound.agreement == pytest.approx(0.89, abs=0.02)
    assert abs(np.log(sound.perplexity / sound.exact_perplexity)) < 0.01


@pytest.mark.parametrize("defect", CAUGHT)
def test_a_wrong_cache_is_caught(defect, single_steps):
    sound, wrong = single_steps["none"], single_steps[defect]
    factor, agreement = CAUGHT[defect]
    assert wrong.mean_kl > factor * sound.mean_kl, (
        f"{defect}: KL {wrong.mean_kl:.4f} beside {sound.mean_kl:.4f}"
    )
    assert wrong.agreement < agreement, (
        f"{defect}: agreement {wrong.agreement:.3f} beside {sound.agreement:.3f}"
    )
    moved = wrong.kl > 1e-3
    in_window = wrong.position <= SPEC.recent
    if defect in ("a scale shifted by one group", "ageing off by one block"):
        assert not moved[in_window].any(), (
            f"{defect}: nothing has left the windows of full precision yet"
        )
    assert moved[~in_window].mean() > 0.8, (
        f"{defect}: only {moved[~in_window].mean():.0%} of later tokens move"
    )


def test_steps_of_the_default_length_see_what_steps_of_whole_blocks_hide(scene, single_steps):
    """At the end of a block the ring still holds the rows that this defect loses inside it. Odd
    steps end everywhere in a block."""
    sound = single_steps["none"].mean_kl
    for step, seen in ((STEP, True), (4 * SPEC.block, False)):
        (wrong,) = run(scene, ["ageing off by one block"], step=step).values()
        assert (wrong.mean_kl > 10 * sound) is seen, f"{step=}: KL {wrong.mean_kl} beside {sound}"

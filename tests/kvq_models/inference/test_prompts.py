"""A prompt on a CPU goes through the programs of single layers, with the bits of one program of
them all."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_models import Llama, prepare
from kvq_models.inference import generation, prompts
from kvq_models.inference.prompts import by_layers, lowered_prompt, prompt_program, read_prompt
from kvq_models.llama.flat_llama import FlatLlama
from kvq_tools.cli.timed import compile_generation
from tests.exhaustive import some
from tests.kvq_models.checkpoints import random_llama, random_tokens, tiny_config

LENGTHS, CAPACITY = np.array([48, 31], np.int32), 96
WINDOWED_EXPERTS = tiny_config(
    "gpt_oss", num_local_experts=3, num_experts_per_tok=2, head_dim=16, sliding_window=8
)
KIVI, SQUAT = "kivi:bits=2,sink=0,recent=8,block=8", "squat:rank=3,sink=0,recent=8,block=8"
CASES = {
    "dense": (tiny_config(), "dense"),
    "statistics": (tiny_config(), SQUAT),
    "across layers": (tiny_config(), "xquant_cl:base_layer=0,block=8"),
    "windows, sinks and experts": (WINDOWED_EXPERTS, "kivi:bits=4,recent=8,block=8"),
    "no rotation in some": (tiny_config("smollm3", no_rope_layers=[1, 0]), KIVI),
}


@functools.cache
def model(name: str) -> Llama:
    config, spec = CASES[name]
    return prepare(random_llama(config), spec)


def new_cache(name: str) -> kvq.cache.Cache:
    return kvq.init_cache(CASES[name][1], CASES[name][0], 2, CAPACITY, "float32")


def differing(one: Any, other: Any) -> int:
    """Count the arrays of two trees that do not have the same bits."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return sum(np.asarray(a).tobytes() != np.asarray(b).tobytes() for a, b in pairs)


@pytest.mark.parametrize("name", some(CASES, ("statistics", "windows, sinks and experts")))
def test_layers_one_by_one_have_the_bits_of_one_program(name):
    """For padded rows, and for a prompt that goes on where another ended."""
    llama, tokens = model(name), random_tokens((2, 48))
    assert by_layers(llama, new_cache(name), tokens, LENGTHS), "there is nothing to compare"
    logits, cache = read_prompt(llama, new_cache(name), tokens, LENGTHS)
    expected, whole = prompt_program(llama, new_cache(name), tokens, LENGTHS)
    assert not differing((logits, cache), (expected, whole)), name
    more, few = tokens[:, :16], np.array([9, 0], np.int32)
    after, once = (
        read(llama, held, more, few, all_logits=True)
        for read, held in ((read_prompt, cache), (prompt_program, whole))
    )
    assert not differing(after, once), f"{name}: a second prompt"
    assert np.isnan(np.asarray(after[0])[0, 9:]).all(), "padding"
    assert np.isnan(np.asarray(after[0])[1]).all(), "a row without new tokens"
    fewer = prompt_program(llama, new_cache(name), tokens, LENGTHS - 1)
    assert differing(fewer[0], expected), "a shorter prompt has the same logits"


def test_equal_layers_have_one_program():
    llama = model("dense")
    assert len(llama.layers) == 2
    arguments = llama, new_cache("dense"), random_tokens((2, 48)), LENGTHS
    assert len(lowered_prompt(*arguments)) == 3, "the first, a layer and the logits"
    unlike = model("no rotation in some"), new_cache("no rotation in some"), *arguments[2:]
    assert len(lowered_prompt(*unlike)) == 4, "layers that differ have programs of their own"


def test_a_prompt_consumes_its_cache():
    cache = new_cache("dense")
    read_prompt(model("dense"), cache, random_tokens((2, 48)), LENGTHS)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache))


def test_a_prompt_in_a_callers_program_is_one_program():
    llama, tokens = model("dense"), random_tokens((2, 48))
    seen = []

    @jax.jit
    def callers(cache: kvq.cache.Cache) -> Any:
        seen.append(by_layers(llama, cache, tokens, LENGTHS))
        return read_prompt(llama, cache, tokens, LENGTHS)

    callers(new_cache("dense"))
    assert seen == [False]


def test_a_prompt_of_many_devices_is_one_program(monkeypatch):
    monkeypatch.setattr(prompts, "prompt_layers", None)
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]), "d")
    llama, config = model("dense"), CASES["dense"][0]
    placement = kvq.Placement(mesh, rows="d")
    cache = kvq.init_cache("dense", config, 2, CAPACITY, "float32", placement)
    logits, _ = read_prompt(llama, cache, random_tokens((2, 48)), LENGTHS)
    assert np.isfinite(np.asarray(logits)).all()


def test_what_is_compiled_ahead_is_all_that_a_generation_runs(compiled):
    llama, cache = model("statistics"), new_cache("statistics")
    settings = generation.generation_settings(8)
    tokens, lengths = jax.device_put((np.asarray(random_tokens((2, 48), seed=3)), LENGTHS))
    compile_generation(llama, cache, tokens, lengths, settings)
    ahead = len(compiled)
    assert ahead, "compilations are not counted"
    state = generation.start(llama, cache, tokens, lengths, settings)
    jax.block_until_ready(generation.advance(FlatLlama(llama), state, settings, jax.numpy.int32(8)))
    assert compiled[ahead:] == []

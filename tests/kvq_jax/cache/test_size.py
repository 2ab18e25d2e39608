"""Resident bytes: the cache, what its method adds to the model, and working memory, of an 8B
model."""

import dataclasses
from types import SimpleNamespace

import pytest

import kvq_jax as kvq
from kvq_jax.cache.cache import CacheDims

LLAMA_8B = CacheDims(32, 32, 8, 128, 4096)
CONTEXT = 32768
MIB = 2**20


def size(spec: str, batch: int = 1, dtype: str = "bfloat16") -> kvq.size.Size:
    return kvq.size.of(spec, LLAMA_8B, batch, CONTEXT, dtype)


@pytest.mark.parametrize(
    ("spec", "parameters", "working", "bits"),
    [
        ("xquant:bits=4", 128.25, 0, 4.81),  # 0.5 bits beside the 4.31 that are stored
        ("xquant_cl:bits=2", 704 + 2 / 128, 512, 7.385),  # 2.2 times smaller than bfloat16
        ("waterfill:bits=4", 16.8125, 0, 4.13),
        ("kivi:bits=4", 0, 0, 5.05),
        ("dense", 0, 0, 16.0),
    ],
)
def test_what_is_needed_beside_a_cache(spec: str, parameters: float, working: float, bits: float):
    counted = size(spec)
    assert counted.parameters == parameters * MIB
    assert counted.working == working * MIB
    assert counted.resident_bits == pytest.approx(bits, abs=0.006)


@pytest.mark.parametrize("spec", ["xquant_cl:bits=2", "waterfill:bits=4", "kivi:bits=4"])
def test_caches_and_working_memory_grow_with_the_batch_and_parameters_do_not(spec: str):
    one, many = size(spec), size(spec, 16)
    assert many.cache == 16 * one.cache
    assert many.working == 16 * one.working
    assert many.parameters == one.parameters
    assert many.elements == 16 * one.elements
    assert many.stored_bits == one.stored_bits == kvq.size.bits_per_element(spec, LLAMA_8B, CONTEXT)


def test_a_config_of_another_library_is_enough():
    config = SimpleNamespace(**dataclasses.asdict(LLAMA_8B))
    assert kvq.size.of("xquant:bits=4", config, 1, CONTEXT) == size("xquant:bits=4")

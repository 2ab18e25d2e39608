"""A program may be lowered for a platform that this process does not have, and holds no kernel of
the one that it has."""

import jax
import jax.numpy as jnp
import pytest

import kvq_jax as kvq
from cpu_kernels.library import TARGETS
from kvq_jax.attention import dispatch

DIMS = kvq.CacheDims(2, 4, 2, 32, 128)

pytestmark = pytest.mark.skipif(
    dispatch.no_device("native") is not None, reason="no native kernels in this process"
)


def calls(text):
    """Return how often a program names a kernel of the CPU."""
    return sum(text.count(target) for target in TARGETS)


def step_of(cache, implementation=None, *, prefill=False):
    """Return a step through all layers as a function of the cache's arrays, and its arguments."""
    arrays, structure = jax.tree.flatten(cache)
    tokens = 40 if prefill else 1
    q, k, v = (jnp.ones((1, heads, tokens, 32)) for heads in (4, 2, 2))

    def step(arrays, q, k, v):
        step = kvq.begin(
            structure.unflatten(arrays), tokens, prefill=prefill, implementation=implementation
        )
        for _ in range(DIMS.num_hidden_layers):
            q, step = kvq.append_and_attend(step, q, k, v)
        return q, jax.tree.leaves(kvq.finish(step))

    return jax.jit(step, donate_argnums=0), (arrays, q, k, v)


@pytest.fixture(scope="module")
def cache():
    return kvq.init_cache("kivi:bits=4,recent=32,block=32", DIMS, 1, 160, "float32")


@pytest.mark.parametrize("prefill", [False, True], ids=["decode", "prefill"])
def test_a_program_for_another_platform_has_no_cpu_kernel(cache, prefill):
    step, arguments = step_of(cache, prefill=prefill)
    traced = step.trace(*arguments)
    for platform in ("cuda", "tpu"):
        assert not calls(traced.lower(lowering_platforms=(platform,)).as_text()), platform
    exported = jax.export.export(step, platforms=("cuda", "tpu"))(*arguments)
    assert not calls(exported.mlir_module())
    for platforms in (("cpu",), ("cpu", "tpu")):
        assert calls(traced.lower(lowering_platforms=platforms).as_text()), platforms


def test_a_named_kernel_is_in_the_program_whatever_the_platform(cache):
    step, arguments = step_of(cache, "native")
    assert calls(step.trace(*arguments).lower(lowering_platforms=("tpu",)).as_text())


def test_the_choice_by_platform_costs_the_cpu_nothing(cache):
    """No branch, no copy, no memory: the program of a step is the one of the named kernel."""
    memory, counts = [], []
    for implementation in (None, "native", "xla"):
        step, arguments = step_of(cache, implementation)
        lowered = step.trace(*arguments).lower()
        compiled = lowered.compile()
        analysis = compiled.memory_analysis()
        memory.append((analysis.alias_size_in_bytes, analysis.temp_size_in_bytes))
        text = compiled.as_text()
        counts.append((calls(text), text.count(" copy("), text.count(" conditional(")))
    assert memory[0] == memory[1]
    assert counts[0] == counts[1] != counts[2]
    assert memory[0][0] >= kvq.size.nbytes(cache) - cache.lengths.nbytes, "the cache was copied"

"""The self-test that decides whether kernels run in assembly, with the emulator of PTX instead of a
GPU.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.attention import arithmetic
from kvq_jax.attention.arithmetic import format_of
from pallas_kernels import self_test
from pallas_kernels.launch import Launch
from tests.exhaustive import some
from tests.kvq_jax.attention.test_dispatch import DIMS, SPECS
from tests.pallas_kernels.emulator import INSTRUCTIONS, Emulated

SERVED = ("kivi:bits=4", *SPECS)


def format(spec: str) -> self_test.Format:
    return format_of(
        kvq.cache.layout(spec, DIMS, 1, 416, "bfloat16").plans[0], DIMS.num_attention_heads
    )


@pytest.mark.usefixtures("assembler")
@pytest.mark.parametrize("spec", some(SERVED, ("kivi:bits=4",)))
def test_right_assembly_passes(spec):
    assert self_test.difference(format(spec), Emulated()) is None


def test_appending_is_compared_too():
    outputs = self_test._outputs(format("kivi:bits=4"), self_test.INTERPRETED, None)
    arrays = [name for name in outputs if name.startswith("appended")]
    assert len(arrays) == 2 * 5, "of each side: sink, ring, words, scales and zero points"
    for name in ("attention over windows", *arrays):
        wrong = dict(outputs) | {name: 1.03 * outputs[name] + np.float32(1)}
        assert self_test._compare(wrong, outputs), f"{name} would pass"


@pytest.mark.exhaustive
@pytest.mark.usefixtures("assembler")
def test_right_assembly_passes_in_a_ring_with_a_soft_cap():
    ring = dataclasses.replace(format("kivi:bits=4"), windowed=True, soft_cap=5.0)
    assert self_test.difference(ring, Emulated()) is None
    plain = self_test._outputs(format("kivi:bits=4"), self_test.INTERPRETED, None)
    assert self_test._compare(self_test._outputs(ring, self_test.INTERPRETED, None), plain)


@pytest.mark.usefixtures("assembler")
def test_wrong_assembly_is_told_from_right(monkeypatch):
    """Shift by one bit more, as a compiler's mistake might: codes are wrong, and scores are still
    finite.
    """
    right = INSTRUCTIONS["lop3.b32"]
    monkeypatch.setitem(INSTRUCTIONS, "lop3.b32", lambda a, *rest: right(a >> np.uint32(1), *rest))
    reason = self_test.difference(format("kivi:bits=4"), Emulated())
    assert reason is not None
    assert "attention differs by" in reason


def test_kernels_that_cannot_run_are_no_comparison():
    """The compiler refuses assembly on a CPU."""
    with pytest.raises(ValueError, match="CPU"):
        self_test.difference(format("kivi:bits=4"), Launch("asm"), jax.devices("cpu")[0])


@pytest.mark.parametrize("spec", SERVED)
def test_every_format_has_random_arrays_that_its_reader_takes(spec):
    for reader in (format(spec).keys, format(spec).values):
        arrays = self_test.random_arrays(reader, np.random.default_rng(0))
        assert all(np.isfinite(a.astype(np.float64)).all() for a in arrays if a.dtype != np.uint16)
        assert len(reader.arrays([jnp.asarray(a) for a in arrays])) >= 1


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("route", ["triton", "mosaic"])
@pytest.mark.parametrize("spec", SERVED)
def test_kernels_pass_on_a_gpu(spec, route):
    plan = kvq.cache.layout(spec, DIMS, 1, 416, "bfloat16").plans[0]
    of_route = format_of(plan, DIMS.num_attention_heads, route)
    assert arithmetic.on_device(of_route, jax.devices()[0]) is None

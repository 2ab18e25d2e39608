"""Kernels without a loop over the cache compile for both GPUs; what they hold in registers is capped, not their instructions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from benchmarks.machine_code.compile import compile_for
from benchmarks.machine_code.sass import assemble
from benchmarks.machine_code.target import A100, H200
from benchmarks.machine_code.tools import missing
from kvq_jax.attention.kernel_sides import grouped
from kvq_jax.group_codec import GroupCodec
from kvq_jax.quantized import GroupFormat
from pallas_kernels._launch import Launch
from pallas_kernels.quantize import quantize_rows
from pallas_kernels.sides import Grouped

pytestmark = [pytest.mark.aot, pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing")]


@pytest.mark.parametrize("target", [H200, A100], ids=lambda target: target.name)
@pytest.mark.parametrize(
    ("scheme", "bits", "axis", "most_spills"),
    [
        ("sym", 2, "channels", 64),
        ("asym", 2, "channels", 64),
        ("hybrid", 2, "channels", 160),
        ("sym", 2, "tokens", 64),
        ("hybrid", 2, "tokens", 64),
    ],
)
def test_the_quantizer_compiles_within_its_registers(scheme, bits, axis, most_spills, target):
    side = grouped(GroupCodec("k", GroupFormat(bits, scheme, axis, 32, 128, 32)))
    assert isinstance(side, Grouped)
    rows = jax.ShapeDtypeStruct((2, 8, 1024, 128), jnp.bfloat16)
    program = compile_for(target, lambda rows: quantize_rows(rows, side, scheme, bits, how=Launch("asm")), (rows,))
    kernel = program.kernel(f"quantize_{scheme}_{axis}")
    assembly = assemble(kernel.ptx, kernel.name, target.architecture)
    assert assembly.spill_bytes <= most_spills, f"{assembly.registers} registers, {assembly.spill_bytes} bytes spilled"
    assert 32 < assembly.registers <= 255

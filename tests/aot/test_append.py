"""The kernel that appends a token compiles for both GPUs with every writer of blocks, updates in
place, and spills few registers.
"""

import jax
import jax.numpy as jnp
import pytest

import kvq_jax as kvq
from benchmarks.llama_8b import llama_config
from benchmarks.machine_code.compile import compile_for
from benchmarks.machine_code.launches import calibrated
from benchmarks.machine_code.sass import assemble
from benchmarks.machine_code.target import A100, H200
from kvq_jax.attention.fused import block_writer
from pallas_kernels.launch import Launch
from pallas_kernels.quantize.append import Blocks, Places, Side, append_token
from tests.exhaustive import some

WRITERS = (
    *(("kivi:bits=4", 0), ("innerq:bits=4,mode=asym", 0), ("innerq:bits=2", 1)),
    *(("k=polarquant+v=innerq:bits=4", 0), ("nf4", 1)),
    *(("kvquant:bits=4", 0), ("kvquant:bits=4", 1), ("kvquant:bits=3", 1)),
)
# Each takes seconds of a core, so the other target and array operations compile a few of them.
FEW = (WRITERS[2], WRITERS[4], WRITERS[7])
CASES = (
    *((*writer, "asm", H200) for writer in WRITERS),
    *((*writer, "asm", A100) for writer in FEW),
    *((*writer, "jnp", H200) for writer in FEW),
)
USUAL = (
    *((*writer, "asm", H200) for writer in (WRITERS[0], *WRITERS[2:5], *WRITERS[6:])),
    *((*WRITERS[4], *launch) for launch in (("asm", A100), ("jnp", H200))),
)


@pytest.mark.parametrize(
    ("spec", "side", "arithmetic", "target"),
    some(CASES, USUAL),
    ids=lambda value: getattr(value, "name", value),
)
def test_a_token_is_appended_in_place_and_within_registers(spec, side, arithmetic, target):
    batch, tokens = 16, 4096
    plan = kvq.cache.layout(spec, llama_config(1), batch, tokens, "bfloat16").plans[0]
    codec, block, heads = plan.codecs[side], plan.regions.block, plan.heads
    body = [
        jax.ShapeDtypeStruct(spec.shape, spec.dtype)
        for spec in jax.tree.leaves(codec.body(batch, heads, tokens))
    ]
    ring, new = (
        jax.ShapeDtypeStruct((batch, heads, count, 128), jnp.bfloat16)
        for count in (plan.regions.ring_slots, 1)
    )
    row, flags = jax.ShapeDtypeStruct((batch,), jnp.int32), jax.ShapeDtypeStruct((batch,), bool)
    launch = Launch(arithmetic)

    def append(body, ring, new, first, flags, params):
        writer = block_writer(plan, codec, params, codec.statistics.initial(batch, heads), launch)
        assert writer is not None, "no kernel writes this format"
        sides = [Side(new, ring[:, :, :0], ring, Blocks(body, *writer))]
        [side], _ = append_token(
            sides, Places(first, flags, first, first, flags), block=block, launch=launch
        )
        assert isinstance(side.blocks, Blocks)
        return side.blocks.body, side.ring

    program = compile_for(
        target,
        jax.jit(append, donate_argnums=(0, 1)),
        (body, ring, new, row, flags, calibrated(plan)[side]),
    )
    memory = program.compiled.memory_analysis()
    size = sum(array.size * array.dtype.itemsize for array in (*body, ring))
    assert memory.alias_size_in_bytes >= size, (
        f"{memory.alias_size_in_bytes} of {size} bytes stay in their place"
    )
    assert memory.temp_size_in_bytes < size / 100, f"{memory.temp_size_in_bytes} bytes beside them"
    kernel = program.kernel("append_token")
    assembly = assemble(kernel.ptx, kernel.name, target.architecture)
    assert assembly.spill_bytes <= 64, (
        f"{assembly.registers} registers, {assembly.spill_bytes} bytes spilled"
    )

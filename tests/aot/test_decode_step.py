"""A whole decode step of a Llama 3.1 8B, compiled for an H200 without having one: its memory, and
that nothing as large as a cache is moved.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

import kvq_jax as kvq
from benchmarks.llama_8b import llama_config
from benchmarks.machine_code.compile import compile_for
from benchmarks.machine_code.target import H200
from kvq_models import decode_step, prepare
from kvq_models.llama.model import abstract_llama
from pallas_kernels.launch import Launch
from tests.exhaustive import some

BATCH, CAPACITY = 16, 32768
BYTES = {
    "f32": 4,
    "s32": 4,
    "u32": 4,
    "bf16": 2,
    "f16": 2,
    "s16": 2,
    "u16": 2,
    "s8": 1,
    "u8": 1,
    "pred": 1,
}

MOVES = "copy|transpose|convert|reverse|pad|concatenate|select|gather"
# of a layer's q, k and v, inside the multiplication: more than all temporary memory
MERGED_WEIGHTS = "concatenate bf16[4096,6144]"


def moved(hlo: str, at_least: int) -> list[str]:
    """Return the results of at least so many bytes that only rearrange data."""
    moves = []
    for dtype, shape, op in re.findall(rf"= (\w+)\[([\d,]*)\]\{{[^}}]*\}} ({MOVES})\(", hlo):
        size = BYTES.get(dtype, 8) * math.prod(int(n) for n in shape.split(",") if n)
        if size >= at_least:
            moves.append(f"{op} {dtype}[{shape}], {size} bytes")
    return moves


@pytest.mark.parametrize(
    ("spec", "layers"),
    some(
        [("kivi:bits=4", 8), ("innerq:bits=2", 2), ("dense", 2)], [("kivi:bits=4", 8), ("dense", 2)]
    ),
)
def test_a_step_moves_and_needs_nothing_of_the_size_of_a_cache(spec: str, layers: int):
    config = llama_config(layers)
    cache = kvq.cache.layout(spec, config, BATCH, CAPACITY, "bfloat16")
    step = jax.jit(functools.partial(decode_step, implementation=Launch("asm")), donate_argnums=1)
    token = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    program = compile_for(H200, step, (abstract_llama(config, "bfloat16"), cache, token))
    memory = program.compiled.memory_analysis()
    layer = kvq.size.nbytes(cache.layers[0])
    assert memory.alias_size_in_bytes >= 0.99 * kvq.size.nbytes(cache.layers), (
        "the donated cache is not updated in place"
    )
    assert memory.temp_size_in_bytes < layer / 20, (
        f"temp {memory.temp_size_in_bytes} beside {layer} bytes a layer"
    )
    smallest = min(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache.layers[0].body)
    )
    lines = [
        line
        for line in moved(program.compiled.as_text(), smallest)
        if not line.startswith(MERGED_WEIGHTS)
    ]
    assert not lines, "\n".join(lines)
    assert any(re.fullmatch("decode_attention.*", name) for name in program.kernels), (
        f"no kernel among {sorted(program.kernels)}"
    )


def test_a_step_rebuilds_keys_chunk_by_chunk():
    """Test a layer of latents, a base layer and one of differences. Beside the accumulator, which
    is updated in place, a step needs less than a tenth of a layer's dense keys and values, so the
    dense rows of the context never exist.
    """
    spec, config = "xquant_cl:bits=2,base_layer=1,accumulator_dtype=bfloat16", llama_config(3)
    cache = kvq.cache.layout(spec, config, BATCH, CAPACITY, "bfloat16")
    llama = prepare(abstract_llama(config, "bfloat16"), spec)
    token = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    program = compile_for(
        H200,
        jax.jit(functools.partial(decode_step, implementation="xla"), donate_argnums=1),
        (llama, cache, token),
    )
    memory = program.compiled.memory_analysis()
    accumulators = [
        p.cross_layer.accumulator(BATCH, p.regions.body_capacity).struct
        for p in cache.plans
        if p.cross_layer
    ]
    declared = max((kvq.size.nbytes(struct) for struct in accumulators), default=0)
    dense_layer = kvq.size.dense_nbytes(config, BATCH, CAPACITY) / 3
    assert memory.alias_size_in_bytes >= 0.99 * kvq.size.nbytes(cache.layers), (
        "the donated cache is not updated in place"
    )
    assert memory.temp_size_in_bytes <= 1.2 * declared + dense_layer / 10, (
        f"temp {memory.temp_size_in_bytes}, declared {declared}"
    )


@pytest.mark.parametrize(
    ("operation", "function"),
    [
        ("transpose", lambda x: jnp.swapaxes(x, 2, 3) + jnp.int16(0)),
        ("pad", lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, 32), (0, 0)))),
        ("gather", lambda x: x[:, :, jnp.argsort(x[0, 0, :, 0])]),
    ],
)
def test_a_cache_that_is_moved_would_be_found(operation, function):
    words = jax.ShapeDtypeStruct((16, 8, 4096, 16), jnp.int16)
    text, size = (
        compile_for(H200, function, (words,)).compiled.as_text(),
        2 * math.prod(words.shape),
    )
    assert any(line.startswith(operation) for line in moved(text, size)), text
    assert not moved(text, 5 * size), "a threshold would not count"

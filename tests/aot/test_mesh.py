"""A layer of a Llama 3.1 8B over 10M tokens, compiled for eight H200s without having them: each
runs kernels, and nothing is gathered.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import kvq_jax as kvq
from benchmarks.llama_8b import llama_config
from benchmarks.machine_code.compile import compile_for, mesh_of
from benchmarks.machine_code.launches import calibrated
from benchmarks.machine_code.target import H200
from kvq_models import decode_step
from kvq_models.llama.hf_names import replace_weights, weights
from kvq_models.llama.model import abstract_llama
from kvq_models.llama.sharding import weight_shardings
from kvq_tools.cli import memory_mesh
from pallas_kernels.launch import Launch
from tests.exhaustive import some
from tests.multi_device.placed_runs import collectives

# at any length XLA joins the weights of gate and up, 29 MB
CONFIG, CAPACITY = (llama_config(1), 10 << 20)


LAYERS = llama_config().num_hidden_layers  # of the whole model, which share temporary memory
CASES = [
    ("kivi:bits=4", 8, 1, 1 / 20),
    ("kivi:bits=4", 2, 4, 1 / 20),
    # The scores of all tokens and query heads of a layer, 168 MB beside 1,218 MB. One launch reads
    # them at this length, and no other layer needs them meanwhile, so the bound is one of the whole
    # model's cache.
    ("kvquant:bits=3", 1, 8, LAYERS / 160),
]


@pytest.mark.parametrize(("spec", "heads", "tokens", "share"), some(CASES, CASES[1:2]))
def test_a_step_on_eight_gpus_moves_one_token_and_needs_little_memory(
    spec: str, heads: int, tokens: int, share: float
):
    """Test keys after RoPE, keys before it (rotated to the positions of each shard's blocks), and
    outliers, whose kernels keep scores. share: the most temporary memory, as a share of a layer's
    cache.
    """
    placement = kvq.Placement(
        mesh_of(H200, {"heads": heads, "tokens": tokens}), heads="heads", tokens="tokens"
    )
    cache = kvq.cache.layout(spec, CONFIG, 1, CAPACITY, "bfloat16", placement)

    def everywhere(struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=placement.everywhere)

    llama = abstract_llama(CONFIG, "bfloat16")
    shardings = weight_shardings(llama, placement)
    placed = {
        path: jax.ShapeDtypeStruct(weight.leaf.shape, weight.leaf.dtype, sharding=shardings[path])
        for path, weight in weights(llama).items()
    }
    llama = replace_weights(llama, placed)
    llama.cache_parameters = nnx.data(
        jax.tree.map(everywhere, tuple(calibrated(plan) for plan in cache.plans))
    )
    token = everywhere(jax.ShapeDtypeStruct((1,), jnp.int32))
    step = jax.jit(functools.partial(decode_step, implementation=Launch("asm")), donate_argnums=1)
    program = compile_for(H200, step, (llama, cache, token))
    local, memory = placement.shard_nbytes(cache.axes.layers[0]), program.compiled.memory_analysis()
    assert any(name.startswith("decode_attention") for name in program.kernels), (
        f"no kernel among {sorted(program.kernels)}"
    )
    assert memory.alias_size_in_bytes >= 0.99 * local, "the donated cache is not updated in place"
    assert memory.temp_size_in_bytes < share * local, (
        f"temp {memory.temp_size_in_bytes} beside {local} bytes of the cache"
    )
    maximum = max(CONFIG.hidden_size, CONFIG.num_attention_heads * (CONFIG.head_dim + 1)) * 4
    transfers = collectives(program.compiled)
    assert len(transfers) == memory_mesh.collectives(CONFIG, "bfloat16", placement), (
        f"{transfers}: `kvq memory` counts others"
    )
    assert max(transfers)[0] <= maximum, f"{max(transfers)}, more than {maximum} bytes"

"""XQuant's caches from outside: the sizes of the paper's tables, and what is refused.
(tests/kvq_jax/cache/test_memory.py has what a step needs beside the cache.)"""

import pytest

import kvq_jax as kvq
from kvq_jax.cache.cache import CacheDims

LLAMA_2_7B = CacheDims(32, 32, 32, 128, 4096)
LLAMA_3_8B = CacheDims(32, 32, 8, 128, 4096)


@pytest.mark.parametrize(
    ("dims", "spec", "paper"),
    [
        (LLAMA_2_7B, "xquant:bits=8", 0.26),
        (LLAMA_2_7B, "xquant:bits=4", 0.13),
        (LLAMA_2_7B, "xquant:bits=3", 0.10),
        (LLAMA_2_7B, "xquant:bits=4@0-2/2", 0.08),
        (LLAMA_2_7B, "xquant_cl:bits=4", 0.13),
        (LLAMA_2_7B, "xquant_cl:bits=3", 0.10),
        (LLAMA_2_7B, "xquant_cl:bits=2", 0.08),
        (LLAMA_3_8B, "xquant:bits=4", 0.27),
        (LLAMA_3_8B, "xquant:bits=3", 0.20),
        (LLAMA_3_8B, "xquant:bits=2", 0.14),
        (LLAMA_3_8B, "xquant:bits=2,exact_outlier_channel=true", 0.14),
        (LLAMA_3_8B, "xquant:bits=4@0-2/3", 0.21),
        (LLAMA_3_8B, "kivi:bits=4@0-2/3,group_size=128,pre_rope=true", 0.21),
        (LLAMA_3_8B, "kivi:bits=4@0-2/2,group_size=128,pre_rope=true", 0.15),
    ],
    ids=str,
)
def test_sizes_are_those_of_the_papers_tables(dims: CacheDims, spec: str, paper: float):
    """Tables 1, 4 and B.1: the body's bits by those of fp16, windows left out. Counted from the
    arrays."""
    assert round(kvq.size.body_bits_per_element(spec, dims) / 16, 2) == paper


def test_other_methods_mix_with_latents_and_with_exact_layers_before_the_base():
    assert kvq.cache.layout("k=xquant+v=kivi:bits=4", LLAMA_3_8B, 1, 1024).plans[0].names == (
        "k",
        "v",
    )
    plans = kvq.cache.layout("xquant_cl:skip_layers=0-1", LLAMA_3_8B, 1, 1024).plans
    assert [plan.names for plan in plans[:4]] == [("k", "v"), ("k", "v"), ("kv",), ("kv",)]

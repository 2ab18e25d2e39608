"""The roofline of rebuilding keys and values: the paper's figures, and the counts behind ours."""

import math
from fractions import Fraction

import jax.numpy as jnp
import pytest

from kvq_jax import peak_rates
from kvq_jax.methods.xquant import roofline
from kvq_jax.methods.xquant.roofline import LayerCost, paper_cost
from kvq_jax.peak_rates import DEVICES
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.hf_names import weights
from kvq_models.llama.model import abstract_llama

D = 4096
WIDTHS = {"hidden_size": D, "num_attention_heads": 32, "head_dim": 128}
LLAMA_2_7B = WIDTHS | {"intermediate_size": 11008, "num_key_value_heads": 32}
LLAMA_3_1_8B = WIDTHS | {"intermediate_size": 14336, "num_key_value_heads": 8}

# (device, query heads for each KV head) -> tokens as printed in the paper, or as derived from its
# equations for another device
PRINTED = {("h100-pcie", 1): 2.3e3, ("h100-pcie", 4): 40.6e3, ("h200", 1): 1.2e3, ("h200", 4): 22e3}


def config(sizes) -> LlamaConfig:
    return LlamaConfig(vocab_size=32, num_hidden_layers=1, max_position_embeddings=64, **sizes)


def equation(group: int, **more) -> LayerCost:
    """Return the paper's equation at 2 bits: (3) for a group of one query head, (4) for more."""
    return paper_cost(D, D // group, 2, latent=group > 1, **more)


def solved(name: str, group: int) -> Fraction:
    """Equations (3) and (4) at e = 2 bits, in whole numbers: P = 4 l w^2 / (l w / 4 + weights), w =
    d / g."""
    ridge, width = Fraction(int(DEVICES[name].flops), int(DEVICES[name].bandwidth)), D // group
    read = 24 * D**2 if group == 1 else 26 * D**2 + 4 * width**2
    return ridge * read / (4 * width**2 - ridge * Fraction(width, 4))


@pytest.mark.parametrize(("name", "group"), PRINTED)
def test_the_papers_equations_give_its_lengths(name, group):
    found = equation(group).longest_hidden(DEVICES[name].ridge)
    assert found == pytest.approx(float(solved(name, group)), rel=1e-12), "not the exact solution"
    digits = {1: 2, 4: 3}[group] if name == "h100-pcie" else 2
    assert float(f"{found:.{digits}g}") == PRINTED[name, group], f"{found:.1f} tokens"


def test_xquant_cl_hides_for_less_where_heads_are_shared():
    ridge = DEVICES["h100-pcie"].ridge
    plain, cross = (equation(4, cross_layer=cross) for cross in (False, True))
    assert cross.flops_per_token == 2 * 4 * D * D // 4 + 2 * D
    assert cross.cache_bytes_per_token == 2 * 2 / 8 * D // 4 + 4 / 8 * D
    assert cross.longest_hidden(ridge) < plain.longest_hidden(ridge) / 5
    assert cross.weight_bytes == 26 * D**2 + 4 * D * D // 4
    assert equation(1, cross_layer=True).flops_per_token == 4 * D * (D + 0.5), (
        "the paper's own simplification"
    )


def test_what_reads_longer_than_it_computes_is_hidden_at_any_length():
    assert LayerCost(0, 300, 1e7).longest_hidden(400) == math.inf
    assert LayerCost(400 * 300, 300, 1e7).longest_hidden(400) == math.inf
    assert LayerCost(400 * 300 + 1, 300, 1e7).longest_hidden(400) < math.inf


def test_the_first_layer_that_shows_decides():
    fast, slow = LayerCost(1e5, 10, 1e7), LayerCost(1e6, 10, 1e7)
    assert roofline.longest_hidden([fast, slow, fast], 300) == slow.longest_hidden(300)
    assert roofline.longest_hidden([], 300) == math.inf


@pytest.mark.parametrize(
    ("sizes", "per_square"),
    [(LLAMA_2_7B, 12), (LLAMA_3_1_8B, 13)],
    ids=["Llama-2-7B", "Llama-3.1-8B"],
)
def test_weight_bytes_are_those_of_the_models_matrices_and_near_the_papers_multiple(
    sizes, per_square
):
    found = roofline.weight_bytes(config(sizes))
    layer = [
        w.leaf
        for path, w in weights(abstract_llama(config(sizes), jnp.bfloat16)).items()
        if path.startswith("layers.0")
    ]
    assert found == sum(leaf.size * leaf.dtype.itemsize for leaf in layer if len(leaf.shape) == 2)
    assert found == pytest.approx(2 * per_square * D**2, rel=0.006)
    assert roofline.weight_bytes(config(sizes), 0.5) == found / 4


def test_a_device_is_named_or_given_by_its_peaks():
    assert peak_rates.device("H200") is DEVICES["h200"]
    assert peak_rates.device("756e12:2e12").ridge == peak_rates.device("h100-pcie").ridge == 378
    for wrong in ("h300", "1e12", "a:b", "1e12:0", "-1:1", "nan:1", "1e12:", ":", "inf:1"):
        with pytest.raises(ValueError, match=r"h200.*FLOPS:BYTES"):
            peak_rates.device(wrong)

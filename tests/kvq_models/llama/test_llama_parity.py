"""Our Llama against transformers': the same checkpoint gives the same fp32 logits, for every
family, feature and RoPE type."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvq_models.llama import hf_names
from kvq_models.llama.checkpoint import load_llama, save_llama
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import Llama, forward
from kvq_models.llama.rope import rope_for
from tests.exhaustive import some
from tests.kvq_models.checkpoints import (
    CASES,
    LLAMA3,
    SIZES,
    YARN,
    YARN_ALL,
    build_checkpoint,
    random_tokens,
    row_errors,
    torch_logits,
)

torch = pytest.importorskip("torch", reason="parity with transformers needs torch")

TOLERANCE = 1e-4
jitted_forward = jax.jit(forward)


def _undone(llama: Llama, suffix: str) -> Llama:
    """Return the model as a loader would leave it that forgets one vector: bias at zero, norm at
    one."""
    value = 0.0 if suffix.endswith("bias") else 1.0
    weights = {path: weight.leaf for path, weight in hf_names.weights(llama).items()}
    lost = {p: jnp.full_like(w, value) for p, w in weights.items() if p.endswith(suffix)}
    return hf_names.replace_weights(llama, lost)


def _layer_vectors(llama: Llama) -> list[str]:
    prefix = "layers.0."
    return [
        p.removeprefix(prefix)
        for p, w in hf_names.weights(llama).items()
        if p.startswith(prefix) and w.leaf.ndim == 1
    ]


# one of each family, and every feature once
USUAL = (
    *("llama_gqa4_tied", "llama_head_dim", "llama_attention_bias", "llama_mlp_bias"),
    *("llama_llama3", "llama_yarn_new", "mistral_window", "mixtral_window"),
    "ministral3",
    *("qwen2_tied_gqa7", "qwen2_window", "qwen3_attention_bias", "qwen3_moe_window"),
    "qwen3_moe_normalized",
    *("granite", "granite_4", "smollm3", "olmo2_gqa4", "olmo3", "gemma2", "gemma3"),
    *("phi3_partial", "gpt_oss"),
)


@pytest.mark.parametrize("name", some(CASES, USUAL))
def test_logits_equal_those_of_transformers(name, tmp_path):
    reference = build_checkpoint(tmp_path, CASES[name])
    llama, tokenizer = load_llama(tmp_path, dtype="float32")
    assert tokenizer is None
    tokens = random_tokens((2, 40))
    want = torch_logits(reference, tokens)
    errors = row_errors(jitted_forward(llama, tokens), want)
    worst = np.unravel_index(errors.argmax(), errors.shape)
    assert errors.max() < TOLERANCE, (
        f"{name}: relative error {errors.max():.2e} at (row, token) {worst}"
    )
    for suffix in _layer_vectors(llama):
        control = row_errors(jitted_forward(_undone(llama, suffix), tokens), want).max()
        assert control > 10 * TOLERANCE, (
            f"{name}: the comparison does not see that {suffix} was dropped ({control:.2e})"
        )


def test_dynamic_rope_beyond_the_trained_length_equals_transformers_at_the_capacity(tmp_path):
    reference = build_checkpoint(tmp_path, CASES["llama_dynamic"])
    llama, _ = load_llama(tmp_path, dtype="float32")
    length = SIZES["max_position_embeddings"] + 16
    tokens = random_tokens((1, length))
    want = torch_logits(reference, tokens)
    errors = row_errors(jitted_forward(llama, tokens), want)
    assert errors.max() < TOLERANCE, f"relative error {errors.max():.2e} at token {errors.argmax()}"
    frozen_at_64 = row_errors(jitted_forward(llama, tokens[:, :64]), want[:, :64])
    assert frozen_at_64.max() > 10 * TOLERANCE, "the base does not depend on the capacity"


@pytest.mark.parametrize("name", ["llama_llama3", "llama_yarn_new", "qwen2_tied_gqa7", "qwen3"])
def test_a_saved_model_is_loaded_back_by_transformers_with_the_same_logits(name, tmp_path):
    from transformers import AutoModelForCausalLM

    reference = build_checkpoint(tmp_path / "theirs", CASES[name])
    llama, _ = load_llama(tmp_path / "theirs", dtype="float32")
    save_llama(llama, tmp_path / "ours")
    model, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    assert not loading["missing_keys"], f"transformers misses {loading['missing_keys']}"
    unknown = loading["unexpected_keys"]
    assert not unknown, f"transformers does not know {unknown}"
    assert model.dtype == torch.float32
    both = (torch_logits(one, random_tokens((1, 40))) for one in (model, reference))
    np.testing.assert_array_equal(*both, err_msg=name)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0},
        LLAMA3 | {"original_max_position_embeddings": 1024},
        YARN | {"original_max_position_embeddings": 1024},
        YARN | {"original_max_position_embeddings": 1024, "attention_factor": 1.25},
        YARN_ALL | {"original_max_position_embeddings": 1024},
    ],
    ids=["default", "linear", "dynamic", "llama3", "yarn", "yarn_attention_factor", "yarn_all"],
)
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 1e4), (80, 5e5), (128, 1e6)])
def test_rotary_frequencies_equal_those_of_transformers(rope, head_dim, theta):
    from transformers import LlamaConfig as HFConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    fields = SIZES | {
        "head_dim": head_dim,
        "max_position_embeddings": 4096,
        "rope_parameters": rope | {"rope_theta": theta},
    }
    theirs = HFConfig(**fields)
    init = ROPE_INIT_FUNCTIONS.get(
        rope["rope_type"], LlamaRotaryEmbedding.compute_default_rope_parameters
    )
    for capacity in (100, 4096, 10_000):
        frequencies, attention_factor = init(theirs, seq_len=capacity)
        ours = rope_for(LlamaConfig.from_hf(fields | {"model_type": "llama"}), capacity)
        # The two libraries' float32 powers differ in the last bit, which a blend (llama3, yarn) can
        # double or so.
        np.testing.assert_allclose(
            ours.inverse_frequencies, frequencies.numpy(), rtol=2e-6, err_msg=f"{capacity=}"
        )
        assert float(ours.attention_factor) == np.float32(attention_factor), f"{capacity=}"

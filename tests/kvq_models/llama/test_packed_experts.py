"""Experts that stay packed: the file's values, the logits of dense experts, and no read of experts
that no token chooses."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvq_models.calibration.fingerprint import partial_fingerprint, partial_fingerprint_of
from kvq_models.llama import packed_weights
from kvq_models.llama.checkpoint import load_llama, open_checkpoint
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import forward
from kvq_models.llama.packed_experts import PackedExperts, expert_products
from kvq_models.llama.packed_loading import dense_llama
from tests.kvq_models.checkpoints import random_llama, random_tokens, row_errors, tiny_config
from tests.kvq_models.gguf_files import write_gguf

ONE = {"num_hidden_layers": 1}
FIVE = {"num_local_experts": 5, "num_experts_per_tok": 2}
MIXTRAL = tiny_config("mixtral", **ONE, **FIVE, sliding_window=None)
QWEN3_MOE = tiny_config(
    "qwen3_moe", **ONE, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=32
)
GPT_OSS = tiny_config("gpt_oss", **ONE, **FIVE, sliding_window=8)
FILES = {
    "mixtral": ("llama", MIXTRAL, "Q4_1", True),
    "mixtral of before April 2024": ("llama", MIXTRAL, "Q8_0", False),
    "qwen3moe": ("qwen3moe", QWEN3_MOE, "BF16", True),
    "gpt-oss": ("gpt-oss", GPT_OSS, "MXFP4", True),
}
_logits = jax.jit(forward)


def written(
    path: pathlib.Path, architecture: str, config: LlamaConfig, kind: str, stacked: bool = True
) -> pathlib.Path:
    llama = random_llama(config)
    return write_gguf(llama, path, architecture=architecture, kind=kind, stacked_experts=stacked)


@pytest.mark.parametrize("name", FILES)
def test_packed_experts_have_the_files_values_and_compute_the_logits_of_dense_ones(
    name: str, tmp_path: pathlib.Path
):
    path = written(tmp_path / "m.gguf", *FILES[name])
    packed, dense = (load_llama(path, dtype="float32", weights=w)[0] for w in ("packed", "dense"))
    experts = packed.layers[0].mlp
    assert all(isinstance(w[...], PackedExperts) for w in (experts.gate, experts.up, experts.down))
    jax.tree.map(np.testing.assert_array_equal, dense_llama(packed), dense)
    assert partial_fingerprint(packed) == partial_fingerprint(dense)
    assert partial_fingerprint_of(open_checkpoint(path)) == partial_fingerprint(dense)
    tokens = random_tokens((1, 6))
    wanted = _logits(dense, tokens)
    assert row_errors(_logits(packed, tokens), wanted).max() < 1e-5
    dense.layers[0].mlp.up.set_value(jnp.roll(dense.layers[0].mlp.up[...], 1, axis=0))
    assert row_errors(_logits(dense, tokens), wanted).min() > 1e-3, "any order of experts passes"


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> PackedExperts:
    path = written(tmp_path_factory.mktemp("experts") / "m.gguf", "llama", MIXTRAL, "Q4_1")
    return load_llama(path, dtype="float32", weights="packed")[0].layers[0].mlp.up[...]


@pytest.mark.parametrize("native", [True, False])
def test_each_row_meets_the_matrix_that_it_chooses_and_no_other_is_read(
    native: bool, experts: PackedExperts, monkeypatch: pytest.MonkeyPatch
):
    if native and (reason := packed_weights.unavailable()):
        pytest.skip(reason)
    if not native:
        monkeypatch.setattr(packed_weights, "unavailable", lambda: "no library")
    count, inputs, outputs = experts.shape
    x = np.random.default_rng(0).normal(size=(7, inputs)).astype(np.float32)
    chosen = jnp.array([4, 0, 3, 3, 1, 4, 0])
    values = np.asarray(experts.dequantized(), float)
    want = np.einsum("ni,nio->no", x.astype(float), values[chosen])
    (got,) = expert_products(jnp.asarray(x), chosen, [experts])
    assert np.linalg.norm(got - want) < 2e-6 * np.linalg.norm(want)
    scales = experts.matrix.scales
    assert scales is not None
    panels = len(scales) // count
    broken = scales.at[2 * panels : 3 * panels].set(jnp.nan)
    other = dataclasses.replace(experts, matrix=dataclasses.replace(experts.matrix, scales=broken))
    (again,) = expert_products(jnp.asarray(x), chosen, [other])
    np.testing.assert_array_equal(again, got)
    (seen,) = expert_products(jnp.asarray(x), chosen.at[0].set(2), [other])
    assert np.isnan(seen[0]).all()
    np.testing.assert_array_equal(seen[1:], got[1:])
    assert outputs == 96


def test_experts_of_which_a_projection_cannot_be_packed_are_dense(tmp_path: pathlib.Path):
    # 80 channels are no whole panels
    narrow = tiny_config("mixtral", **ONE, **FIVE, intermediate_size=80, sliding_window=None)
    path = written(tmp_path / "m.gguf", "llama", narrow, "F16")
    llama = load_llama(path, dtype="float32", weights="packed")[0]
    experts = llama.layers[0].mlp
    assert not any(isinstance(w[...], PackedExperts) for w in (experts.gate, experts.down))
    assert packed_weights.is_packed(llama.layers[0].q_proj.kernel[...])


def test_an_expert_that_is_not_there_is_an_error_of_xla(experts: PackedExperts):
    if reason := packed_weights.unavailable():
        pytest.skip(reason)
    with pytest.raises(Exception, match="chosen must be from 0"):
        expert_products(jnp.ones((1, 64)), jnp.array([5]), [experts])[0].block_until_ready()

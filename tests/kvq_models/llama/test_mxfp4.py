"""gpt-oss as it is published: experts in MXFP4 load as transformers dequantizes them."""

from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvq_models.llama.checkpoint import load_llama
from kvq_models.llama.packed_experts import PackedExperts
from kvq_models.llama.packed_loading import dense_llama
from kvq_models.llama.quantized.mxfp4 import Mxfp4
from kvq_models.llama.quantized.stored_parts import StoredParts
from kvq_models.llama.stored_tensor import CheckpointError, StoredTensor
from tests.kvq_models.checkpoints import random_llama, tiny_config
from tests.kvq_models.llama.saved_checkpoint import change_config

EXPERTS, WIDTH = 3, 64
BLOCKS = np.random.default_rng(0).integers(0, 256, (EXPERTS, 2 * WIDTH, WIDTH // 32, 16), np.uint8)
SCALES = np.random.default_rng(1).integers(120, 130, BLOCKS.shape[:3], np.uint8)


def test_blocks_are_dequantized_as_by_transformers():
    torch = pytest.importorskip("torch", reason="parity with transformers needs torch")
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

    wanted = _convert_moe_packed_tensors(
        torch.from_numpy(BLOCKS), torch.from_numpy(SCALES), dtype=torch.float32
    )
    stored = {"blocks": BLOCKS, "scales": SCALES}
    headers = {end: StoredTensor(Path(end), a.shape, "U8") for end, a in stored.items()}
    parts = StoredParts("experts", headers, lambda tensor: stored[tensor.file.name])
    found = Mxfp4().dequantized(parts)
    np.testing.assert_array_equal(found, wanted.numpy())
    assert len(np.unique(found)) > 50, "the comparison sees few values"


@pytest.fixture
def published(tmp_path):
    """A gpt-oss whose gate_up_proj is MXFP4, and its other weights in floats."""
    from kvq_models.llama.checkpoint import save_llama

    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 1}
    experts = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": 8}
    save_llama(random_llama(tiny_config("gpt_oss", **sizes, **experts)), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert tensors.pop(name).shape == (EXPERTS, WIDTH, 2 * WIDTH)
    tensors |= {f"{name}_blocks": BLOCKS, f"{name}_scales": SCALES}
    save_file(tensors, tmp_path / "model.safetensors")
    kept = ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    change_config(tmp_path, quantization_config=quantization)
    return tmp_path, tensors, name


def test_experts_in_mxfp4_are_gate_and_up_in_turns(published):
    path, tensors, name = published
    layer = load_llama(path, dtype="float32")[0].layers[0]
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    row, expert = 5, 1  # an output of gate_up_proj: up of output 2
    codes = np.stack([BLOCKS[expert, row] & 15, BLOCKS[expert, row] >> 4], axis=-1).reshape(2, 32)
    wanted = values[codes] * 2.0 ** (SCALES[expert, row].astype(int)[:, None] - 127)
    np.testing.assert_array_equal(layer.mlp.up[...][expert, :, row // 2], wanted.reshape(-1))
    np.testing.assert_array_equal(
        layer.mlp.down[...], tensors[name.replace("gate_up_proj", "down_proj")]
    )


def test_experts_of_which_all_are_mxfp4_stay_in_their_bits(published):
    path, tensors, name = published
    down = name.replace("gate_up_proj", "down_proj")
    del tensors[down]
    tensors |= {f"{down}_blocks": BLOCKS[:, WIDTH:], f"{down}_scales": SCALES[:, :WIDTH]}
    save_file(tensors, path / "model.safetensors")
    packed, dense = (load_llama(path, dtype="float32", weights=w)[0] for w in ("packed", "dense"))
    experts = packed.layers[0].mlp
    assert all(isinstance(w[...], PackedExperts) for w in (experts.gate, experts.up, experts.down))
    assert experts.up[...].bits == 4
    jax.tree.map(np.testing.assert_array_equal, dense_llama(packed), dense)
    assert len(np.unique(dense.layers[0].mlp.up[...])) > 50, "the comparison sees few values"
    rows = jax.random.normal(jax.random.key(0), (1, 4, WIDTH))
    of_packed, of_dense = (np.asarray(one.layers[0].mlp(rows)) for one in (packed, dense))
    np.testing.assert_allclose(of_packed, of_dense, rtol=1e-4, atol=1e-5 * np.abs(of_dense).max())


def test_blocks_of_another_size_are_one_line(published):
    path, tensors, name = published
    save_file(tensors | {f"{name}_blocks": BLOCKS[..., :8]}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"blocks of 8 bytes, and MXFP4 has 16") as refused:
        load_llama(path, dtype="float32")
    assert "\n" not in str(refused.value)

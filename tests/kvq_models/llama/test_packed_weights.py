"""Weights that stay packed: the file's values bit for bit, the same tokens as dense weights, and a
sentence for what they cannot do."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize, quantize
from jax.sharding import Mesh

import kvq_jax as kvq
from kvq_models import generate, prepare
from kvq_models.calibration.fingerprint import partial_fingerprint, partial_fingerprint_of
from kvq_models.llama import packed_loading, packed_weights
from kvq_models.llama.checkpoint import CheckpointError, load_llama, open_checkpoint, save_llama
from kvq_models.llama.gguf_blocks import KINDS, packed_matrix
from kvq_models.llama.gguf_file import GgufFile
from kvq_models.llama.model import Llama
from kvq_models.llama.packed_weights import PackedTable, is_packed
from kvq_models.llama.sharding import shard_llama
from tests.kvq_models.checkpoints import random_llama, random_tokens, tiny_config
from tests.kvq_models.gguf_files import write_gguf

NATIVE = packed_weights.unavailable() is None
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
CONFIG = tiny_config(hidden_size=64, intermediate_size=96, tie_word_embeddings=True)


def random_blocks(kind: str, outputs: int, blocks: int) -> np.ndarray:
    """Return blocks of random bits, whose scales are numbers of both signs."""
    per_block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rng = np.random.default_rng(0)
    if per_block == 1:  # numbers
        rows = rng.normal(size=(outputs, 32 * blocks)).astype(np.float32)
        return quantize(rows, GGMLQuantizationType[kind]).view(np.uint8).reshape(outputs, -1, size)
    data = rng.integers(0, 256, (outputs, blocks, size), dtype=np.uint8)
    if kind == "MXFP4":
        data[..., 0] = rng.integers(120, 130, (outputs, blocks))
        return data
    for at in HALVES.get(kind, (0,)):
        scales = rng.normal(size=(outputs, blocks, 1)).astype(np.float16)
        data[..., at : at + 2] = scales.view(np.uint8)
    return data


def in_file(blocks: np.ndarray, kind: str) -> np.ndarray:
    rows = blocks.reshape(len(blocks), -1)
    return dequantize(rows, GGMLQuantizationType[kind]).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_every_value_is_the_files_bit_for_bit(kind: str):
    blocks = random_blocks(kind, 40, 2)
    want = in_file(blocks, kind)
    order = np.random.default_rng(1).permutation(40)
    matrix, finite = packed_matrix(blocks, kind, order, "float32")
    assert finite
    got = np.asarray(packed_weights.dense(matrix))
    np.testing.assert_array_equal(got.view(np.uint32), want[order].T.view(np.uint32))
    blocks[3, 1, -1] ^= 1  # a bit of a code, or of its scale
    changed = packed_matrix(blocks, kind, order, "float32")[0].dequantized()
    assert not np.array_equal(got, changed), "another bit passes"
    assert len(jax.make_jaxpr(packed_weights.dense)(matrix).eqns) == 1, "more than one program"


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q5_1", "Q6_K", "MXFP4", "BF16", "F16"])
def test_products_and_rows_are_those_of_the_values(kind: str, monkeypatch: pytest.MonkeyPatch):
    blocks = random_blocks(kind, 72, 2)
    want, matrix = in_file(blocks, kind), packed_matrix(blocks, kind, None, "float32")[0]
    x = np.random.default_rng(2).normal(size=(2, 5, want.shape[1])).astype(np.float32)
    exact = x.astype(float) @ want.T.astype(float)
    by_kernel = jnp.asarray(x) @ matrix
    monkeypatch.setattr(packed_weights, "unavailable", lambda: "no library")
    monkeypatch.setattr(packed_weights, "TILE", 32)
    for product in (by_kernel, jnp.asarray(x) @ matrix):
        assert np.linalg.norm(product - exact) < 2e-6 * np.linalg.norm(exact)
    assert np.linalg.norm(x.astype(float) @ want[::-1].T - exact) > np.linalg.norm(exact) / 10
    table = PackedTable(matrix)
    np.testing.assert_array_equal(table.rows(jnp.array([[3, 71], [40, 0]]))[1], want[[40, 0]])
    assert np.isnan(table.rows(jnp.array([72, -1]))).all()


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_scale_that_is_not_finite_is_found(bad: float):
    blocks = random_blocks("Q4_1", 32, 2)
    blocks[7, 1, 2:4] = np.frombuffer(np.float16(bad).tobytes(), np.uint8)
    assert not packed_matrix(blocks, "Q4_1", None, "float32")[1]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return a file whose heads are in GGUF's order, and whose vocabulary has no whole panels."""
    return write_gguf(
        random_llama(CONFIG), tmp_path_factory.mktemp("packed") / "m.gguf", kind="Q4_1"
    )


def tokens_of(llama: Llama) -> list[list[int]]:
    cache = kvq.init_cache("kivi:bits=4", llama.config, batch=2, capacity=64, dtype="float32")
    out = generate(llama, cache, np.asarray(random_tokens((2, 20))), max_new_tokens=12)
    return np.asarray(out.tokens).tolist()


def test_packed_weights_generate_the_tokens_of_dense_ones(file: pathlib.Path):
    packed, dense = (load_llama(file, dtype="float32", weights=w)[0] for w in ("packed", "dense"))
    leaves = jax.tree.leaves(packed, is_leaf=is_packed)
    assert sum(map(is_packed, leaves)) == 1 + 7 * CONFIG.num_hidden_layers
    assert tokens_of(packed) == tokens_of(dense)
    other = random_llama(dataclasses.replace(CONFIG, dtype="float32"), seed=1)
    assert tokens_of(other) != tokens_of(dense), "any model's tokens pass"


def test_what_builds_on_weights_takes_their_values(file: pathlib.Path, tmp_path: pathlib.Path):
    packed, dense = (load_llama(file, dtype="float32", weights=w)[0] for w in ("packed", "dense"))
    assert partial_fingerprint(packed) == partial_fingerprint(dense)
    assert partial_fingerprint_of(open_checkpoint(file)) == partial_fingerprint(dense)
    assert packed_loading.fingerprint(packed) == kvq.files.fingerprint(dense)
    assert packed_loading.fingerprint(random_llama(CONFIG)) != kvq.files.fingerprint(dense)
    one, other = (prepare(llama, "xquant:bits=4").cache_parameters for llama in (packed, dense))
    jax.tree.map(np.testing.assert_array_equal, one, other)
    save_llama(packed, tmp_path / "saved")
    again = load_llama(tmp_path / "saved", dtype="float32")[0]
    jax.tree.map(np.testing.assert_array_equal, again, packed_loading.dense_llama(packed))
    assert kvq.size.nbytes(packed) < 0.45 * kvq.size.nbytes(dense)


def test_the_default_is_packed_on_a_cpu_with_kernels_alone(
    file: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    assert packed_loading.holds_packed(load_llama(file, dtype="float32")[0]) == NATIVE
    monkeypatch.setattr(packed_loading, "unavailable", lambda: "no library")
    assert not packed_loading.holds_packed(load_llama(file, dtype="float32")[0])


def test_activations_of_a_bfloat16_model_stay_bfloat16(file: pathlib.Path):
    llama = load_llama(file, weights="packed")[0]
    hidden = llama.embed_tokens(random_tokens((1, 3)))
    assert hidden.dtype == jnp.bfloat16
    assert llama.layers[0].v_proj(hidden).dtype == jnp.bfloat16
    assert llama.logits(hidden).dtype == jnp.float32


def test_what_cannot_be_packed_is_refused_in_a_line(file: pathlib.Path, tmp_path: pathlib.Path):
    mesh = Mesh(np.array(jax.devices()[:1]), ("heads",))
    with pytest.raises(ValueError, match="for one device: give 'dense'"):
        load_llama(file, weights="packed", mesh=mesh)
    packed = load_llama(file, dtype="float32", weights="packed")[0]
    with pytest.raises(ValueError, match="load the model with weights='dense'"):
        shard_llama(packed, mesh)
    plain = write_gguf(random_llama(CONFIG), tmp_path / "f.gguf", kind="F32")
    with pytest.raises(ValueError, match="GGUF files with blocks"):
        load_llama(plain, weights="packed")
    with pytest.raises(TypeError, match="make it an array"):
        packed.embed[0]


def test_a_gradient_through_packed_weights_is_refused_in_a_line():
    matrix = packed_matrix(random_blocks("Q4_0", 32, 1), "Q4_0", None, "float32")[0]
    with pytest.raises(NotImplementedError, match="packed weights have no gradient"):
        jax.grad(lambda x: jnp.sum(x @ matrix))(jnp.ones((2, 32)))
    mapped = jax.vmap(lambda x: x @ matrix)(jnp.ones((2, 3, 32)))
    np.testing.assert_array_equal(mapped[1], jnp.ones((3, 32)) @ matrix)


def test_a_damaged_scale_in_a_file_is_refused(tmp_path: pathlib.Path):
    path = write_gguf(random_llama(CONFIG), tmp_path / "m.gguf", kind="Q8_0")
    data = bytearray(path.read_bytes())
    start = GgufFile(path)._tensors["model.embed_tokens.weight"].start
    data[start : start + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(data)
    if NATIVE:
        with pytest.raises(CheckpointError, match="holds nan, or values beyond"):
            load_llama(path, dtype="float32")


def test_the_product_lowers_for_a_gpu_without_the_kernel():
    matrix = packed_matrix(random_blocks("Q4_K", 40, 1), "Q4_K", None, "float32")[0]
    traced = jax.jit(lambda x, w: x @ w).trace(jnp.ones((2, 256)), matrix)
    name = "kvq_packed_product"
    assert name not in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert (name in traced.lower(lowering_platforms=("cpu",)).as_text()) == NATIVE


def test_int8_activations_round_what_packed_weights_multiply(
    file: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    exact, coarse = (
        load_llama(file, dtype="float32", weights="packed", activations=a)[0]
        for a in ("float32", "int8")
    )
    x = np.random.default_rng(3).normal(size=(1, 3, CONFIG.hidden_size)).astype(np.float32)
    kernel = exact.layers[0].q_proj.kernel[...]
    want = np.asarray(kernel.dequantized(), float)
    by_group = x.reshape(-1, 32)
    scale = np.abs(by_group).max(axis=-1, keepdims=True) / 127
    want = (np.round(by_group / scale) * scale).reshape(x.shape) @ want
    by_kernel = jnp.asarray(x) @ coarse.layers[0].q_proj.kernel[...]
    monkeypatch.setattr(packed_weights, "unavailable", lambda: "no library")
    by_xla = jnp.asarray(x) @ coarse.layers[0].q_proj.kernel[...]
    for product in (by_kernel, by_xla):
        assert np.linalg.norm(product - want) < 1e-4 * np.linalg.norm(want)
    error = np.linalg.norm(jnp.asarray(x) @ kernel - want)
    assert error > 1e-3 * np.linalg.norm(want), "nothing is rounded"
    assert "rounded to int8" in packed_loading.in_words(coarse)
    assert "rounded" not in packed_loading.in_words(exact)
    with pytest.raises(ValueError, match="is for packed integers"):
        load_llama(file, weights="dense", activations="int8")

"""Dense-and-sparse weights in their bits: the values of dequantized ones bit for bit, in memory and
in files, and files that do not fit."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.cache.accounting import nbytes
from kvq_models.calibration.fingerprint import partial_fingerprint
from kvq_models.calibration.weights import PROJECTIONS, quantize_weights
from kvq_models.llama import hf_names, packed_loading, packed_weights, tabled_weights
from kvq_models.llama.checkpoint import CheckpointError, load_llama, save_llama
from kvq_models.llama.model import Llama, forward
from kvq_models.llama.packed_weights import is_packed
from kvq_models.llama.tabled_weights import TabledMatrix, packed_rows
from tests.kvq_models.checkpoints import random_llama, row_errors, tiny_config
from tests.kvq_models.llama.saved_checkpoint import change_config, change_tensors

NATIVE = packed_weights.unavailable() is None
TOKENS = np.random.default_rng(0).integers(0, 64, 200)
SIZES: dict[str, Any] = dict(bits=4, sparse=0.02, samples=2, length=16)
Q_PROJ = "model.layers.0.self_attn.q_proj"
_logits = jax.jit(forward)


def quantized(model_type: str = "llama", **fields: Any) -> tuple[Llama, Llama]:
    """Return a model with quantized weights as arrays, and with the same ones packed."""
    config = tiny_config(
        model_type, vocab_size=64, num_hidden_layers=2, max_position_embeddings=64, **fields
    )
    llama = random_llama(config)
    dense, packed = (
        quantize_weights(llama, TOKENS, packed=packed, **SIZES)[0] for packed in (False, True)
    )
    return dense, packed


@pytest.fixture(scope="module")
def pair() -> tuple[Llama, Llama]:
    return quantized()


@pytest.fixture
def saved(pair: tuple[Llama, Llama], tmp_path: pathlib.Path) -> pathlib.Path:
    save_llama(pair[1], tmp_path / "saved")
    return tmp_path / "saved"


def tabled(llama: Llama) -> list[TabledMatrix]:
    leaves = jax.tree.leaves(llama, is_leaf=is_packed)
    return [leaf for leaf in leaves if isinstance(leaf, TabledMatrix)]


def random_matrix(outputs: int, inputs: int, sparse: float, dtype: Any) -> TabledMatrix:
    rng = np.random.default_rng(0)
    weights, levels = (rng.normal(size=(outputs, n)).astype(dtype) for n in (inputs, 16))
    codes = rng.integers(0, 16, (outputs, inputs)).astype(np.uint8)
    return packed_rows(weights, codes, levels, rng.random((outputs, inputs)) < sparse)


def test_packed_weights_are_the_dequantized_ones_bit_for_bit(pair: tuple[Llama, Llama]):
    dense, packed = pair
    assert len(tabled(packed)) == 2 * len(PROJECTIONS)
    jax.tree.map(np.testing.assert_array_equal, packed_loading.dense_llama(packed), dense)
    assert packed_loading.fingerprint(packed) == kvq.files.fingerprint(dense)
    assert partial_fingerprint(packed) == partial_fingerprint(dense)
    plain: dict[str, Any] = {**SIZES, "sparse": 0.0}
    without = quantize_weights(random_llama(packed.config), TOKENS, **plain)[0]
    path = "layers.0.q_proj.kernel"
    other, same = (np.asarray(hf_names.weights(llama)[path].leaf) for llama in (without, dense))
    assert not np.array_equal(other, same), "weights without sparse entries pass"
    tokens = jnp.asarray(TOKENS[None, :6])
    assert row_errors(_logits(packed, tokens), _logits(dense, tokens)).max() < 1e-5


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
@pytest.mark.parametrize("sparse", [0.0, 0.2])
def test_xla_multiplies_by_tiles_as_the_kernel_does(
    dtype: Any, sparse: float, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tabled_weights, "TILE", 16)
    matrix = random_matrix(40, 72, sparse, dtype)
    x = np.random.default_rng(1).normal(size=(2, 3, 72)).astype(np.float32)
    want = x @ np.asarray(matrix.dequantized(), float)
    monkeypatch.setattr(packed_weights, "unavailable", lambda: "no library")
    by_xla = np.asarray(jnp.asarray(x) @ matrix)
    monkeypatch.undo()
    by_default = np.asarray(jnp.asarray(x) @ matrix)
    tolerance = 1e-5 if dtype == np.float32 else 2e-2  # of values that are rounded to 16 bits
    for y in (by_xla, by_default):
        assert np.linalg.norm(y - want) < tolerance * np.linalg.norm(want)
        assert np.linalg.norm(y[..., ::-1] - want) > 0.1 * np.linalg.norm(want), "any order passes"


def test_the_product_lowers_for_a_gpu_without_the_kernel_and_has_no_gradient():
    matrix = random_matrix(40, 64, 0.1, np.float32)
    traced = jax.jit(lambda x, w: x @ w).trace(jnp.ones((2, 64)), matrix)
    name = "kvq_tabled_product"
    assert name not in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert (name in traced.lower(lowering_platforms=("cpu",)).as_text()) == NATIVE
    with pytest.raises(NotImplementedError, match="weights='dense'"):
        jax.grad(lambda x: (x @ matrix).sum())(jnp.ones((2, 64)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_model_has_the_same_weights_packed_and_dense(
    pair: tuple[Llama, Llama], tmp_path: pathlib.Path, dtype: str
):
    narrow = jax.tree.map(lambda leaf: leaf.astype(dtype), pair[1], is_leaf=is_packed)
    save_llama(narrow, tmp_path)
    packed, dense = (
        load_llama(tmp_path, dtype=dtype, weights=how)[0] for how in ("packed", "dense")
    )
    assert len(tabled(packed)) == 2 * len(PROJECTIONS)
    assert not tabled(dense)
    for loaded in (packed, dense):
        jax.tree.map(np.testing.assert_array_equal, packed_loading.dense_llama(loaded),
                     packed_loading.dense_llama(narrow))  # fmt: skip
    assert bool(tabled(load_llama(tmp_path, dtype=dtype)[0])) == NATIVE
    matrix = tabled(packed)[0]
    inputs, outputs = matrix.shape
    width, entries = (4 if dtype == "float32" else 2), len(matrix.sparse_inputs)
    counted = inputs * outputs / 2 + 16 * width * outputs + 4 * (outputs + 1)
    assert nbytes(matrix) == counted + (2 + width) * entries
    assert entries == round(0.02 * inputs * outputs)
    assert "packed (4 " in packed_loading.in_words(packed)


def test_families_that_fuse_projections_save_packed_ones_apart(tmp_path: pathlib.Path):
    dense, packed = quantized("phi3", head_dim=16)
    save_llama(packed, tmp_path)
    loaded = load_llama(tmp_path, dtype="float32", weights="packed")[0]
    assert len(tabled(loaded)) == 2 * len(PROJECTIONS)
    jax.tree.map(np.testing.assert_array_equal, packed_loading.dense_llama(loaded), dense)


def _changed(end: str, change: Any) -> Any:
    def apply(tensors: dict[str, np.ndarray]) -> None:
        tensors[f"{Q_PROJ}.{end}"] = change(tensors[f"{Q_PROJ}.{end}"])

    return apply


def _code_of_first_entry(tensors: dict[str, np.ndarray]) -> None:
    starts = tensors[f"{Q_PROJ}.sparse_starts"]
    output = int(np.searchsorted(starts, 0, side="right")) - 1
    tensors[f"{Q_PROJ}.codes"][output, tensors[f"{Q_PROJ}.sparse_inputs"][0] // 2] = 0x11


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_changed("codes", lambda a: a[:, 1:]), "tensor 'model.layers.0.self_attn.q_proj.weight'"),
        (_changed("codes", lambda a: a.view(np.int8)), "is stored as I8; supported: U8"),
        (_changed("levels", lambda a: a[:, 1:]), "levels' has shape"),
        (_changed("sparse_starts", lambda a: a[1:]), "sparse_starts' has shape"),
        (_changed("sparse_starts", lambda a: a[::-1].copy()), "sparse_starts' does not rise"),
        (_changed("sparse_starts", lambda a: a - a[1]), "sparse_starts' does not rise"),
        (_changed("sparse_inputs", lambda a: a + np.uint16(999)), "sparse_inputs' holds inputs"),
        (_changed("sparse_inputs", lambda a: a * np.uint16(0)), "does not rise within an output"),
        (_changed("sparse_values", lambda a: a[1:]), "sparse_values' has shape"),
        (_changed("sparse_values", lambda a: a.astype(np.float16)), "is stored as F16; supported"),
        (_changed("levels", lambda a: a * np.float32(np.nan)), "holds nan, or values beyond"),
        (_code_of_first_entry, "codes' has codes other than 0 in place of sparse entries"),
        (lambda tensors: tensors.pop(f"{Q_PROJ}.levels"), f"files lack tensor '{Q_PROJ}.levels'"),
    ],
)
def test_files_that_do_not_fit_are_refused_in_a_line(
    saved: pathlib.Path, change: Any, message: str
):
    change_tensors(saved, change)
    for weights in ("packed", "dense"):
        with pytest.raises(CheckpointError) as error:
            load_llama(saved, dtype="float32", weights=weights)
        assert message in str(error.value), weights
        assert "\n" not in str(error.value)


def test_other_bits_are_refused_by_name(saved: pathlib.Path):
    change_config(saved, quantization_config={"quant_method": "dense_and_sparse", "bits": 3})
    with pytest.raises(NotImplementedError, match="bits='3'"):
        load_llama(saved)


def test_a_damaged_code_is_found(saved: pathlib.Path):
    load_llama(saved)
    file = saved / "model.safetensors"
    data = bytearray(file.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    start, _ = header[f"{Q_PROJ}.levels"]["data_offsets"]
    data[8 + int.from_bytes(data[:8], "little") + start] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged"):
        load_llama(saved)


def test_packed_weights_of_other_bits_or_shapes_are_refused():
    llama = random_llama(tiny_config(vocab_size=64, max_position_embeddings=64))
    three: dict[str, Any] = {**SIZES, "bits": 3}
    with pytest.raises(ValueError, match="packed weights have 4 bits"):
        quantize_weights(llama, TOKENS, packed=True, **three)
    odd = random_llama(tiny_config(intermediate_size=100, max_position_embeddings=64))
    with pytest.raises(ValueError, match="matrices of 100 inputs cannot be packed"):
        quantize_weights(odd, TOKENS, packed=True, **SIZES)

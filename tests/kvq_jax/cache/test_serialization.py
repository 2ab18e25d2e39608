"""Saved caches: bit-exact round trips, and files that are refused with one line that says why."""

import dataclasses
import errno
import json
import os
import pathlib
import stat
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import kvq_jax as kvq
from kvq_jax.cache.cache import plans
from kvq_jax.files.checksum import DTYPES, SHA256, NoChecksum, save_tensors
from tests.kvq_jax.cache_runs import DIMS, LENGTHS, filled
from tests.methods_table import ONE_OF_EACH_LAYER, MethodCase, cases

SPEC = "kivi:sink=2,recent=12,block=16"
ONE_LINE = r"\A[^\n]*{}[^\n]*\Z"


def assert_equal(found: kvq.cache.Cache, expected: kvq.cache.Cache) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert one.dtype == other.dtype, name
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), name


@cases(usual=(*ONE_OF_EACH_LAYER, "waterfill"))  # arrays of every dtype
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_cache_comes_back_bit_for_bit(case: MethodCase, dtype: str, tmp_path: pathlib.Path):
    cache = filled(case.spec, LENGTHS) if dtype == "float32" else random_cache(case.spec)
    kvq.files.save(cache, tmp_path / "c.safetensors")
    expected = dict(spec=case.spec, config=DIMS, capacity=cache.capacity, dtype=dtype)
    found = kvq.files.load(tmp_path / "c.safetensors", **expected)
    assert_equal(found, cache)
    with pytest.raises(AssertionError):
        assert_equal(dataclasses.replace(found, lengths=found.lengths + 1), cache)


def random_cache(spec: str) -> kvq.cache.Cache:
    """Return a bfloat16 cache of random bits, NaN among them: nothing may be converted on the
    way."""
    rng = np.random.default_rng(0)

    def bits(leaf):
        raw = rng.integers(0, 256, leaf.size * leaf.dtype.itemsize).astype(np.uint8)
        return jnp.asarray(raw.view(leaf.dtype).reshape(leaf.shape))

    cache = jax.tree.map(bits, kvq.init_cache(spec, DIMS, 2, 40, "bfloat16"))
    counts = jnp.array([3, 40], jnp.int32)
    layers = tuple(dataclasses.replace(layer, intact=counts) for layer in cache.layers)
    return dataclasses.replace(cache, layers=layers, lengths=counts)


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("spec", {"spec": "kivi:bits=4,sink=2,recent=12,block=16"}),
        ("dims", {"config": dataclasses.replace(DIMS, hidden_size=64)}),
        ("capacity", {"capacity": 91}),
        ("dtype", {"dtype": "float16"}),
        ("model_fingerprint", {"model_fingerprint": "b"}),
        ("parameters_fingerprint", {"parameters_fingerprint": "p"}),
    ],
)
def test_a_cache_of_something_else_is_refused_by_name(
    field: str, expected: dict, tmp_path: pathlib.Path
):
    path = tmp_path / "c.safetensors"
    kvq.files.save(filled(SPEC, LENGTHS), path, model_fingerprint="a")
    kvq.files.load(path, model_fingerprint="a", parameters_fingerprint="", dtype="torch.float32")
    with pytest.raises(ValueError, match=ONE_LINE.format(f"another {field}: ")):
        kvq.files.load(path, **expected)


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "c.safetensors"
    kvq.files.save(filled(SPEC, LENGTHS), path)
    return path


def rewritten(
    path: pathlib.Path, tensors: dict | None = None, header: dict | None = None
) -> pathlib.Path:
    """Return the file with tensors replaced (None: removed), header fields changed, and the
    checksum of what it holds then."""
    with safe_open(path, framework="numpy") as file:
        names = file.keys()
        held = {name: file.get_tensor(name) for name in names} | (tensors or {})
        fields = file.metadata() | (header or {})
    held, fields = ({k: v for k, v in d.items() if v is not None} for d in (held, fields))
    save_tensors(path, held, fields)
    return path


def header_of(**changes: Any) -> str:
    return json.dumps(dataclasses.asdict(DIMS) | changes)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"lengths": np.zeros(9, np.int32)}, r"tensor lengths is int32\[9\], expected int32\[8\]"),
        ({"lengths": np.zeros(8, np.float32)}, r"lengths is float32\[8\], expected int32\[8\]"),
        ({"lengths": np.full(8, 91, np.int32)}, "lengths are not between 0 and the capacity 90"),
        ({"lengths": np.full(8, -1, np.int32)}, "lengths are not between 0"),
        ({"lengths": None}, "tensor lengths is missing"),
        ({"layers.1.intact": None}, "tensor layers.1.intact is missing"),
        ({"layers.1.intact": np.full(8, 91, np.int32)}, "layers.1.intact is not between 0 and"),
        ({"extra": np.zeros(3, np.int8)}, "tensor extra is unknown"),
        ({"layers.1.ring.v": np.zeros((8, 2, 28, 31), np.float32)}, "tensor layers.1.ring.v is"),
    ],
)
def test_tensors_that_the_header_does_not_promise_are_refused(
    tensors: dict, message: str, saved: pathlib.Path
):
    with pytest.raises(ValueError, match=ONE_LINE.format(message)):
        kvq.files.load(rewritten(saved, tensors))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"format": None}, "not a saved cache"),
        ({"format_version": "4"}, "format_version='4'"),
        ({"spec": "kivvi"}, "spec='kivvi'"),
        ({"spec": "innerq"}, "tensor "),
        ({"dims": "[1"}, "dims="),
        ({"dims": header_of(num_hidden_layers=10**9)}, "dims="),
        ({"batch": "0"}, "batch=0"),
        ({"capacity": str(10**15)}, "tensor "),
        ({"dtype": "float99"}, "dtype='float99'"),
        ({"dims": "[" * 100_000}, "dims="),
        ({"spec": "kivi:skip_layers=0-999999999999"}, "spec='kivi:skip_layers=0-999999999999'"),
        ({"spec": "kivi:bits=8@50-60/2"}, "kivi:bits names layer 60"),
        ({"spec": "kivi:block=1000000007"}, "tensor "),
        ({"spec": "kivi", "dims": header_of(head_dim=1)}, "tensor "),
    ],
)
def test_headers_that_make_no_sense_are_refused(header: dict, message: str, saved: pathlib.Path):
    with pytest.raises(ValueError, match=ONE_LINE.format(message)):
        kvq.files.load(rewritten(saved, header=header))


@pytest.mark.parametrize(
    ("spec", "sizes", "message"),
    [
        ("waterfill", {"head_dim": 2_000_003}, "head_dim=2000003; a saved cache has at most 4096"),
        ("int4:group_size=3", {"head_dim": 10**12}, "head_dim=1000000000000; a saved cache has at"),
        ("int4:group_size=3", {"num_key_value_heads": 10**12}, "num_key_value_heads=10000000000"),
        ("waterfill", {"layer_heads": [[2, 32], [2, 2_000_003]]}, "head_dim=2000003; a saved cac"),
        ("waterfill", {"layer_heads": [[2, "32"], [2, 32]]}, "layer_heads of layer 0 are"),
        ("kivi", {"hidden_size": 10**12}, "hidden_size=1000000000000; a saved cache has at most"),
    ],
)
def test_a_header_that_asks_for_endless_work_is_refused_at_once(
    spec: str, sizes: dict, message: str, saved: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    rewritten(saved, header={"spec": spec, "dims": header_of(**sizes)})
    computed = mock.Mock(side_effect=AssertionError("a method computes with the sizes"))
    monkeypatch.setattr(type(kvq.methods.METHODS[spec.split(":")[0]]), "codec", computed)
    plans.cache_clear()
    for read in (kvq.files.load, kvq.files.saved_layout):
        with pytest.raises(ValueError, match=ONE_LINE.format(message)):
            read(saved)


def test_a_cache_that_would_not_be_loaded_is_not_saved(tmp_path: pathlib.Path):
    dims = dataclasses.replace(DIMS, hidden_size=(1 << 20) + 1)
    cache = kvq.init_cache(SPEC, dims, 1, 40)
    with pytest.raises(ValueError, match=ONE_LINE.format("this cache has hidden_size=1048577;")):
        kvq.files.save(cache, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_equal_caches_give_equal_bytes(saved: pathlib.Path):
    kvq.files.save(kvq.files.load(saved), saved.with_name("again"))
    assert saved.read_bytes() == saved.with_name("again").read_bytes()


def test_a_file_of_an_older_version_is_loaded_with_a_note_and_a_new_one_must_have_its_checksum(
    saved: pathlib.Path,
):
    cache = kvq.files.load(saved)
    with safe_open(saved, framework="numpy") as file:
        header = {field: value for field, value in file.metadata().items() if field != SHA256}
    tensors = load_file(saved)
    save_file(tensors, saved, metadata=header)
    with pytest.raises(ValueError, match=ONE_LINE.format("has no checksum")):
        kvq.files.load(saved)
    tensors = {name: array for name, array in tensors.items() if not name.endswith("intact")}
    save_tensors(saved, tensors, header | {"format_version": "2"})
    assert_equal(kvq.files.load(saved), cache)
    save_file(tensors, saved, metadata=header | {"format_version": "1"})
    with pytest.warns(NoChecksum, match="written before files had checksums"):
        assert_equal(kvq.files.load(saved), cache)


def test_a_file_of_something_else_is_refused(tmp_path: pathlib.Path):
    (tmp_path / "text").write_text("hello " * 100)
    with pytest.raises(ValueError, match=ONE_LINE.format("not a readable safetensors file")):
        kvq.files.load(tmp_path / "text")
    save_file({"a": np.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=ONE_LINE.format("not a saved cache")):
        kvq.files.load(tmp_path / "other.safetensors")
    with pytest.raises(FileNotFoundError, match="nothing"):
        kvq.files.load(tmp_path / "nothing")


def test_a_new_file_has_the_mode_that_the_umask_asks_for(tmp_path: pathlib.Path):
    old = os.umask(0o027)
    try:
        kvq.files.save(filled(SPEC, LENGTHS), tmp_path / "c.safetensors")
        (tmp_path / "plain").touch()
    finally:
        os.umask(old)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"c.safetensors": 0o640, "plain": 0o640}


def test_all_processes_raise_if_the_one_that_writes_cannot(
    saved: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """Processes that wait for one that has raised would wait forever."""
    cache, told = kvq.files.load(saved), []

    def broadcast(number: np.int32) -> np.int32:
        told.append(int(number))
        return np.int32(told[0])  # what the first process says

    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", broadcast)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for rank in (0, 1):
        monkeypatch.setattr(jax, "process_index", lambda rank=rank: rank)
        with pytest.raises(FileNotFoundError, match=r"No such file or directory.*missing"):
            kvq.files.save(cache, saved.parent / "missing" / "c")
    assert told == [errno.ENOENT, 0]
    told[:] = [0]
    kvq.files.save(cache, saved.with_name("unwritten"))
    assert not saved.with_name("unwritten").exists(), "only the first process writes"


def test_a_header_that_a_method_stumbles_over_is_refused(
    saved: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    told = ONE_LINE.format("the header does not describe a cache")
    for error in (IndexError("out of range"), ZeroDivisionError("modulo by zero")):
        stumble = mock.Mock(side_effect=error)
        monkeypatch.setattr(type(kvq.methods.METHODS["kivi"]), "codec", stumble)
        plans.cache_clear()
        with pytest.raises(ValueError, match=told):
            kvq.files.load(saved)
        assert stumble.called


@pytest.mark.parametrize("dtype", [*DTYPES.values(), ">i4", ">f8"])
def test_an_array_beside_a_cache_comes_back(dtype: str, tmp_path: pathlib.Path):
    array = np.arange(6).reshape(2, 3).astype(jnp.dtype(dtype)).T
    kvq.files.save(kvq.init_cache(SPEC, DIMS, 1, 40), tmp_path / "c", beside={"x": array})
    kvq.files.load(tmp_path / "c")
    loaded = kvq.files.load_beside(tmp_path / "c")["x"]
    assert loaded.dtype.name == array.dtype.name
    np.testing.assert_array_equal(loaded, array)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int4", np.longdouble, "complex128"])
def test_an_array_that_would_not_come_back_is_not_saved(dtype: str, saved: pathlib.Path):
    before = saved.read_bytes()
    told = ONE_LINE.format(f"beside.x must be an array of numbers, got {jnp.dtype(dtype).name}, w")
    with pytest.raises(ValueError, match=told):
        kvq.files.save(kvq.files.load(saved), saved, beside={"x": np.zeros(2, jnp.dtype(dtype))})
    assert saved.read_bytes() == before


def test_an_array_that_numpy_cannot_read_is_refused(saved: pathlib.Path):
    rewritten(saved, {"beside.x": np.zeros(2, jnp.float8_e4m3fn)})
    for read in (kvq.files.load, kvq.files.load_beside):
        with pytest.raises(ValueError, match=ONE_LINE.format("tensor beside.x is F8_E4M3, which")):
            read(saved)


def test_fingerprints_tell_trees_apart():
    tree = {"a": jnp.arange(6, dtype=jnp.float32).reshape(2, 3), "b": jnp.ones((), jnp.bfloat16)}
    found = kvq.files.fingerprint(tree)
    assert found == kvq.files.fingerprint(jax.tree.map(np.asarray, tree))
    assert len(found) == 64
    others = (
        tree | {"a": tree["a"].reshape(3, 2)},
        tree | {"a": tree["a"].at[1, 2].add(1e-6)},
        tree | {"b": jnp.ones((), jnp.float16)},
        {"a": tree["a"]},
    )
    assert len({found, *(kvq.files.fingerprint(other) for other in others)}) == 5

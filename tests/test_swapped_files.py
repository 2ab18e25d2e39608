"""A file in the place of another is refused in one line at the command, whatever it holds."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from tests.kvq_jax.cache_runs import DIMS

CALIBRATED = "k=kvquant:bits=2,outliers=0.1+v=kivi:bits=2+cache:sink=1,recent=0,block=32"


@pytest.fixture
def sound(model: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """Return a folder with a model, and a cache of random numbers."""
    shutil.copytree(model, tmp_path / "model")
    numbers = np.random.default_rng(0)
    cache = kvq.init_cache("kivi:sink=2,recent=12,block=16", DIMS, 1, 40, "float32")
    filled = jax.tree.map(
        lambda leaf: jnp.asarray(numbers.integers(0, 40, leaf.shape).astype(leaf.dtype)), cache
    )
    kvq.files.save(filled, tmp_path / "cache.safetensors")
    return tmp_path


# the file that takes the place of another, and the command that reads it then
SWAPS = {
    "a cache for a calibration": (
        ("cache.safetensors", "calibration.safetensors"),
        ("doctor", "model", "--cache", CALIBRATED, "--calibration", "calibration.safetensors"),
    ),
    "a cache for weights": (
        ("cache.safetensors", "model/model.safetensors"),
        ("generate", "model", "--prompt", "It was", "--max-new-tokens", "1"),
    ),
    "a tokenizer for a config": (
        ("model/tokenizer.json", "model/config.json"),
        ("memory", "model", "--cache", "kivi"),
    ),
    "a config for a tokenizer": (
        ("model/config.json", "model/tokenizer.json"),
        ("generate", "model", "--prompt", "It was", "--capacity", "1"),
    ),
}


@pytest.mark.parametrize("name", SWAPS)
@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.filterwarnings("default")
def test_a_file_in_the_place_of_another_is_refused_in_one_line(
    name: str, sound: pathlib.Path, run, monkeypatch: pytest.MonkeyPatch
):
    (source, target), command = SWAPS[name]
    monkeypatch.chdir(sound)
    shutil.copy(source, target)
    code, _, err = run(*command)
    assert code == 2, name
    harmless = ("kvq: warning:", "kvq: loading", "kvq: reading")
    (line,) = (line for line in err.splitlines() if not line.startswith(harmless))
    assert line.startswith("kvq: error: "), line


def test_tensors_that_change_places_in_a_cache_are_found(sound: pathlib.Path):
    """The file keeps its names, shapes and sizes, and every byte of it somewhere."""
    file = sound / "cache.safetensors"
    content = file.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    one = next(name for name in json.loads(content[8:size]) if name.startswith("layers.0."))
    first, second = (f'"{name}"'.encode() for name in (one, one.replace("layers.0.", "layers.1.")))
    header = content[8:size].replace(first, b"?").replace(second, first).replace(b"?", second)
    assert header != content[8:size]
    file.write_bytes(content[:8] + header + content[size:])
    with pytest.raises(ValueError, match="is damaged: its content does not have the checksum"):
        kvq.files.load(file)

"""The weights that ship with kvq state their checksum, so damage is seen when they are loaded."""

import pathlib
import shutil

import pytest

from kvq_models import EMBEDDED, load_llama


def test_a_flipped_bit_of_the_embedded_weights_is_seen(tmp_path: pathlib.Path):
    model = tmp_path / "embedded"
    shutil.copytree(EMBEDDED, model)
    load_llama(model, dtype="float32")
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1000] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged: its content does not have the checksum"):
        load_llama(model, dtype="float32")

"""Change a saved checkpoint, and read the error of loading it."""

import json
import pathlib
from collections.abc import Callable

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvq_models.llama.checkpoint import CheckpointError, load_llama


def change_tensors(
    directory: pathlib.Path, change: Callable[[dict[str, np.ndarray]], object]
) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def change_config(directory: pathlib.Path, **changes) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refusal(directory: pathlib.Path | str) -> str:
    with pytest.raises(CheckpointError) as error:
        load_llama(directory)
    assert "\n" not in str(error.value)
    return str(error.value)

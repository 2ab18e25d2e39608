"""Open the files of a model: its configuration, headers and tokenizer, without JAX."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TypeAlias

from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.gguf_file import GgufFile
from kvq_models.llama.hf_directory import HfDirectory
from kvq_models.llama.hub import Part, local_files
from kvq_models.llama.stored_tensor import CheckpointError
from kvq_models.named_models.names import located

# The files of a model: `config`, `fields` (the configuration as the file writes it), `tensors`
# (headers by their Hugging Face names), `read(name)` (a tensor in Hugging Face's orientation) and
# `tokenizer()`. Everything is read on demand.
Checkpoint: TypeAlias = HfDirectory | GgufFile


def open_checkpoint(path_or_hub_id: str | os.PathLike[str], part: Part = "all") -> Checkpoint:
    """Open a GGUF file, a local directory, a named model, or the local snapshot of a Hub
    checkpoint, of which only `part` is fetched. A GGUF file on the Hub is fetched whole.

    Raises, in one line, CheckpointError if there is no checkpoint, and FileNotFoundError for a
    named model that is not on this machine yet.
    """
    if path_or_hub_id == "":  # which Path takes for the current directory
        raise CheckpointError(
            "the name of the model is empty; give a directory, a GGUF file, a Hub id or a name such"
            " as 'embedded'"
        )
    path = local_files(located(path_or_hub_id), part)
    if not path.is_dir():
        if path.suffix.lower() != ".gguf":
            raise CheckpointError(
                f"{str(path)!r} is not a directory with config.json and safetensors, nor a .gguf"
                " file"
            )
        stamp = path.stat()
        return _gguf_file(path, stamp.st_mtime_ns, stamp.st_size)
    _check_kind(path)
    return HfDirectory(path)


def _check_kind(directory: Path) -> None:
    """Raise CheckpointError for a directory of GGUF files, or of a LoRA adapter alone, which may
    have its model's config.json."""
    has_config = (directory / "config.json").exists()
    if not has_config and (files := sorted(directory.glob("*.gguf"))):
        raise CheckpointError(
            f"{str(directory)!r} holds GGUF files and no config.json: give the path of the file,"
            f" such as {str(files[0])!r}"
        )
    weights = {file.name for kind in ("safetensors", "bin") for file in directory.glob(f"*.{kind}")}
    of_model = has_config and any(not name.startswith("adapter_") for name in weights)
    if (directory / "adapter_config.json").exists() and not of_model:
        raise CheckpointError(
            f"{str(directory)!r} is a LoRA adapter without its model: merge it into the model"
            " (merge_and_unload in PEFT), and save that"
        )


@functools.lru_cache(maxsize=1)
def _gguf_file(path: Path, changed_ns: int, size: int) -> GgufFile:
    """Open a file once: a command asks for its configuration, its tokenizer and its weights one
    after the other."""
    del changed_ns, size  # a changed file is another one
    return GgufFile(path)


def read_config(path_or_hub_id: str | os.PathLike[str]) -> LlamaConfig:
    """Return the configuration without touching (or downloading) weights, of a model or of its
    config.json. Raises as `load_llama` does."""
    if Path(path_or_hub_id).name == "config.json":
        path_or_hub_id = Path(path_or_hub_id).parent
    return open_checkpoint(path_or_hub_id, "config").config

"""Find a checkpoint's directory: here, or the local snapshot of one on the Hub."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

from kvq_jax.did_you_mean import hint
from kvq_models.llama.hf_directory import CONFIG_FILES, INDEX_FILE
from kvq_models.llama.hf_tokenizer import TOKENIZER_EXTRAS, TOKENIZER_FILES
from kvq_models.llama.quantized.quantization_config import OWN_FILES
from kvq_models.llama.stored_tensor import CheckpointError, first_line
from kvq_models.named_models.names import NAMES

WEIGHT_FILES = ("*.safetensors", INDEX_FILE)

# parts of a Hub checkpoint: its configuration, also its tokenizer, or also its weights
Part = Literal["config", "tokenizer", "all"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def local_directory(path_or_hub_id: str | os.PathLike[str], part: Part) -> Path:
    """Return the local directory, or the local snapshot of a Hub checkpoint, of which only `part`
    is fetched."""
    path = Path(path_or_hub_id)
    if path.is_dir():
        return path
    if not isinstance(path_or_hub_id, str) or not _HUB_ID.fullmatch(path_or_hub_id):
        nearest = hint(str(path), NAMES)
        raise CheckpointError(
            f"{str(path)!r} does not exist, and is not a Hub id (organisation/name)"
            + (f".{nearest}" if nearest else "")
        )
    from huggingface_hub import snapshot_download  # imported late: only Hub ids need it
    from huggingface_hub.errors import LocalEntryNotFoundError

    tokenizer = () if part == "config" else TOKENIZER_FILES + TOKENIZER_EXTRAS
    # without its own file, a quantized checkpoint would look like one in floats
    patterns = (*CONFIG_FILES, *OWN_FILES) + tokenizer + (WEIGHT_FILES if part == "all" else ())
    try:
        # Originals in another layout would double the download.
        ignored = ["consolidated*", "original/*"]
        return Path(
            snapshot_download(
                path_or_hub_id, allow_patterns=list(patterns), ignore_patterns=ignored
            )
        )
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{path_or_hub_id!r} does not exist here, and the Hub could not be reached to look for"
            " it there"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path_or_hub_id!r} does not exist here, and the Hub answered: {first_line(error)}"
        ) from error

"""Find a checkpoint's files: here, or the local snapshot of those on the Hub."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from kvq_jax.did_you_mean import hint
from kvq_models.llama.gguf_file import pattern_of_parts
from kvq_models.llama.hf_directory import CONFIG_FILES, INDEX_FILE
from kvq_models.llama.hf_tokenizer import TOKENIZER_EXTRAS, TOKENIZER_FILES
from kvq_models.llama.quantized.quantization_config import OWN_FILES
from kvq_models.llama.stored_tensor import CheckpointError, first_line
from kvq_models.named_models.names import NAMES

WEIGHT_FILES = ("*.safetensors", INDEX_FILE)

# parts of a Hub checkpoint: its configuration, also its tokenizer, or also its weights
Part = Literal["config", "tokenizer", "all"]

# organisation/name, a GGUF file in it, and a branch, tag or commit. No part of the file's path
# begins with a dot, so that it stays in the snapshot.
_HUB_ID = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+)"
    r"(?P<file>(?:/[^./@\\][^/@\\]*)+\.gguf)?"
    r"(?:@(?P<revision>[\w./-]+))?",
    re.IGNORECASE,
)


def local_files(path_or_hub_id: str | os.PathLike[str], part: Part) -> Path:
    """Return the local directory or file, or the local snapshot of a Hub checkpoint, of which only
    `part` is fetched, or of a GGUF file there, which is fetched whole.

    Raises CheckpointError if there is none, or the Hub does not give it.
    """
    path = Path(path_or_hub_id)
    if path.exists():
        return path
    hub_id = _HUB_ID.fullmatch(path_or_hub_id) if isinstance(path_or_hub_id, str) else None
    if hub_id is None:
        nearest = hint(str(path), NAMES)
        raise CheckpointError(
            f"{str(path)!r} does not exist, and is not a Hub id (organisation/name)"
            + (f".{nearest}" if nearest else "")
        )
    repository, file, revision = hub_id.group("repository", "file", "revision")
    if file is not None:
        snapshot = _snapshot(hub_id[0], repository, revision, [pattern_of_parts(file[1:])])
        if not (snapshot / file[1:]).is_file():
            raise CheckpointError(f"{repository!r} has no file {file[1:]!r} on the Hub")
        return snapshot / file[1:]
    tokenizer = () if part == "config" else TOKENIZER_FILES + TOKENIZER_EXTRAS
    weights = WEIGHT_FILES if part == "all" else ()
    # without its own file, a quantized checkpoint would look like one in floats
    patterns = (*CONFIG_FILES, *OWN_FILES, *tokenizer, *weights)
    snapshot = _snapshot(hub_id[0], repository, revision, patterns)
    if not (snapshot / "config.json").exists():
        raise CheckpointError(
            f"{repository!r} has no config.json on the Hub; name a GGUF file in it as"
            f" {repository}/FILE.gguf"
        )
    return snapshot


def _snapshot(hub_id: str, repository: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Return the local snapshot of the files that match one of the patterns."""
    from huggingface_hub import snapshot_download  # imported late: only Hub ids need it
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=list(patterns),
                # originals in another layout would double the download
                ignore_patterns=["consolidated*", "original/*"],
            )
        )
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{hub_id!r} does not exist here, and the Hub could not be reached to look for it there"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{hub_id!r} does not exist here, and the Hub answered: {first_line(error)}"
        ) from error

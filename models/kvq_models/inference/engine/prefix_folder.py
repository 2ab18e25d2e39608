"""Pieces of prompts on disk, for a later server: one safetensors file each, named by its key.

    header   format "kvq-prefix", version, key and the key of the piece that it continues, length,
             starts, and the checksum of all of it
    tensors  0, 1, ...: the part of each of the row's leaves; logits

Keys depend on the weights, the cache's layout and the versions that decide its bits (`scope_of`),
so a file never matches another model. A separate thread writes files, whole or not at all: requests
do not wait for the disk. Several servers may share a folder.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors import SafetensorError, safe_open

from kvq_jax.files.checksum import read_tensors, write_tensors
from kvq_jax.files.json_text import parse_json
from kvq_jax.files.whole import remove_unfinished, replacing
from kvq_models.inference.engine.pieces import RowPiece

FORMAT, VERSION = "kvq-prefix", "1"
UNWRITTEN = 8  # pieces that may wait for the disk; further ones are not written
SUFFIX, LOGITS = ".kvq-prefix.safetensors", "logits"  # no other file is counted, read or deleted

_log = logging.getLogger("kvq.prefixes")


class PrefixFolder:
    """Pieces in files of at most `limit` bytes together. The least recently used go first, the end
    of a chain before its beginning.

    Files left by killed writers, and pieces whose beginning is gone, are deleted. Raises OSError if
    the folder cannot be created.
    """

    def __init__(self, folder: Path, limit: int):
        if limit < 1:
            raise ValueError(f"{limit=} bytes must be at least 1")
        self.folder, self.limit = folder, limit
        self._create()
        remove_unfinished(folder)
        self._delete_orphans()
        self._drop_oldest()
        self._writer = ThreadPoolExecutor(1, "kvq-prefixes")
        self._room = threading.BoundedSemaphore(UNWRITTEN)

    @property
    def nbytes(self) -> int:
        return sum(size for _, size, _ in self._files())

    def get(self, key: bytes) -> RowPiece | None:
        """Return the piece of a key, or None if there is none. A damaged file is deleted with a
        warning."""
        path = self._path(key)
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise ValueError(f"{str(path)!r} is no regular file")  # reading it could wait
            with safe_open(path, framework="numpy") as file:
                tensors = read_tensors(file, repr(str(path)))
                header = file.metadata()
            stated = [header.get(name) for name in ("format", "version", "key")]
            if stated != [FORMAT, VERSION, key.hex()]:
                raise ValueError(f"{str(path)!r} holds another piece than its name says")
            logits = tensors.pop(LOGITS)
            arrays = tuple(tensors[str(i)] for i in range(len(tensors)))
            starts = tuple(parse_json(header["starts"]))
            return RowPiece(int(header["length"]), starts, arrays, logits)
        except FileNotFoundError:
            return None
        except KeyError as error:
            self.refuse(key, f"it has no {error}")
        except (SafetensorError, ValueError, TypeError, OSError) as error:
            self.refuse(key, error)
        return None

    def refuse(self, key: bytes, reason: object) -> None:
        """Delete the file of a piece that cannot be used, with a warning."""
        path = self._path(key)
        try:
            path.unlink(missing_ok=True)
            _log.warning("%s: %s; the file is deleted", path, reason)
        except OSError as error:
            _log.warning(
                "%s: %s; it is not used and cannot be deleted (%s): delete it", path, reason, error
            )

    def put(self, keys: Sequence[bytes], piece: RowPiece) -> None:
        """Schedule writing the piece of keys[-1], which continues the others. It is dropped if many
        wait to be written."""
        if piece.nbytes < self.limit and self._room.acquire(blocking=False):
            self._writer.submit(self._write, list(keys), piece).add_done_callback(
                lambda _: self._room.release()
            )

    def use(self, keys: Sequence[bytes]) -> None:
        """Note that these pieces, which continue each other, were used: the first becomes the
        newest."""
        self._use_at(time.time_ns(), keys)

    def close(self) -> None:
        """Wait until everything is written."""
        self._writer.shutdown()

    def _write(self, keys: list[bytes], piece: RowPiece) -> None:
        tensors = {str(i): array for i, array in enumerate(piece.arrays)} | {LOGITS: piece.logits}
        header = {
            "format": FORMAT,
            "version": VERSION,
            "key": keys[-1].hex(),
            "continues": keys[-2].hex() if len(keys) > 1 else "",
            "length": str(piece.length),
            "starts": json.dumps(piece.starts),
        }
        now, age = time.time_ns(), len(keys) - 1
        try:
            self._create()
            *before, path = map(self._path, keys)
            if path.exists() or not all(map(Path.exists, before)):
                return
            # before the new file exists: a killed writer leaves no beginning older than its end
            self._use_at(now, keys[:-1])
            with replacing(path) as unfinished:
                unfinished.touch(0o600)  # prompts of clients
                write_tensors(unfinished, tensors, header)
                os.utime(unfinished, ns=(now - age, now - age))
            self._drop_oldest()
        except (OSError, SafetensorError) as error:  # nobody else would see it: requests go on
            _log.warning("a prefix could not be written: %s", error)

    def _use_at(self, now: int, keys: Sequence[bytes]) -> None:
        for age, key in enumerate(keys):
            try:
                os.utime(self._path(key), ns=(now - age, now - age))
            except OSError:
                # missing, or just deleted by another server: the pieces that continue it are
                # useless
                return

    def _drop_oldest(self) -> None:
        files = sorted(self._files())
        stored_bytes = sum(size for _, size, _ in files)
        for _, size, path in files:
            if stored_bytes <= self.limit:
                return
            path.unlink(missing_ok=True)
            stored_bytes -= size

    def _delete_orphans(self) -> None:
        """Delete unreadable files and the pieces that no chain from a prompt's first chunk
        reaches."""
        before = {path: _continues(path) for _, _, path in self._files()}
        while orphans := {
            path
            for path, parent in before.items()
            if parent is None or (parent and self.folder / parent not in before)
        }:
            for path in orphans:
                path.unlink(missing_ok=True)
                del before[path]

    def _files(self) -> Iterable[tuple[int, int, Path]]:
        """Yield (time of last use, bytes, path) of each piece."""
        # another process may delete a file, or all of them
        with contextlib.suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.name.endswith(SUFFIX) and entry.is_file():
                        status = entry.stat()
                        yield status.st_mtime_ns, status.st_size, Path(entry.path)

    def _create(self) -> None:
        """Create the folder, which only its owner may enter."""
        self.folder.mkdir(0o700, parents=True, exist_ok=True)

    def _path(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}{SUFFIX}"


def _continues(path: Path) -> str | None:
    """Return the name of the file that a piece continues, "" for a first chunk, or None if the file
    cannot be read."""
    try:
        with safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
    except (SafetensorError, OSError):
        return None
    key = header.get("continues")
    return f"{key}{SUFFIX}" if key else key

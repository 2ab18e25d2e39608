"""Files and directories that appear whole or not at all, wherever the process that writes them is
killed.

What is being written stands in a directory of its own beside its future place, .kvq-unfinished-*,
and moves there by one rename when its bytes are on the disk. A lock inside that directory is held
by its writer alone, and the system releases it when the writer dies; so the next writer in the same
folder knows what a killed one has left, and removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import filelock

UNFINISHED, CONTENT, DISPLACED = ".kvq-unfinished-", "content", "displaced"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux's renameat2
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path to write a file to, and move it over `path` at the end.

    After an error or a kill, `path` is as it was. Raises OSError where the folder of `path` is
    missing or cannot be written.
    """
    path = Path(path)
    with _unfinished(path) as folder:
        content = folder / CONTENT
        yield content
        _sync(content)
        os.replace(content, path)
        _sync(path.parent)


def write(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file whole or not at all; text in UTF-8. Raises as `replacing`."""
    with replacing(path) as unfinished:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a new directory to fill, and put it in the place of `path` at the end, with all that it
    holds at once.

    A directory that stands at `path` is replaced whole, in one step where the system can swap two
    directories (Linux, on most file systems). Elsewhere there is a moment in which neither is
    there; after a kill in it, the next writer in that folder puts the old one back. After an error
    or a kill at any other moment, `path` is as it was. Folders above `path` are made. Raises
    OSError where that fails.
    """
    path = Path(os.path.realpath(path))  # a link to a directory keeps its name
    path.parent.mkdir(parents=True, exist_ok=True)
    with _unfinished(path) as folder:
        content = folder / CONTENT
        content.mkdir()
        yield content
        for place, _, files in os.walk(content):
            for name in files:
                _sync(Path(place, name))
            _sync(Path(place))
        if path.is_dir() and any(path.iterdir()):
            _swap(content, path, folder / DISPLACED)
        else:
            os.rename(content, path)
        _sync(path.parent)


def delete_directory(path: str | os.PathLike[str]) -> None:
    """Delete a directory as a whole: a kill leaves all of it, or what the next writer in the same
    folder removes."""
    path = Path(os.path.realpath(path))
    with _unfinished(path) as folder:
        os.rename(path, folder / CONTENT)
        _sync(path.parent)


def link_others(old: Path, new: Path) -> None:
    """Give a directory the files and folders of an older one whose names it lacks, as links where
    the file system has them."""
    for other in old.iterdir():
        if (new / other.name).exists() or other.name.startswith(UNFINISHED):
            continue
        if other.is_dir() and not other.is_symlink():
            shutil.copytree(other, new / other.name, symlinks=True, copy_function=_link)
        else:
            _link(other, new / other.name)


def remove_unfinished(folder: Path) -> None:
    """Remove what killed writers have left in a folder. Every writer does this for its own; nothing
    that is being written is touched."""
    for left in folder.glob(f"{UNFINISHED}*"):
        with (
            contextlib.suppress(OSError),
            filelock.FileLock(left / "lock", timeout=0),
        ):  # held: someone is writing it
            for displaced in (left / DISPLACED).glob("*"):
                if not (folder / displaced.name).exists():
                    os.rename(displaced, folder / displaced.name)
            shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _unfinished(path: Path) -> Iterator[Path]:
    """Yield a new locked directory beside `path`, and remove it with all that it holds by then."""
    remove_unfinished(path.parent)
    while True:
        folder = path.with_name(f"{UNFINISHED}{secrets.token_hex(8)}")
        try:
            folder.mkdir()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
        lock = filelock.FileLock(folder / "lock", timeout=0)
        with contextlib.suppress(
            filelock.Timeout, FileNotFoundError
        ):  # another writer took it for a killed one's, before it was locked
            lock.acquire()
            break
    try:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        lock.release()


def _swap(content: Path, path: Path, displaced: Path) -> None:
    """Put `content` in the place of the directory `path`."""
    if _exchanged(content, path):
        return
    displaced.mkdir()
    os.rename(path, displaced / path.name)
    try:
        os.rename(content, path)
    except OSError:
        os.rename(displaced / path.name, path)
        raise


def _exchanged(one: Path, other: Path) -> bool:
    """Swap two directories in one step of the kernel; return False where it cannot do that."""
    renameat2 = getattr(_LIBC, "renameat2", None)
    return (
        renameat2 is not None
        and renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
        == 0
    )


def _link(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _sync(path: Path) -> None:
    """Return when a file's bytes, or the names in a directory, are on the disk."""
    if os.name == "nt":
        return  # Windows syncs only what is open for writing
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Write files and directories whole or not at all, even if the writing process is killed.

The new content is written to a temporary directory beside its future place, .kvq-unfinished-*, and
moves there by one rename when its bytes are on the disk. Its writer alone holds a lock inside that
directory, and the system releases the lock when the writer dies. So the next writer in the same
folder knows what a killed one has left, and removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
import stat
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

    A link stays, and the file that it names is replaced. The new file has the mode of the old one:
    who could not read that cannot read this, not even while it is written. After an error or a
    kill, `path` is as it was. Raise OSError if the folder of `path` is missing or cannot be
    written, or if `path` is a device or a pipe: a rename would put a file in its place.
    """
    _check_named(path)
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, "Is a directory, not a file", str(path))
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "Is a device or a pipe, not a file", str(path))
    path = Path(os.path.realpath(path))
    with _unfinished(path) as folder:
        content = folder / CONTENT
        with named_as(path, content):
            yield content
            _keep_mode(content, path)
            _sync(content)
        os.replace(content, path)
        _sync(path.parent)


def write(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file whole or not at all, text in UTF-8. Raise as `replacing`."""
    with replacing(path) as unfinished:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a new directory to fill, and move it as a whole to `path` at the end.

    An existing directory at `path` is replaced whole, in one step if the system can swap two
    directories (Linux, on most file systems). Elsewhere there is a moment in which neither is
    there. After a kill in that moment, the next writer in that folder puts the old one back. After
    an error or a kill at any other moment, `path` is as it was. The new directory and its files
    keep the modes of the old. Folders above `path` are made.
    Raise OSError if that fails, and for the current folder: this process and the caller's shell
    would stay in the old one.
    """
    _check_named(path)
    path = Path(os.path.realpath(path))  # a link to a directory keeps its name
    if path.exists() and path.samefile(os.curdir):
        raise OSError(errno.EBUSY, "Is the current folder, which cannot be replaced", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with _unfinished(path) as folder:
        content = folder / CONTENT
        content.mkdir()
        with named_as(path, content):
            yield content
        for place, _, files in os.walk(content):
            here = Path(place)
            for new in (*(here / name for name in files), here):
                _keep_mode(new, path / new.relative_to(content))
                _sync(new)
        if path.is_dir() and any(path.iterdir()):
            _swap(content, path, folder / DISPLACED)
        else:
            os.rename(content, path)
        _sync(path.parent)


def _check_named(path: str | os.PathLike[str]) -> None:
    """Raise FileNotFoundError for an empty name, which `os` and `pathlib` take for the current
    folder."""
    if not os.fspath(path):
        raise FileNotFoundError(errno.ENOENT, "The name is empty", "")


@contextlib.contextmanager
def named_as(path: Path, content: Path) -> Iterator[None]:
    """Give errors about the temporary content, or about no file, the name that the caller knows.
    Python's errors of a write name no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        elif isinstance(error.filename, str) and error.filename.startswith(str(content)):
            error.filename = str(path) + error.filename.removeprefix(str(content))
        raise


def delete_directory(path: str | os.PathLike[str]) -> None:
    """Delete a directory as a whole. A kill leaves all of it, or a remainder that the next writer
    in the same folder removes."""
    path = Path(os.path.realpath(path))
    with _unfinished(path) as folder:
        os.rename(path, folder / CONTENT)
        _sync(path.parent)


def link_others(old: Path, new: Path) -> None:
    """Give a directory the files and folders of an older one whose names it lacks, as links if the
    file system has them."""
    for other in old.iterdir():
        if (new / other.name).exists() or other.name.startswith(UNFINISHED):
            continue
        if other.is_dir() and not other.is_symlink():
            shutil.copytree(other, new / other.name, symlinks=True, copy_function=_link)
        else:
            _link(other, new / other.name)


def remove_unfinished(folder: Path) -> None:
    """Remove the remainders of killed writers from a folder, but nothing that is being written.
    Every writer does this in its own folder."""
    for left in folder.glob(f"{UNFINISHED}*"):
        # a lock that another process holds: that process is writing
        with contextlib.suppress(OSError), filelock.FileLock(left / "lock", timeout=0):
            for displaced in (left / DISPLACED).glob("*"):
                if not (folder / displaced.name).exists():
                    os.rename(displaced, folder / displaced.name)
            shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _unfinished(path: Path) -> Iterator[Path]:
    """Yield a new locked directory beside `path`, and remove it with its contents at the end."""
    remove_unfinished(path.parent)
    while True:
        folder = path.with_name(f"{UNFINISHED}{secrets.token_hex(8)}")
        try:
            folder.mkdir(0o700 if _is_private(path) else 0o777)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
        lock = filelock.FileLock(folder / "lock", timeout=0)
        # Before it is locked, another writer may take it for a killed writer's directory.
        with contextlib.suppress(filelock.Timeout, FileNotFoundError):
            lock.acquire()
            break
    try:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        lock.release()


def _keep_mode(new: Path, old: Path) -> None:
    """Give a new file or directory the mode of the one that it replaces, if there is one of its
    kind."""
    if new.is_symlink() or not old.exists() or old.is_dir() != new.is_dir():
        return
    mode = stat.S_IMODE(old.stat().st_mode)
    if mode != stat.S_IMODE(new.stat().st_mode):  # some file systems have one mode, and no chmod
        new.chmod(mode)


def _is_private(path: Path) -> bool:
    return path.exists() and not path.stat().st_mode & stat.S_IROTH


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
    """Swap two directories in one step of the kernel. Return False if it cannot do that."""
    renameat2 = getattr(_LIBC, "renameat2", None)
    if renameat2 is None:
        return False
    paths = _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other)
    return renameat2(*paths, _RENAME_EXCHANGE) == 0


def _link(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _sync(path: Path) -> None:
    """Wait until a file's bytes, or the names in a directory, are on the disk."""
    if os.name == "nt":
        return  # Windows syncs only files that are open for writing
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

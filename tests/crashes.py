"""A process that dies at a chosen step of what it writes, and a disk that loses what was not
synced.

Every call that changes the file system is a step. At the step that is asked for, `Killed` is
raised, which no handler catches, and so it is at every step after it: a dead process cleans nothing
up. Files that were made and not synced are then cut to half of their bytes.
"""

import builtins
import contextlib
import gc
import io
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvq_jax.files import checksum, whole

# functions of os
CHANGES = ("mkdir", "rename", "replace", "unlink", "remove", "rmdir", "link", "chmod")


class Killed(BaseException):
    """The process is dead."""


class Disk:
    """The steps that were taken, by name, and the files that are not synced. at: the step that is
    not taken, from 1 on; None: all are."""

    def __init__(self, at: int | None = None):
        self.at, self.steps = at, list[str]()
        self._unsynced: dict[tuple[int, int], int] = {}  # file descriptors by device and inode

    def step(self, name: str) -> None:
        self.steps.append(name)
        if self.at is not None and len(self.steps) >= self.at:
            raise Killed(name)

    def made(self, handle: int) -> None:
        """Remember a new file until it is synced."""
        status = os.fstat(handle)
        self._unsynced[status.st_dev, status.st_ino] = os.dup(handle)

    def synced(self, handle: int) -> None:
        status = os.fstat(handle)
        if (status.st_dev, status.st_ino) in self._unsynced:
            os.close(self._unsynced.pop((status.st_dev, status.st_ino)))

    def stop(self, *, lose: bool) -> None:
        for handle in self._unsynced.values():
            if lose:
                os.ftruncate(handle, os.fstat(handle).st_size // 2)
            os.close(handle)
        self._unsynced.clear()


@contextlib.contextmanager
def watched(disk: Disk) -> Iterator[None]:
    """Make every change of the file system a step of this disk, as long as the block lasts."""
    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, _counted(disk, name, getattr(os, name)))
        patch.setattr(os, "fsync", _synced(disk))
        patch.setattr(os, "open", _os_opened(disk, os.open))
        opened = _opened(disk, io.open)
        patch.setattr(io, "open", opened)
        patch.setattr(builtins, "open", opened)
        patch.setattr(whole, "_exchanged", _counted(disk, "exchange", whole._exchanged))
        patch.setattr(checksum, "save_file", _tensors_saved(disk, checksum.save_file))
        yield


def steps_of(write: Callable[[], object]) -> list[str]:
    """Return the names of the steps that a writer takes."""
    disk = Disk()
    with watched(disk):
        write()
    disk.stop(lose=False)
    return disk.steps


def killed_at(step: int, write: Callable[[], object]) -> str:
    """Run a writer that dies in place of a step, and return the name of that step."""
    disk = Disk(step)
    with watched(disk), pytest.raises(Killed):
        write()
    disk.stop(lose=True)
    gc.collect()  # a dead process holds no lock
    return disk.steps[step - 1]


def listing(folder: pathlib.Path) -> set[str]:
    """Return all files and folders below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def _counted(disk: Disk, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        disk.step(name)
        return function(*arguments, **options)

    return call


def _synced(disk: Disk) -> Callable[[int], None]:
    """Return an os.fsync that waits for no disk."""

    def fsync(handle: Any) -> None:
        disk.step("fsync")
        disk.synced(handle)

    return fsync


def _os_opened(disk: Disk, original: Callable[..., int]) -> Callable[..., int]:
    def os_open(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if not flags & (os.O_CREAT | os.O_TRUNC):
            return original(path, flags, *arguments, **options)
        disk.step("create")
        return original(path, flags, *arguments, **options)

    return os_open


def _opened(disk: Disk, original: Callable[..., Any]) -> Callable[..., Any]:
    def opened(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if not set(mode) & set("wax+"):
            return original(file, mode, *arguments, **options)
        disk.step(f"open {mode}")
        stream = original(file, mode, *arguments, **options)
        if "w" in mode or "x" in mode:
            disk.made(stream.fileno())
        return stream

    return opened


def _tensors_saved(disk: Disk, original: Callable[..., None]) -> Callable[..., None]:
    """Return safetensors' function, which writes a file with a name of its own beside the one that
    it is given, and renames it."""

    def save_file(tensors: Any, path: pathlib.Path, metadata: Any = None) -> None:
        disk.step("save_file")
        try:
            disk.step("save_file, half written")
        except Killed:
            pathlib.Path(path).with_name(".tmpAbCdEf").touch()
            raise
        original(tensors, path, metadata=metadata)
        with io.FileIO(str(path), "r+") as file:
            disk.made(file.fileno())

    return save_file

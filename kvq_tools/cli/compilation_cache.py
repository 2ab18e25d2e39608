"""Keep compiled programs between runs in the user's cache folder, with JAX's persistent compilation
cache.

A cache that the user chose (JAX_COMPILATION_CACHE_DIR, or jax.config in a program that calls
`main`) stays in use.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from kvq_jax.files.user_cache import cache_folder
from kvq_tools.cli.console import warn

MAX_BYTES = 1 << 30  # on disk; the least recently used programs go first
MIN_SECONDS = 0.2  # programs that compile faster are not kept


def folder() -> Path:
    """Return this machine's folder. Programs contain instructions of its processor, and several
    machines may share a home."""
    return cache_folder() / "compiled" / _processor()


def begin() -> None:
    """Read and keep compiled programs from now on. Does nothing if a cache was already chosen or
    the folder cannot be made. Warns of a folder that others can write: programs in it would run."""
    if _setting("jax_compilation_cache_dir") is not None or not _setting(
        "jax_enable_compilation_cache"
    ):
        return
    try:
        folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        trusted = _is_of_this_user(folder())
    except OSError:  # the home is read-only: every run compiles anew
        return
    if not trusted:
        warn(
            f"compiled programs are not kept: others can write {folder()}; chmod go-w it, or delete"
            " it"
        )
        return
    _delete_cut_entries()
    jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_SECONDS)
    jax.config.update("jax_compilation_cache_dir", str(folder()))
    warnings.showwarning = functools.partial(_show_warning, warnings.showwarning)


def _delete_cut_entries() -> None:
    """Delete programs that a full disk cut off. They have no time of use, for want of which JAX
    would keep no program any more."""
    names = set(os.listdir(folder()))
    for name in names:
        if name.endswith("-cache") and f"{name.removesuffix('-cache')}-atime" not in names:
            (folder() / name).unlink(missing_ok=True)


def _is_of_this_user(directory: Path) -> bool:
    """Return True if nobody else but root could have put a program there."""
    if not hasattr(os, "getuid"):
        return True
    facts = directory.stat()
    return facts.st_uid in (os.getuid(), 0) and not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _show_warning(show: Callable[..., None], message: Warning | str, *details: Any) -> None:
    """Show a warning. If it says that JAX cannot read a program, say so in one line, and delete
    that program, so that the one that is compiled in its place is kept: JAX never overwrites
    one."""
    if not str(message).startswith("Error reading persistent compilation cache entry"):
        show(message, *details)
        return
    times = (
        (int.from_bytes(file.read_bytes(), "little"), file) for file in folder().glob("*-atime")
    )
    _, newest = max(times, default=(0, None))  # the one that JAX has just read
    if newest is not None:
        name = newest.name.removesuffix("-atime")
        newest.with_name(f"{name}-cache").unlink(missing_ok=True)
    warn("a compiled program that was kept is damaged, and is compiled anew")


def described() -> str:
    """Return in words how many programs are kept, and in which folder."""
    chosen = _setting("jax_compilation_cache_dir")
    if chosen is None or not _setting("jax_enable_compilation_cache"):
        return "none: every run compiles anew"
    files = [file.stat().st_size for file in Path(chosen).glob("*-cache")]
    bound = _setting("jax_compilation_cache_max_size")
    maximum = "" if bound < 0 else f" of at most {bound >> 20} MiB"
    return f"{len(files)} compiled programs, {sum(files) / (1 << 20):.1f} MiB{maximum}, in {chosen}"


def _setting(name: str) -> Any:
    return getattr(jax.config, name)


def _processor() -> str:
    """Return a name that is equal for processors with the same instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    instructions = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    facts = (
        platform.system(),
        platform.machine(),
        platform.processor(),
        instructions,
        os.environ.get("XLA_FLAGS", ""),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

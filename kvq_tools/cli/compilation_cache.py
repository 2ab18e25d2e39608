"""Keep compiled programs between runs of the command, with JAX's persistent compilation cache, in
the user's cache folder.

A cache that the user chose (JAX_COMPILATION_CACHE_DIR, or jax.config in a program that calls
`main`) stays as it is.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import jax

from kvq_jax.files.user_cache import cache_folder

MOST_BYTES = 1 << 30  # on disk; what was not used for longest goes first
SHORTEST = 0.2  # seconds of compilation that a program must take to be kept


def folder() -> Path:
    """Return the folder of this machine's programs: they hold its processor's instructions, and a
    home may be shared by several."""
    return cache_folder() / "compiled" / _processor()


def begin() -> None:
    """Read and keep compiled programs from here on. Without effect where a cache was chosen already
    or the folder cannot be made."""
    if _setting("jax_compilation_cache_dir") is not None or not _setting(
        "jax_enable_compilation_cache"
    ):
        return
    try:
        folder().mkdir(parents=True, exist_ok=True)
    except OSError:  # a home that cannot be written to: every run compiles anew
        return
    jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", SHORTEST)
    jax.config.update("jax_compilation_cache_dir", str(folder()))


def described() -> str:
    """Say where programs are kept, and how much; or that they are not."""
    chosen = _setting("jax_compilation_cache_dir")
    if chosen is None or not _setting("jax_enable_compilation_cache"):
        return "none: every run compiles anew"
    files = (
        [file.stat().st_size for file in Path(chosen).glob("*-cache")]
        if Path(chosen).is_dir()
        else []
    )
    bound = _setting("jax_compilation_cache_max_size")
    most = "" if bound < 0 else f" of at most {bound >> 20} MiB"
    return f"{len(files)} compiled programs, {sum(files) / (1 << 20):.1f} MiB{most}, in {chosen}"


def _setting(name: str) -> Any:
    return getattr(jax.config, name)


def _processor() -> str:
    """Return a name for the processor's kind: equal where its instructions are."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    told = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    facts = (
        platform.system(),
        platform.machine(),
        platform.processor(),
        told,
        os.environ.get("XLA_FLAGS", ""),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

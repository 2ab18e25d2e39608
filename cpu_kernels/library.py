"""The compiled library of kernels. If it is not beside this file, XLA does the work.

It is compiled when kvq is installed (setup.py) and never later. Nothing here runs a compiler or
downloads anything.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import pathlib

import jax

from cpu_kernels import sources

DECODE_ATTENTION = "kvq_decode_attention"
EXACT_ATTENTION = "kvq_exact_attention"
PACKED_PRODUCT = "kvq_packed_product"
STORE_BLOCKS = "kvq_store_blocks"
TABLED_PRODUCT = "kvq_tabled_product"
TARGETS = DECODE_ATTENTION, EXACT_ATTENTION, PACKED_PRODUCT, STORE_BLOCKS, TABLED_PRODUCT
_FOLDER = pathlib.Path(__file__).parent
_REMEDY = "install kvq again (in a checkout: python setup.py build_ext --inplace)"


@functools.cache
def unavailable() -> str | None:
    """Return, in one line, why this process cannot call the kernels. Return None if it can; XLA
    then knows them.
    """
    library = _load()
    if isinstance(library, str):
        return library
    try:
        for target in TARGETS:
            jax.ffi.register_ffi_target(
                target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu"
            )
    except Exception as error:
        # XLA refuses a library that was compiled with the headers of a later version.
        return (
            f"JAX {jax.__version__} does not take the CPU kernels: {str(error).splitlines()[0]};"
            f" {_REMEDY}"
        )
    return None


def instruction_set() -> str | None:
    """Return the instructions that the kernels use on this processor ("avx512", "avx2", "neon" or
    "baseline"), or None without kernels. "avx512" is with and without VNNI, which products with
    packed weights use where a processor has it.
    """
    library = _load()
    return None if isinstance(library, str) else library.kvq_kernel_name().decode()


def prompts_attended() -> int:
    """Return how many layers of prompts the kernels of this process have attended to, 0 without
    kernels. A prompt is read in one call, and this number shows its progress.
    """
    library = _load()
    return 0 if isinstance(library, str) else library.kvq_prompts_attended()


@functools.cache
def _load() -> ctypes.CDLL | str:
    """Return the library, or one line that says why there is none."""
    files = [_FOLDER / f"native{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return (
            "the CPU kernels were not compiled when kvq was installed; make sure that there is a"
            f" C++ compiler, then {_REMEDY}"
        )
    try:
        library = ctypes.CDLL(str(file))
        for name in ("kvq_kernel_name", "kvq_sources"):
            getattr(library, name).restype = ctypes.c_char_p
        library.kvq_prompts_attended.restype = ctypes.c_uint64
        compiled = library.kvq_sources().decode()
    except (OSError, AttributeError) as error:
        return f"{file.name} cannot be loaded: {error}; {_REMEDY}"
    if sources.sources() and sources.digest() != compiled:  # an installation has no sources
        return f"{file.name} was compiled from other sources; {_REMEDY}"
    return library

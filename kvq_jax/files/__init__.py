"""Keep caches in files. The modules of this package write files and directories whole or not at
all, and check their contents."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvq_jax.cache.serialization import fingerprint, load_beside, saved_layout
    from kvq_jax.cache.serialization import load_cache as load
    from kvq_jax.cache.serialization import save_cache as save
    from kvq_jax.cache.verification import Damage, Seal, seal, verify

_MODULES = {
    "Damage": ("verification", "Damage"),
    "Seal": ("verification", "Seal"),
    "fingerprint": ("serialization", "fingerprint"),
    "load": ("serialization", "load_cache"),
    "load_beside": ("serialization", "load_beside"),
    "save": ("serialization", "save_cache"),
    "saved_layout": ("serialization", "saved_layout"),
    "seal": ("verification", "seal"),
    "verify": ("verification", "verify"),
}

__all__ = [
    "Damage",
    "Seal",
    "fingerprint",
    "load",
    "load_beside",
    "save",
    "saved_layout",
    "seal",
    "verify",
]


def __getattr__(name: str) -> Any:
    # imported when first used: the cache imports this package for its files
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _MODULES[name]
    return getattr(importlib.import_module(f"kvq_jax.cache.{module}"), attribute)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))

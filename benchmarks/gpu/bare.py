"""Run a benchmark with nothing but JAX: `python -m benchmarks.gpu.bare MODULE [ARGUMENT ...]`.

The cache, the kernels and the model import four more packages. Each missing one is replaced by the
parts that the benchmarks need:

    jaxtyping    annotations that check nothing
    flax         `nnx.Module` and its relatives, as plain pytrees
    filelock     a lock by flock
    safetensors  names alone: no benchmark reads or writes a checkpoint

KVQ_BARE=1 also replaces packages that are installed, to show on any machine that the replacements
suffice.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import runpy
import sys
import types
from typing import Any

import jax


def install() -> list[str]:
    """Install replacements of missing packages as modules, and return their names."""
    replaced = []
    for name, make in {
        "jaxtyping": lambda: [_Jaxtyping("jaxtyping")],
        "flax": _flax,
        "filelock": _filelock,
        "safetensors": _safetensors,
    }.items():
        if os.environ.get("KVQ_BARE") == "1" or importlib.util.find_spec(name) is None:
            sys.modules.update({module.__name__: module for module in make()})
            replaced.append(name)
    return replaced


class _Shaped:
    """An annotation such as Float[Array, "B T"], which is the array's type."""

    def __class_getitem__(cls, item: Any) -> Any:
        return item[0] if isinstance(item, tuple) else item


class _Jaxtyping(types.ModuleType):
    Array = jax.Array

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Shaped


@jax.tree_util.register_pytree_node_class
class Param:
    """An array that `param[...]` returns."""

    def __init__(self, value: Any):
        self.value = value

    def __getitem__(self, index: Any) -> Any:
        return self.value if index is Ellipsis else self.value[index]

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> Param:
        param = object.__new__(cls)
        param.value = children[0]
        return param


class List(list):
    """A list of modules."""


jax.tree_util.register_pytree_node(
    List, lambda items: (tuple(items), None), lambda _, items: List(items)
)


class _Data:
    def __init__(self, tree: Any):
        self.tree = tree


class Module:
    """A pytree of the attributes that are modules, parameters or lists of them, or were set as
    `data(...)`. All others are static."""

    _dynamic: set[str]

    def __init_subclass__(cls) -> None:
        jax.tree_util.register_pytree_node(cls, Module._flatten, cls._unflatten)

    def __setattr__(self, name: str, value: Any) -> None:
        dynamic = self.__dict__.setdefault("_dynamic", set())
        if isinstance(value, (Module, Param, List, _Data)) or name in dynamic:
            dynamic.add(name)
        self.__dict__[name] = value.tree if isinstance(value, _Data) else value

    def _flatten(self) -> tuple[tuple[Any, ...], Any]:
        names = tuple(sorted(self._dynamic))
        static = {
            name: value
            for name, value in self.__dict__.items()
            if name not in self._dynamic and name != "_dynamic"
        }
        return tuple(self.__dict__[name] for name in names), (names, tuple(sorted(static.items())))

    @classmethod
    def _unflatten(cls, static: Any, children: Any) -> Module:
        names, others = static
        module = object.__new__(cls)
        module.__dict__.update(
            _dynamic=set(names), **dict(zip(names, children, strict=True)), **dict(others)
        )
        return module


class Rngs:
    """A stream of keys: `rngs.params()` is another one each time."""

    def __init__(self, seed: int):
        self._key, self._drawn = jax.random.key(seed), itertools.count()

    def params(self) -> jax.Array:
        return jax.random.fold_in(self._key, next(self._drawn))


def _flax() -> list[types.ModuleType]:
    nnx, flax = types.ModuleType("flax.nnx"), types.ModuleType("flax")
    nnx.__dict__.update(
        Module=Module, Param=Param, List=List, Rngs=Rngs, data=_Data, eval_shape=jax.eval_shape
    )
    flax.__dict__.update(nnx=nnx)
    return [flax, nnx]


class Timeout(TimeoutError):
    pass


class FileLock:
    def __init__(self, path: str | os.PathLike[str], timeout: float = -1):
        self._path, self._waits, self._held = path, timeout != 0, None

    def acquire(self) -> FileLock:
        import fcntl

        self._held = os.open(self._path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | (0 if self._waits else fcntl.LOCK_NB))
        except OSError:
            self.release()
            raise Timeout(str(self._path)) from None
        return self

    def release(self) -> None:
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def __enter__(self) -> FileLock:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def _filelock() -> list[types.ModuleType]:
    module = types.ModuleType("filelock")
    module.__dict__.update(FileLock=FileLock, Timeout=Timeout)
    return [module]


def _refuse(*_: Any, **__: Any) -> Any:
    raise ModuleNotFoundError("safetensors is not installed: pip install safetensors")


def _safetensors() -> list[types.ModuleType]:
    module, numpy = types.ModuleType("safetensors"), types.ModuleType("safetensors.numpy")
    module.__dict__.update(
        SafetensorError=type("SafetensorError", (Exception,), {}), safe_open=_refuse, numpy=numpy
    )
    numpy.__dict__.update(save_file=_refuse, load_file=_refuse)
    return [module, numpy]


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit((__doc__ or "").partition("\n")[0])
    if replaced := install():
        print(f"replaced by stand-ins: {', '.join(replaced)}", file=sys.stderr, flush=True)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

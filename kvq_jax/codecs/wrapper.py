"""A codec around another one. The inner codec answers for everything that the wrapper leaves
undefined."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from kvq_jax.codecs.codec import Codec

Class = TypeVar("Class", bound=type)
MEMBERS = tuple(name for name in vars(Codec) if not name.startswith("_"))


def forwarding(cls: Class) -> Class:
    """Define every public member of `Codec` on a class as its `inner` codec's."""
    for name in MEMBERS:
        if isinstance(vars(Codec)[name], property):
            setattr(cls, name, property(_attribute(name)))
        else:
            setattr(cls, name, _call(name))
    return abc.update_abstractmethods(cls)


def _attribute(name: str) -> Callable[[Any], Any]:
    return lambda self: getattr(self.inner, name)


def _call(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(Codec, name), updated=())  # without __isabstractmethod__
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    return call


_Base = cast(Any, Codec)  # a type checker cannot see the members that `forwarding` defines


@forwarding
@dataclasses.dataclass(frozen=True)
class Wrapper(_Base):
    """The codec `inner`, unchanged. A wrapper derives from this, defines what it changes, and says
    so in the values that it replaces (`dataclasses.replace(self.inner.facts, ...)`)."""

    inner: Codec

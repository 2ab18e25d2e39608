"""A tokenizer that imports transformers only for what the tokenizers library cannot do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

_PLAIN_CALL = {"add_special_tokens", "verbose"}
_PLAIN_DECODE = {"skip_special_tokens", "clean_up_tokenization_spaces"}


class LazyTokenizer:
    """A transformers tokenizer that is built when it is first needed.

    Until then the tokenizers library turns a text into token ids and token ids into text, and gives
    what transformers would. Everything else, such as a chat template, needs the transformers
    tokenizer, which does all the work from then on. Its import takes half a second of a processor.
    core: the tokenizers.Tokenizer. build: returns the transformers tokenizer of a copy of it.
    """

    def __init__(self, core: Any, build: Callable[[], Any]) -> None:
        self.__dict__.update(_core=core, _build=build)

    @functools.cached_property
    def _whole(self) -> Any:
        return self._build()

    @property
    def __class__(self) -> type:  # for isinstance
        return type(self._whole)

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError("the class of a tokenizer is fixed")

    def _is_built(self) -> bool:
        return "_whole" in self.__dict__

    def __call__(self, text: Any, *arguments: Any, **options: Any) -> Any:
        plain = isinstance(text, str) and not arguments and options.keys() <= _PLAIN_CALL
        if self._is_built() or not plain:
            return self._whole(text, *arguments, **options)
        special = options.get("add_special_tokens", True)
        return Tokens(self._core.encode(text, add_special_tokens=special).ids)

    def decode(self, token_ids: Any, *arguments: Any, **options: Any) -> Any:
        plain = _is_ids(token_ids) and not arguments and options.keys() <= _PLAIN_DECODE
        if self._is_built() or not plain or options.get("clean_up_tokenization_spaces"):
            return self._whole.decode(token_ids, *arguments, **options)
        skip = options.get("skip_special_tokens", False)
        return self._core.decode(list(token_ids), skip_special_tokens=skip)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._whole, name, value)

    def __len__(self) -> int:
        return len(self._whole)

    def __repr__(self) -> str:
        return repr(self._whole)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        """Copy and pickle as the transformers tokenizer."""
        return _itself, (self._whole,)


class Tokens(dict[str, list[int]]):
    """The ids of a text, under the names that transformers gives them."""

    def __init__(self, ids: list[int]) -> None:
        super().__init__(input_ids=ids, attention_mask=[1] * len(ids))

    @property
    def input_ids(self) -> list[int]:
        return self["input_ids"]


def _is_ids(token_ids: Any) -> bool:
    return isinstance(token_ids, Sequence) and all(isinstance(one, int) for one in token_ids)


def _itself(tokenizer: Any) -> Any:
    return tokenizer

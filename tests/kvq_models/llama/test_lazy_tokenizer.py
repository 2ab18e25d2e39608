"""The tokenizer of a GGUF file without transformers, which gives what transformers would."""

import copy
from typing import Any

import pytest

from kvq_models.llama.gguf_tokenizer import core_of, tokenizer_of
from kvq_models.llama.lazy_tokenizer import LazyTokenizer
from tests.kvq_models.gguf_files import byte_level

TEXT = " the 12 THE <|end|> AB<|end|>"


def tokenizer(**changed: Any) -> Any:
    fields = byte_level(chat_template="{{ messages[0]['content'] }}", **changed)
    template = {"tokenizer.chat_template": fields.pop("chat_template")}
    fields = {f"tokenizer.ggml.{name}": value for name, value in fields.items()} | template
    return tokenizer_of(fields, core_of(fields))


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_ids_and_texts_are_those_of_transformers(special: bool, first: bool):
    lazy, other = tokenizer(add_bos_token=first), tokenizer(add_bos_token=first)
    whole = copy.copy(other)
    ids = lazy(TEXT, add_special_tokens=special, verbose=False)
    assert dict(ids) == {
        name: list(value)
        for name, value in whole(TEXT, add_special_tokens=special, verbose=False).items()
        if name != "token_type_ids"
    }
    for skip in (True, False):
        options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
        assert lazy.decode(ids.input_ids, **options) == whole.decode(ids.input_ids, **options)
    assert lazy.decode(ids["input_ids"]) == whole.decode(ids["input_ids"])
    assert not lazy._is_built(), "transformers was imported for it"
    assert type(whole) is not LazyTokenizer  # the control is the other class


def test_everything_else_is_that_of_transformers():
    from transformers import PreTrainedTokenizerFast

    lazy = tokenizer()
    assert isinstance(lazy, PreTrainedTokenizerFast)
    assert lazy.eos_token == "<|end|>"
    assert len(lazy) == lazy.vocab_size
    message = [{"role": "user", "content": "HI"}]
    assert lazy.apply_chat_template(message, tokenize=False) == "HI"
    lazy.chat_template = "changed"
    assert lazy.apply_chat_template(message, tokenize=False) == "changed"
    assert lazy([TEXT, "AB"]).input_ids[0] == lazy(TEXT).input_ids


def test_a_named_token_that_the_file_calls_ordinary_is_left_to_transformers():
    kinds = [1] * len(byte_level()["tokens"])
    whole = tokenizer(token_type=kinds)
    assert type(whole) is not LazyTokenizer
    assert whole("AB<|end|>").input_ids[-1] == 0, "transformers makes it special"

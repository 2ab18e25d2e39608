"""Hugging Face directories as they are published: tokenizers that a library would rebuild, end
tokens in several places, sampling defaults, heads and prefixes that are missing, quantization."""

import dataclasses
import importlib.util
import json
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from kvq_models.inference.sampling import Sampling
from kvq_models.llama import hf_names
from kvq_models.llama.checkpoint import load_llama, open_checkpoint, read_config, save_llama
from kvq_models.llama.generation_defaults import GenerationDefaults, of_hf
from kvq_models.llama.hf_tokenizer import MIXED_TEXT, load_tokenizer
from kvq_models.llama.tensor_names import HEAD_NAME
from tests.kvq_models.checkpoints import SIZES, random_llama, tiny_config
from tests.kvq_models.llama.saved_checkpoint import change_config, change_tensors, refusal

# Splits numbers into groups of three, which neither Llama 2's nor Qwen2's tokenizer does.
SPLIT = r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"


def byte_level(*special: str) -> Tokenizer:
    """Return a byte-level tokenizer of 256 bytes, a few words, and special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["Ġi", "Ġin", "12", "123", "ra", "ran"]
    merges = [("Ġ", "i"), ("Ġi", "n"), ("1", "2"), ("12", "3"), ("r", "a"), ("ra", "n")]
    vocab = {token: number for number, token in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    return tokenizer


def save_tokenizer(directory: pathlib.Path, tokenizer: Tokenizer, **settings: Any) -> None:
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer_class": "LlamaTokenizerFast"},
        {"tokenizer_class": "Qwen2Tokenizer"},
        {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": True},
        {},
    ],
)
def test_ids_and_text_are_those_of_the_files_own_tokenizer(settings: dict, tmp_path: pathlib.Path):
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"model_type": "qwen2"}))
    file = byte_level("<|end|>")
    save_tokenizer(tmp_path, file, eos_token="<|end|>", **settings)
    ids = file.encode(MIXED_TEXT).ids
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer(MIXED_TEXT).input_ids == ids
    assert tokenizer.decode(ids) == MIXED_TEXT
    assert tokenizer.eos_token_id == file.token_to_id("<|end|>")
    words = " they 'll say : it is n't so ."
    assert tokenizer.decode(tokenizer(words).input_ids, skip_special_tokens=True) == words
    assert tokenizer(" 1234").input_ids != byte_level().encode(" 12 34").ids


def test_a_tokenizer_that_contradicts_its_file_is_refused(tmp_path: pathlib.Path):
    added = {"262": {"content": "café", "special": False, "normalized": False}}
    added["262"] |= {"lstrip": False, "rstrip": False, "single_word": False}
    save_tokenizer(tmp_path, byte_level(), added_tokens_decoder=added)
    with pytest.raises(
        ValueError, match=r"encodes text .* in another way than its tokenizer\.json"
    ):
        load_tokenizer(tmp_path)


def test_a_token_that_only_the_settings_call_special_is_no_contradiction(tmp_path: pathlib.Path):
    file = byte_level()
    file.add_tokens([AddedToken("<|im_start|>", special=False)])
    save_tokenizer(tmp_path, file, additional_special_tokens=["<|im_start|>"])
    assert load_tokenizer(tmp_path)(MIXED_TEXT).input_ids == file.encode(MIXED_TEXT).ids


@pytest.mark.parametrize(
    ("settings", "in_file", "begins"),
    [
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}, False, True),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}, True, False),
        ({"tokenizer_class": "LlamaTokenizerFast"}, True, True),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True}, False, False),
        ({"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False}, True, True),
    ],
)
def test_a_text_begins_with_the_first_token_as_the_class_of_the_settings_has_it(
    settings: dict, in_file: bool, begins: bool, tmp_path: pathlib.Path
):
    """DeepSeek's distilled models say add_bos_token, and their tokenizer.json adds no token."""
    file = byte_level("<bos>")
    first = file.token_to_id("<bos>")
    if in_file:
        file.post_processor = processors.TemplateProcessing("<bos> $A", None, [("<bos>", first)])
    save_tokenizer(tmp_path, file, bos_token="<bos>", **settings)
    tokenizer = load_tokenizer(tmp_path)
    text = file.encode("in 123", add_special_tokens=False).ids
    assert tokenizer("in 123").input_ids == [first] * begins + text
    assert tokenizer("in 123", add_special_tokens=False).input_ids == text


def test_no_text_is_cut_or_padded_because_a_file_was_saved_so(tmp_path: pathlib.Path):
    file = byte_level("<pad>")
    file.enable_truncation(4)
    file.enable_padding(length=8, pad_token="<pad>")
    save_tokenizer(tmp_path, file, pad_token="<pad>")
    tokenizer = load_tokenizer(tmp_path)
    assert len(tokenizer("a b c d e").input_ids) == 9
    assert len(tokenizer("a").input_ids) == 1
    assert len(tokenizer("a b c d e").input_ids) == 9


def test_the_default_of_several_chat_templates_is_used(tmp_path: pathlib.Path):
    templates = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "{{ messages[0]['content'] }}!"},
    ]
    save_tokenizer(tmp_path, byte_level(), chat_template=templates)
    chat = [{"role": "user", "content": "hi"}]
    assert load_tokenizer(tmp_path).apply_chat_template(chat, tokenize=False) == "hi!"


def test_the_chat_template_of_an_image_processor_is_read_if_the_tokenizer_has_none(
    tmp_path: pathlib.Path,
):
    template = {"chat_template": "{{ messages[0]['content'] }}?"}
    (tmp_path / "chat_template.json").write_text(json.dumps(template))
    chat = [{"role": "user", "content": "hi"}]
    save_tokenizer(tmp_path, byte_level())
    assert load_tokenizer(tmp_path).apply_chat_template(chat, tokenize=False) == "hi?"
    save_tokenizer(tmp_path, byte_level(), chat_template="{{ messages[0]['content'] }}!")
    assert load_tokenizer(tmp_path).apply_chat_template(chat, tokenize=False) == "hi!"


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_a_tokenizer_is_loaded_without_torch(tmp_path: pathlib.Path):
    save_tokenizer(tmp_path, byte_level("<|end|>"), eos_token="<|end|>")
    code = (
        "import pathlib, sys; from kvq_models.llama.hf_tokenizer import load_tokenizer;"
        f"tokenizer = load_tokenizer(pathlib.Path({str(tmp_path)!r}));"
        "tokenizer('text', return_tensors='np'); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_generation_ends_at_the_end_tokens_of_all_files(saved: pathlib.Path):
    """config.json, generation_config.json and the tokenizer each name another one, and the
    vocabulary has an end of turn that none of them names."""
    tokenizer = byte_level("<|eot_id|>", "<|start|>", "<|stop|>")
    ids = {text: tokenizer.token_to_id(text) for text in ("<|eot_id|>", "<|stop|>")}
    change_config(saved, vocab_size=tokenizer.get_vocab_size())
    save_tokenizer(saved, tokenizer, eos_token="<|stop|>")
    (saved / "generation_config.json").write_text(json.dumps({"eos_token_id": [11, 12]}))
    wanted = (11, 12, SIZES["eos_token_id"], ids["<|stop|>"], ids["<|eot_id|>"])
    assert read_config(saved).eos_token_ids == wanted
    added = {"7": {"content": "<|stop|>"}, "8": {"content": "other"}}
    settings = {"eos_token": {"content": "<|stop|>"}, "added_tokens_decoder": added}
    (saved / "tokenizer_config.json").write_text(json.dumps(settings))
    assert read_config(saved).eos_token_ids == (11, 12, SIZES["eos_token_id"], 7)


@pytest.mark.parametrize("beyond", [-1, SIZES["vocab_size"], 2**40])
def test_ids_that_no_model_generates_end_nothing(beyond: int, saved: pathlib.Path):
    """JAX holds smaller integers than JSON does, and Python refuses to read the longest ones."""
    ends = {"2": "<|im_end|>", str(beyond): "<|eot_id|>", "9" * 5000: "</s>"}
    settings = {"added_tokens_decoder": {key: {"content": text} for key, text in ends.items()}}
    (saved / "tokenizer_config.json").write_text(json.dumps(settings))
    (saved / "generation_config.json").write_text(json.dumps({"eos_token_id": [beyond]}))
    change_config(saved, eos_token_id=[beyond, 3])
    assert read_config(saved).eos_token_ids == (3, 2)
    assert tiny_config(eos_token_id=[beyond, 3]).eos_token_ids == (3,)


@pytest.mark.parametrize("place", ["tokenizer_config.json", "tokenizer.json"])
def test_html_that_looks_like_an_end_ends_nothing(place: str, saved: pathlib.Path):
    """Gemma's vocabulary has the ordinary token </s>, which closes struck-out text."""
    tokenizer = byte_level("<eos>")
    tokenizer.add_tokens([AddedToken("</s>", special=False)])
    ends = {text: tokenizer.token_to_id(text) for text in ("<eos>", "</s>")}
    change_config(saved, vocab_size=tokenizer.get_vocab_size())
    decoder = {str(i): {"content": t, "special": t == "<eos>"} for t, i in ends.items()}
    settings = {"added_tokens_decoder": decoder} if place == "tokenizer_config.json" else {}
    save_tokenizer(saved, tokenizer, eos_token="<eos>", **settings)
    assert read_config(saved).eos_token_ids == (SIZES["eos_token_id"], ends["<eos>"])
    save_tokenizer(saved, tokenizer, eos_token="</s>", **settings)
    assert read_config(saved).eos_token_ids == (SIZES["eos_token_id"], ends["</s>"])
    if place == "tokenizer_config.json":
        decoder[str(ends["</s>"])]["special"] = True
        save_tokenizer(saved, tokenizer, eos_token="<eos>", added_tokens_decoder=decoder)
        assert read_config(saved).eos_token_ids[1:] == tuple(ends.values())


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, (0.6, 50, 0.9, 0.0)),
        ({"do_sample": True, "temperature": 0.7, "top_k": 20, "min_p": 0.1}, (0.7, 20, 1.0, 0.1)),
        ({"do_sample": True, "top_k": 0}, (1.0, 0, 1.0, 0.0)),
        ({"do_sample": False, "temperature": 0.6}, (0.0, 0, 1.0, 0.0)),
        ({"temperature": 0.6}, (0.0, 0, 1.0, 0.0)),
        ({}, (0.0, 0, 1.0, 0.0)),
    ],
)
def test_sampling_defaults_are_transformers(fields: dict, wanted: tuple, saved: pathlib.Path):
    (saved / "generation_config.json").write_text(json.dumps(fields))
    generation = read_config(saved).generation
    found = (generation.temperature, generation.top_k, generation.top_p, generation.min_p)
    assert (found, generation.unapplied) == (wanted, ())


def test_sampling_settings_that_cannot_be_used_are_named():
    fields = {"do_sample": True, "temperature": "hot", "top_p": 1.5, "top_k": -1}
    fields |= {"repetition_penalty": 1.05, "num_beams": 1, "no_repeat_ngram_size": 3}
    wrong = ("temperature='hot'", "top_k=-1", "top_p=1.5")
    unapplied = ("repetition_penalty=1.05", "no_repeat_ngram_size=3", *wrong)
    assert of_hf(fields) == GenerationDefaults(temperature=1.0, top_k=50, unapplied=unapplied)


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_k", 10**399), ("top_k", 2**40), ("temperature", 1e39), ("min_p", True), ("top_p", "1")],
    ids=["digits", "top_k", "temperature", "bool", "text"],
)
def test_no_default_is_one_that_a_request_could_not_give(name: str, value: Any):
    generation = of_hf({"do_sample": True, name: value})
    assert [setting.partition("=")[0] for setting in generation.unapplied] == [name]
    asked = {part.name: getattr(generation, part.name) for part in dataclasses.fields(Sampling)}
    Sampling(**asked).check()


def same_weights(directory: pathlib.Path, wanted: Any) -> bool:
    llama, _ = load_llama(directory, dtype="float32")
    found, names = hf_names.weights(llama), hf_names.weights(wanted)
    return llama.config == wanted.config and all(
        np.array_equal(found[path].leaf, weight.leaf) for path, weight in names.items()
    )


def test_a_head_that_no_file_and_no_flag_mentions_is_the_embedding(tmp_path: pathlib.Path):
    llama = random_llama(tiny_config(tie_word_embeddings=True))
    save_llama(llama, tmp_path)
    change_config(tmp_path, tie_word_embeddings=None)
    assert same_weights(tmp_path, llama)
    change_config(tmp_path, tie_word_embeddings=False)
    assert "'lm_head.weight'" in refusal(tmp_path)
    assert "set tie_word_embeddings to true" in refusal(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod.model.", "module.model.", "module._orig_mod."])
def test_names_without_or_with_other_prefixes_are_read(
    prefix: str, tied: bool, tmp_path: pathlib.Path
):
    llama = random_llama(tiny_config(tie_word_embeddings=tied))
    save_llama(llama, tmp_path)
    wrapper = prefix.removesuffix("model.")

    def rename(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            head = name == HEAD_NAME
            bare = f"{wrapper}{name}" if head else f"{prefix}{name.removeprefix('model.')}"
            tensors[bare] = tensors.pop(name)

    change_tensors(tmp_path, rename)
    if prefix == "":
        change_config(tmp_path, architectures=["LlamaModel"])
    assert same_weights(tmp_path, llama)
    names = {weight.name for weight in hf_names.weights(llama).values()}
    assert set(open_checkpoint(tmp_path).tensors) >= names

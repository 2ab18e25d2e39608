"""Text of gpt-oss and Phi-4-mini, whose GGUF files name `gpt-4o`, and of Mistral Nemo and Small 3,
which name `tekken`, is split before merging as their own tokenizers split it."""

import pytest

from kvq_models.llama.gguf_tokenizer import PRE_TOKENIZERS, core_of
from tests.kvq_models.gguf_files import TOKENS, byte_level

# by hand, from the description of the split: tiktoken's o200k_base
SPLITS = {
    "HelloWorld JSONData": ["Hello", "World", " JSONData"],
    "they'll THEY'LL It'S": ["they'll", " THEY'LL", " It'S"],
    "don'tStop 'quoted'": ["don't", "Stop", " '", "quoted", "'"],
    "12345 1a 3.14": ["123", "45", " ", "1", "a", " ", "3", ".", "14"],
    "a//b\n/c": ["a", "//", "b", "\n", "/c"],
    "end.\n\n/ path": ["end", ".\n\n/", " path"],
    "  two   three \n\n x\t": [" ", " two", "  ", " three", " \n\n", " x", "\t"],
    "\u00dcber\u00c4ra \u0416\u0443\u043a": ["\u00dcber", "\u00c4ra", " \u0416\u0443\u043a"],
    # letters without case, and marks, stand for capitals and for other letters
    "\u6f22\u5b57Kanji\u304b\u306aZ": ["\u6f22\u5b57Kanji\u304b\u306a", "Z"],
    "e\u0301tE\u0301T": ["e\u0301t", "E\u0301", "T"],
    "\u01c5ep \u02b0i": ["\u01c5ep", " \u02b0i"],
    "$x_y #Tag!?\r\n": ["$x", "_y", " #", "Tag", "!?\r\n"],
    "\U0001f600\U0001f600 ok": ["\U0001f600\U0001f600", " ok"],
    "": [],
}

# where Mistral's tekken differs: contractions are words, and each digit is one
OF_TEKKEN = SPLITS | {
    "they'll THEY'LL It'S": ["they", "'ll", " THEY", "'LL", " It", "'S"],
    "don'tStop 'quoted'": ["don", "'t", "Stop", " '", "quoted", "'"],
    "12345 1a 3.14": [*"12345", " ", "1", "a", " ", "3", ".", "1", "4"],
}


def split(name: str, text: str) -> list[str]:
    core = core_of({f"tokenizer.ggml.{key}": v for key, v in byte_level(pre=name).items()})
    return [text[a:b] for _, (a, b) in core.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("text", SPLITS)
def test_words_of_gpt_4o_end_before_capitals_and_keep_their_contractions(text: str):
    assert split("gpt-4o", text) == SPLITS[text]


@pytest.mark.parametrize("text", OF_TEKKEN)
def test_words_of_tekken_end_before_capitals_and_before_their_contractions(text: str):
    assert split("tekken", text) == OF_TEKKEN[text]


def test_tekken_keeps_whole_words_and_begins_with_the_first_token():
    fields = byte_level(pre="tekken", tokens=[*TOKENS, "capital"], token_type=None)
    core = core_of({f"tokenizer.ggml.{key}": value for key, value in fields.items()})
    assert core.encode("capital").ids == [fields["bos_token_id"], len(TOKENS)]


@pytest.mark.parametrize("name", ["gpt-4o", "tekken"])
def test_the_split_is_that_of_another_engine_of_expressions(name: str):
    """The regex package reads the same pattern."""
    regex = pytest.importorskip("regex", reason="another engine needs the package regex")
    pattern = PRE_TOKENIZERS[name]
    assert pattern is not None
    for text in SPLITS:
        assert [found.group() for found in regex.finditer(pattern, text)] == split(name, text)
    together = " ".join(SPLITS)
    assert "".join(split(name, together)) == together, "no character is left out"


@pytest.mark.parametrize("other", ["gpt-2", "llama-bpe", "qwen2"])
def test_another_split_gives_other_words(other: str):
    assert any(split(other, text) != words for text, words in SPLITS.items())

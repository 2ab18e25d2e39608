"""The tokenizer of a GGUF file, as a tokenizer of the tokenizers library behind transformers'
interface, with its chat template.

There are two kinds. Byte-level BPE (`gpt2`) splits text before merging. A file names the split but
does not contain it. SentencePiece's BPE (`llama`) derives its merges from the scores of its pieces:
the pair that makes the likeliest piece is merged first.
"""

from __future__ import annotations

import itertools
import os
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from kvq_models.llama.gguf_fields import text, unnamed_token
from kvq_models.llama.gguf_metadata import CONTROL, USER_DEFINED
from kvq_models.llama.lazy_tokenizer import LazyTokenizer

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_LETTERS = rf"{_BEFORE}\p{{L}}+"
# words of GPT-4o and Mistral, which end before a capital: letters that may be capitals, then ones
# that are not
_MARKS = r"\p{Lm}\p{Lo}\p{M}"  # letters without case, and marks, are both
_UPPER, _LOWER = rf"[\p{{Lu}}\p{{Lt}}{_MARKS}]", rf"[\p{{Ll}}{_MARKS}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_PATHS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"

# Patterns that split text before merging, by their names in the field tokenizer.ggml.pre. None is
# GPT-2's own. "digits" is GPT-2's with each digit apart. Other names are refused, because a wrong
# split gives valid but wrong tokens.
PRE_TOKENIZERS = {
    "gpt-2": None,
    "smollm": "digits",
    "llama-bpe": rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}",
    "gpt-4o": rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_PATHS}",
    "tekken": rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_PATHS}",
}
PRE_TOKENIZERS["dbrx"] = PRE_TOKENIZERS["llama-bpe"]  # OLMo 2's; merges whole words, too
# Other names under which llama.cpp splits text in the same way.
ALIASES = {
    "gpt-2": ("phi-2", "exaone4", "gigachat", "a.x-4.0", "mellum"),
    "llama-bpe": ("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    "qwen2": ("deepseek-r1-qwen", "megrez", "kormo", "f2llmv2"),
    "smollm": ("refact",),  # Granite's
    "gpt-4o": ("llama4", "kanana2", "talkie"),
    "dbrx": ("smaug-bpe",),  # SmolLM3's
}
_SPLITS = {name: name for name in PRE_TOKENIZERS}
_SPLITS |= {alias: name for name, aliases in ALIASES.items() for alias in aliases}
MAX_PIECE_LENGTH = 1024  # characters, at each of which SentencePiece's pieces are split
# keep a whole word of the vocabulary, before any merge, and begin with the first token
WHOLE_WORDS = ("llama-bpe", "tekken")
COMPOSED = ("qwen2",)  # text in Unicode's form NFC, in files of this name itself

# Special tokens of Phi-3 that keep the spaces behind them. The others do not, as its tokenizer.json
# says. GGUF has no field for it, and llama.cpp goes by the model's name.
KEEP_SPACES = ("<unk>", "<s>", "<|endoftext|>")

# Fields of the tokenizer that are read here or in gguf_metadata.py, or that change no token.
_KNOWN = frozenset(
    {
        "model",
        "pre",
        "tokens",
        "token_type",
        "scores",
        "merges",
        "add_bos_token",
        "add_eos_token",
        "add_space_prefix",
        "token_type_count",
        "precompiled_charsmap",
    }
)

Fields = Mapping[str, Any]


def core_of(fields: Fields) -> Any:
    """Return the file's tokenizer as a tokenizers.Tokenizer, or None if the file has none.

    Raises NotImplementedError, by name, for another kind of tokenizer or pre-tokenizer, and
    ValueError for lists that do not fit together.
    """
    kind = fields.get("tokenizer.ggml.model")
    if kind is None or kind == "no_vocab":
        return None
    if kind not in ("gpt2", "llama"):
        raise NotImplementedError(
            f"GGUF field tokenizer.ggml.model={str(kind)[:40]!r} is not supported; supported: gpt2,"
            " llama"
        )
    _check_all_known(fields)
    tokens = _strings(fields, "tokens")
    core = _byte_level(fields, tokens) if kind == "gpt2" else _sentence_piece(fields, tokens)
    kinds = fields.get("tokenizer.ggml.token_type")
    kinds = [1] * len(tokens) if kinds is None else kinds
    if not isinstance(kinds, list):
        raise ValueError(
            f"GGUF field tokenizer.ggml.token_type={str(kinds)[:40]!r} must be a list with an entry"
            " for each token"
        )
    if len(kinds) != len(tokens):
        raise ValueError(
            f"GGUF field tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)}"
            " tokens"
        )
    is_phi3 = kind == "llama" and fields.get("general.architecture") == "phi3"
    _add_special(core, tokens, kinds, strips=is_phi3)
    _add_template(core, fields, kind, _named(fields, "bos", tokens), _named(fields, "eos", tokens))
    return core


def tokenizer_of(fields: Fields, core: Any) -> Any:
    """Return a transformers.PreTrainedTokenizerFast with a copy of `core_of(fields)`, the file's
    special tokens and its chat template. It may come behind a `LazyTokenizer`."""
    tokens = _strings(fields, "tokens")
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {f"{name}_token": _named(fields, stated, tokens) for name, stated in names.items()}
    special = {name: token for name, token in special.items() if token is not None}
    template = fields.get("tokenizer.chat_template")

    def whole() -> Any:
        # its import warns that PyTorch is missing
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        from transformers import PreTrainedTokenizerFast  # imported late: it takes seconds

        return PreTrainedTokenizerFast(
            tokenizer_object=core,
            chat_template=template if isinstance(template, str) else None,
            clean_up_tokenization_spaces=False,
            **special,
        )

    known = {token.content for token in core.get_added_tokens_decoder().values() if token.special}
    # transformers adds a named token that is not special in the file, which changes its texts
    return LazyTokenizer(core, whole) if known.issuperset(special.values()) else whole()


def _check_all_known(fields: Fields) -> None:
    """Raise NotImplementedError, by name, for a field that may change the tokens and is not read:
    one that is set and is no token's id."""
    prefix = "tokenizer.ggml."
    for field in fields:
        name = field.removeprefix(prefix)
        if name == field or name in _KNOWN or name.endswith("_token_id"):
            continue
        if value := fields[field]:
            raise NotImplementedError(
                f"GGUF field {field}={str(value)[:40]} is not known here, and may change the tokens"
            )


def _split(fields: Fields) -> str:
    """Return the name in `PRE_TOKENIZERS` of a byte-level file's split."""
    if "tokenizer.ggml.pre" not in fields:
        raise NotImplementedError(
            "GGUF field tokenizer.ggml.pre is missing, and any guess of how text is split may give"
            " wrong tokens: convert the model again with a llama.cpp of May 2024 or later, or add"
            f" the field with gguf-new-metadata; supported: {', '.join(PRE_TOKENIZERS)}"
        )
    if (name := text(fields, "tokenizer.ggml.pre")) not in _SPLITS:
        raise NotImplementedError(
            f"GGUF field tokenizer.ggml.pre={name[:40]!r} is not supported; supported:"
            f" {', '.join(_SPLITS)}"
        )
    return _SPLITS[name]


def _byte_level(fields: Fields, tokens: Sequence[str]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = _split(fields)
    merges = [
        (first, second)
        for first, _, second in (merge.partition(" ") for merge in _strings(fields, "merges"))
    ]
    if not all(second for _, second in merges):
        raise ValueError(
            "GGUF field tokenizer.ggml.merges holds an entry that is not a pair of tokens"
        )
    core = Tokenizer(
        models.BPE(vocab=_vocabulary(tokens), merges=merges, ignore_merges=name in WHOLE_WORDS)
    )
    pattern = PRE_TOKENIZERS[name]
    if pattern is None or pattern == "digits":
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        core.pre_tokenizer = (
            byte_level
            if pattern is None
            else pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), byte_level]
            )
        )
    else:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        core.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    if fields["tokenizer.ggml.pre"] in COMPOSED:
        core.normalizer = normalizers.NFC()
    core.decoder = decoders.ByteLevel()
    return core


def _sentence_piece(fields: Fields, tokens: Sequence[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = fields.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ValueError("GGUF field tokenizer.ggml.scores does not have one entry for each token")
    vocabulary = _vocabulary(tokens)
    merges = _merges(vocabulary, scores)
    unknown = _named(fields, "unknown", tokens) or "<unk>"
    if unknown not in vocabulary:
        raise ValueError(
            f"GGUF field tokenizer.ggml.tokens lacks {unknown!r}, and"
            " tokenizer.ggml.unknown_token_id, which could name another token, is missing"
        )
    core = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    prefixed = fields.get("tokenizer.ggml.add_space_prefix", True)
    core.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefixed else spaces
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence(
        [*steps, decoders.Strip(content=" ", left=1)] if prefixed else steps
    )
    return core


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return every split of a piece into two pieces, the likeliest piece first. The splits of one
    piece are ordered by the ids of their parts. Raise ValueError for a piece that is too long to
    split."""
    scored = []
    if (longest := max(map(len, vocabulary), default=0)) > MAX_PIECE_LENGTH:
        raise ValueError(
            f"GGUF field tokenizer.ggml.tokens holds a piece of {longest} characters; at most"
            f" {MAX_PIECE_LENGTH} are read"
        )
    for piece, number in vocabulary.items():
        splits = [
            (piece[:i], piece[i:])
            for i in range(1, len(piece))
            if piece[:i] in vocabulary and piece[i:] in vocabulary
        ]
        splits.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        scored += [(scores[number], pair) for pair in splits]
    return [pair for _, pair in sorted(scored, key=lambda entry: entry[0], reverse=True)]


def _add_special(core: Any, tokens: Sequence[str], kinds: Sequence[int], *, strips: bool) -> None:
    """Add the special tokens, and those that the user defined. strips: special tokens swallow the
    spaces and lines behind them, but for KEEP_SPACES."""
    from tokenizers import AddedToken

    core.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False, rstrip=strips and t not in KEEP_SPACES)
            for t, k in zip(tokens, kinds, strict=True)
            if k == CONTROL
        ]
    )
    core.add_tokens(
        [
            AddedToken(t, normalized=False)
            for t, k in zip(tokens, kinds, strict=True)
            if k == USER_DEFINED
        ]
    )


def _add_template(core: Any, fields: Fields, kind: str, bos: str | None, eos: str | None) -> None:
    """Put the first and last special tokens around a text, if the file asks for them."""
    from tokenizers import processors

    first = fields.get(
        "tokenizer.ggml.add_bos_token", kind == "llama" or _split(fields) in WHOLE_WORDS
    )
    last = fields.get("tokenizer.ggml.add_eos_token", False)
    around = [token if wanted else None for token, wanted in ((bos, first), (eos, last))]
    if any(around):
        single = [token for token in (around[0], "$A:0", around[1]) if token]
        pair = [*single, *(token for token in (around[0], "$B:1", around[1]) if token)]
        special = [
            (token, core.token_to_id(token))
            for token in dict.fromkeys(token for token in around if token)
        ]
        core.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=special
        )


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for token, other in itertools.pairwise(sorted(tokens)) if token == other)
        raise ValueError(f"GGUF field tokenizer.ggml.tokens holds {twice!r} twice")
    return vocabulary


def _strings(fields: Fields, name: str) -> list[str]:
    strings = fields.get(f"tokenizer.ggml.{name}")
    if not isinstance(strings, list) or not all(isinstance(entry, str) for entry in strings):
        raise ValueError(f"GGUF field tokenizer.ggml.{name} is missing or not a list of texts")
    return strings


def _named(fields: Fields, name: str, tokens: Sequence[str]) -> str | None:
    number = fields.get(f"tokenizer.ggml.{name}_token_id", unnamed_token(fields, name))
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(tokens):
        raise ValueError(
            f"GGUF field tokenizer.ggml.{name}_token_id={reprlib.repr(number)} is not the number of"
            f" one of the {len(tokens)} tokens"
        )
    return tokens[number]

"""The tokenizer of a Hugging Face directory: the file's own tokenizer.json behind transformers'
interface.

transformers' AutoTokenizer may rebuild a tokenizer from its vocabulary by the model's type, and
then gives other ids than the file (all spaces lost for byte-level Llamas in 5.x; Qwen2's split of
text for every checkpoint of type qwen2). It also imports torch. Here the file is read as it is, and
the result is compared with it on a page of mixed text.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvq_jax.files.json_text import parse_json
from kvq_models.llama.stored_tensor import CheckpointError, first_line

TOKENIZER_FILE = "tokenizer.json"
SENTENCEPIECE_FILE = "tokenizer.model"
FAST_TOKENIZER_FILES = (TOKENIZER_FILE, "vocab.json", "merges.txt")
TOKENIZER_FILES = (*FAST_TOKENIZER_FILES, SENTENCEPIECE_FILE, "tokenizer_config.json")
# Checkpoints that read images may have the template in a file for their image processor.
_PROCESSOR_TEMPLATE = "chat_template.json"
TOKENIZER_EXTRAS = (
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    _PROCESSOR_TEMPLATE,
)
# Classes that put the first token before a text as the settings say, whatever the file says, in the
# versions of transformers (before 5) that write the setting. Files of DeepSeek's distilled models
# rely on it.
_BOS_BY_SETTING = re.compile(r"(CodeLlama|Gemma|Llama)Tokenizer(Fast)?")

MIXED_TEXT = """# Prices in 2024, in €\r\n
| café crème | 3.50 |   | smørrebrød | 12,000.00 |\n\n\n
\tdef f(x): return {"a": [x ** 2, -1e-5]}  # it's 100%, isn't it? They'll SAY: I'VE…
    for i in range(1234567):
        print(f"{i:>8}")
«да», 日本語のテキスト, 한국어, مرحبا, हिन्दी, e\u0301 é, ﬁ, 🙂👩‍🔬 \u00a0\u2003 </tag>
<|im_start|>user
 leading, trailing   """


def load_tokenizer(directory: Path) -> Any:
    """Return the directory's tokenizer, or None if it has none.

    Raises CheckpointError for a broken one, and for one that gives other ids than its
    tokenizer.json.
    """
    if not any((directory / name).exists() for name in TOKENIZER_FILES):
        return None
    fast = any((directory / name).exists() for name in FAST_TOKENIZER_FILES)
    if (
        not fast
        and (directory / SENTENCEPIECE_FILE).exists()
        and importlib.util.find_spec("sentencepiece") is None
    ):
        raise CheckpointError(
            f"the tokenizer in {str(directory)!r} is a {SENTENCEPIECE_FILE} without a"
            " tokenizer.json, and sentencepiece reads it: pip install 'kvq-jax[sentencepiece]'"
        )
    # its import warns that PyTorch is missing
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        if (directory / TOKENIZER_FILE).exists():
            tokenizer = _of_file(directory)
        else:
            from transformers import AutoTokenizer  # imported late: it takes seconds

            tokenizer = AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
            _check_longest(tokenizer, directory)
            if not fast:  # a tokenizer.model does not say it, and these are the defaults
                defaults = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
                _put_first(tokenizer, defaults | _object(directory / "tokenizer_config.json"))
        template = _object(directory / _PROCESSOR_TEMPLATE).get("chat_template")
        if tokenizer.chat_template is None and isinstance(template, str):
            tokenizer.chat_template = template
    except CheckpointError:
        raise
    except Exception as error:  # the tokenizers library raises nothing narrower for a broken file
        raise CheckpointError(
            f"the tokenizer in {str(directory)!r} cannot be loaded: {first_line(error)}"
        ) from error
    return tokenizer


def _of_file(directory: Path) -> Any:
    from transformers import PreTrainedTokenizerFast  # imported late: it takes seconds

    stamp = (directory / TOKENIZER_FILE).stat()
    file = _read(directory / TOKENIZER_FILE, stamp.st_mtime_ns, stamp.st_size)
    # tokenizer_config.json of Llama 3 asks for a clean-up that loses spaces before punctuation
    tokenizer = PreTrainedTokenizerFast.from_pretrained(
        directory, tokenizer_object=file, clean_up_tokenization_spaces=False, local_files_only=True
    )
    _check_longest(tokenizer, directory)
    check_same_ids(tokenizer, file, directory)
    _put_first(tokenizer, _object(directory / "tokenizer_config.json"))
    return tokenizer


def _put_first(tokenizer: Any, settings: Mapping[str, Any]) -> None:
    """Make the tokenizer begin texts with its first token, or without it, as its settings say."""
    wanted, first = settings.get("add_bos_token"), tokenizer.bos_token_id
    by_setting = _BOS_BY_SETTING.fullmatch(str(settings.get("tokenizer_class")))
    if not by_setting or not isinstance(wanted, bool) or first is None:
        return
    if (tokenizer("a", verbose=False).input_ids[:1] == [first]) != wanted:
        tokenizer.add_bos_token = wanted


def _check_longest(tokenizer: Any, directory: Path) -> None:
    """Raise CheckpointError if the tokenizer's longest text is not a number: transformers compares
    lengths with it, whatever its type."""
    longest = getattr(tokenizer, "model_max_length", None)
    if longest is not None and (isinstance(longest, bool) or not isinstance(longest, int | float)):
        raise CheckpointError(
            f"the tokenizer in {str(directory)!r} has model_max_length={longest!r}, which is"
            " not a number"
        )


@functools.lru_cache(maxsize=1)
def _read(path: Path, changed_ns: int, size: int) -> Any:
    """Read a tokenizer.json once: a command asks for its tokenizer and for its model, which brings
    another one. transformers copies it. Texts are neither cut nor padded."""
    from tokenizers import Tokenizer

    del changed_ns, size  # a changed file is another one
    file = Tokenizer.from_file(str(path))
    file.no_truncation()
    file.no_padding()
    return file


def check_same_ids(tokenizer: Any, file: Any, directory: Path) -> None:
    """Raise CheckpointError if transformers' tokenizer gives other ids or another text than the
    file's own (a tokenizers.Tokenizer) on `MIXED_TEXT`."""
    ids = file.encode(MIXED_TEXT).ids
    same = tokenizer(MIXED_TEXT, verbose=False).input_ids == ids
    if not same or tokenizer.decode(ids) != file.decode(ids, skip_special_tokens=False):
        raise CheckpointError(
            f"the tokenizer in {str(directory)!r} {'decodes' if same else 'encodes'} text through"
            f" transformers in another way than its {TOKENIZER_FILE}: its tokenizer_config.json"
            " contradicts that file"
        )


def added_tokens(directory: Path) -> dict[str, int]:
    """Return the ids of the tokens that were added to the vocabulary (special ones among them), by
    their text, except Gemma's </s>, which is HTML. A broken file has none: `load_tokenizer` names
    it."""
    stated = _object(directory / "tokenizer_config.json").get("added_tokens_decoder")
    if isinstance(stated, Mapping) and stated:
        entries = [(number, entry) for number, entry in stated.items()]
    else:
        listed = _object(directory / TOKENIZER_FILE).get("added_tokens")
        listed = listed if isinstance(listed, list) else []
        entries = [(one.get("id"), one) for one in listed if isinstance(one, Mapping)]
    end = end_of_sequence(directory)
    return {
        str(entry["content"]): int(str(number))
        for number, entry in entries
        if isinstance(entry, Mapping)
        and "content" in entry
        and re.fullmatch("[0-9]{1,10}", str(number))
        and (entry.get("special", True) or entry["content"] != "</s>" or end == "</s>")
    }


def end_of_sequence(directory: Path) -> str | None:
    """Return the text of the end-of-sequence token that the tokenizer's files name, or None."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _object(directory / name).get("eos_token")
        text = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(text, str):
            return text
    return None


def _object(path: Path) -> dict[str, Any]:
    try:
        fields = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}

"""The tokens at which generation stops: one set for every format and every caller.

A checkpoint states them in up to four places, which often disagree: a Llama 3 whose config says
<|end_of_text|> ends its turns with <|eot_id|>. A text ends at any of them, and at the special
tokens whose only use is to end a text or a turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# Names that llama.cpp and published chat templates give to ends of texts and turns.
WELL_KNOWN = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|end_of_turn|>",
        "<|eot|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "</s>",
        "<｜end▁of▁sentence｜>",
    }
)
# gpt-oss ends an answer or a call of a tool with these, and each message before that with <|end|>.
_HARMONY, _MESSAGE_END = frozenset({"<|return|>", "<|call|>"}), "<|end|>"


def end_tokens(
    stated: Iterable[int | None], special: Mapping[str, int], vocab_size: int
) -> tuple[int, ...]:
    """Return all tokens at which generation stops, those that the files state first. Ids outside
    the model's vocabulary are left out: it never generates them.

    Args:
        stated: ids from the files' fields; None for a field that is not there.
        special: ids of the vocabulary's special (control) tokens by their text.
        vocab_size: the number of tokens that the model knows.
    """
    known = WELL_KNOWN - {_MESSAGE_END} if special.keys() >= _HARMONY else WELL_KNOWN
    named = sorted(number for text, number in special.items() if text in known)
    ids = dict.fromkeys((*stated, *named))
    return tuple(i for i in ids if i is not None and 0 <= i < vocab_size)

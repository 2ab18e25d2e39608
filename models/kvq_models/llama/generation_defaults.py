"""The sampling that a checkpoint asks for: generation_config.json, or a GGUF file's
general.sampling fields."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Mapping
from typing import Any

from kvq_models.llama.sampling_rule import check_choice

Fields = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class GenerationDefaults:
    """Sampling values to use if the caller gives none. The default is greedy, which is also the
    value for a checkpoint that does not ask for sampling.

    Args:
        temperature: 0 takes the most probable token.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: then keep the fewest tokens whose probabilities add up to it.
        min_p: then keep tokens whose probability is at least min_p times the highest.
        unapplied: settings of the checkpoint that are out of range or that this project does not
            compute, as "name=value".
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    unapplied: tuple[str, ...] = ()


# transformers' values for what generation_config.json does not state
_TRANSFORMERS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
_EVERYTHING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

# Fields that change the text and are not computed, with the values that change nothing.
_NEUTRAL_HF = {
    "repetition_penalty": (1, None),
    "no_repeat_ngram_size": (0, None),
    "num_beams": (1, None),
    "typical_p": (1, None),
    "epsilon_cutoff": (0, None),
    "eta_cutoff": (0, None),
    "penalty_alpha": (0, None),
    "top_h": (None,),
    "min_length": (0, None),
    "min_new_tokens": (0, None),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "bad_words_ids": (None, []),
    "sequence_bias": (None, {}),
    "exponential_decay_length_penalty": (None,),
    "stop_strings": (None, []),
    "guidance_scale": (1, None),
}
_NEUTRAL_GGUF = {"penalty_repeat": (1,), "xtc_probability": (0,), "mirostat": (0,)}


def of_hf(fields: Fields) -> GenerationDefaults:
    """Return the defaults of a generation_config.json as transformers applies them: greedy without
    `do_sample`, else its own values for what is missing."""
    ignored = _unapplied(fields, _NEUTRAL_HF)
    if fields.get("do_sample") is not True:
        return GenerationDefaults(unapplied=ignored)
    return _in_range(fields, _TRANSFORMERS, ignored)


def to_hf(defaults: GenerationDefaults) -> dict[str, Any]:
    """Return the contents of a generation_config.json, or {} for greedy defaults."""
    if defaults.temperature == 0:
        return {}
    return {"do_sample": True} | {name: getattr(defaults, name) for name in _TRANSFORMERS}


def of_gguf(fields: Fields) -> GenerationDefaults:
    """Return the defaults of a GGUF file's fields: general.sampling.temp and its neighbours. What
    is missing changes nothing."""
    prefix = "general.sampling."
    stated = {
        key.removeprefix(prefix): fields[key] for key in fields if str(key).startswith(prefix)
    }
    stated |= {"temperature": stated.pop("temp")} if "temp" in stated else {}
    ignored = _unapplied(stated, _NEUTRAL_GGUF)
    if not stated.keys() & _EVERYTHING.keys():
        return GenerationDefaults(unapplied=ignored)
    return _in_range(stated, _EVERYTHING, ignored)


def _in_range(
    fields: Fields, defaults: Mapping[str, float], ignored: tuple[str, ...]
) -> GenerationDefaults:
    values: dict[str, Any] = dict(defaults)
    stated = {name: fields[name] for name in defaults if fields.get(name) is not None}
    for name, value in stated.items():
        try:
            check_choice(name, value)
        except ValueError:
            ignored += (f"{name}={reprlib.repr(value)}",)
        else:
            values[name] = type(defaults[name])(value)
    return GenerationDefaults(**values, unapplied=ignored)


def _unapplied(fields: Fields, neutral: Mapping[str, tuple[Any, ...]]) -> tuple[str, ...]:
    return tuple(
        f"{name}={reprlib.repr(fields[name])}"
        for name, values in neutral.items()
        if name in fields and fields[name] not in values
    )

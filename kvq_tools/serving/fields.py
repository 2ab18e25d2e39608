"""The request fields of clients: every field of OpenAI's two requests is either served, or refused
if it asks for something. None is ignored.

A refused field may have a value that changes nothing: `best_of: 1`, `tools: []`, and null in any
field, known or not. docs/serving.md lists them all.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from kvq_models.inference.engine.requests import MAX_BIASED, CapacityError
from kvq_models.inference.row_sampling import MAX_ALTERNATIVES
from kvq_models.inference.sampling import Sampling
from kvq_tools.serving import errors

MAX_CHOICES = 16
MAX_COMPLETION_ALTERNATIVES = 5
MAX_STOPS = 4
MAX_STOP_LENGTH = 1000  # in characters
STOPS_RULE = f"give up to {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters"
FAIL_FAST = Field(fail_fast=True)  # a list of a million faults is one error
MAX_NAME_LENGTH = 200  # characters
COMPLETION_TOKENS = 16  # OpenAI's default of `max_tokens` for completions

# refused fields, and the values beside null that ask for nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),  # of tools, which are refused
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
# the same of a message; clients that send an answer back send some of these fields
NEUTRAL_IN_MESSAGES: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_unknown_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = cls.model_fields
        return {name: value[name] for name in value if name in known or value[name] is not None}


class StreamOptions(_Fields):
    """include_usage: send the usage in one more chunk at the end."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Common(_Fields):
    """Fields of both requests. `top_k` and `min_p` are not OpenAI's. `user` is only a label."""

    model: Annotated[str, Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Annotated[list[str], FAIL_FAST] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    user: str | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    logit_bias: (
        Annotated[
            dict[
                Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,8})$")],
                Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)],
            ],
            Field(max_length=MAX_BIASED),
        ]
        | None
    ) = None

    def sampling(self, defaults: Sampling) -> Sampling:
        """Return the rule, with the server's defaults for what is not given. A filter without a
        temperature asks for sampling: OpenAI's default temperature is 1."""
        rule = dataclasses.asdict(defaults)
        asked = {name: getattr(self, name) for name in rule if getattr(self, name) is not None}
        if asked and not defaults.temperature:
            rule["temperature"] = 1.0
        rule |= asked
        # JSON's 1 is an int
        return Sampling(
            float(rule["temperature"]), rule["top_k"], float(rule["top_p"]), float(rule["min_p"])
        )

    @property
    def bias(self) -> tuple[tuple[int, float], ...]:
        return tuple((int(token), float(bias)) for token, bias in (self.logit_bias or {}).items())

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def usage_in_stream(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionFields(Common):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], FAIL_FAST]
        | Annotated[list[int], FAIL_FAST]
        | Annotated[list[Annotated[list[int], FAIL_FAST]], FAIL_FAST]
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_COMPLETION_ALTERNATIVES)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list. A list of numbers is one prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        numbers = [entry for entry in self.prompt if isinstance(entry, int)]
        return (
            [numbers] if numbers else [entry for entry in self.prompt if not isinstance(entry, int)]
        )


class TextPart(_Fields):
    type: Literal["text"]
    text: str


class Message(_Fields):
    """One message of a conversation. A developer message counts as a system message, and an
    assistant's null content as an empty one."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], FAIL_FAST] | None
    name: Annotated[str, Field(max_length=MAX_NAME_LENGTH)] | None = None

    @property
    def plain(self) -> dict[str, str]:
        """The message as chat templates take it."""
        content = (
            self.content or ""
            if isinstance(self.content, str | None)
            else "".join(part.text for part in self.content)
        )
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content} | ({"name": self.name} if self.name else {})


class ChatFields(Common):
    """POST /v1/chat/completions. `chat_template_kwargs` (not OpenAI's) are names that the chat
    template reads, such as Qwen3's enable_thinking."""

    messages: Annotated[list[Message], FAIL_FAST, Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None  # 0 would answer nothing
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def limit(self) -> int | None:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens


def read(
    kind: type[CompletionFields] | type[ChatFields],
    body: Any,
    *,
    max_choices: int,
    capacity: int,
) -> Any:
    """Return the checked fields of a request. Raise ApiError in OpenAI's words, naming the field.
    Prompts, their tokens, choices and messages are counted before anything is made of them: each
    message, and each part of one, has a token at least."""
    if not isinstance(body, dict):
        raise errors.ApiError(400, "The request body must be a JSON object.")
    _check_counts(body, max_choices, capacity)
    asked = _served(body, kind, NEUTRAL)
    if isinstance(messages := asked.get("messages"), list):
        asked["messages"] = [
            (
                _served(message, Message, NEUTRAL_IN_MESSAGES, f"messages[{i}].")
                if isinstance(message, dict)
                else message
            )
            for i, message in enumerate(messages)
        ]
    try:
        fields = kind.model_validate(asked)
    except pydantic.ValidationError as failure:
        raise _first(failure) from None
    if not all(1 <= len(stop) <= MAX_STOP_LENGTH for stop in fields.stops):
        raise errors.invalid("stop", STOPS_RULE)
    if fields.stream_options is not None and not fields.stream:
        raise errors.invalid("stream_options", "it is only allowed if 'stream' is true")
    if isinstance(fields, ChatFields) and fields.top_logprobs and not fields.logprobs:
        raise errors.invalid("top_logprobs", "it is only allowed if 'logprobs' is true")
    for i, message in enumerate(getattr(fields, "messages", ())):
        if message.content is None and message.role != "assistant":
            name, code = f"messages[{i}].content", "invalid_type"
            raise errors.invalid(name, "only an assistant's content may be null", code)
    return fields


def _check_counts(body: dict[str, Any], max_choices: int, capacity: int) -> None:
    prompt, n = body.get("prompt"), body.get("n")
    numbers = isinstance(prompt, list) and prompt and isinstance(prompt[0], int)
    prompts = len(prompt) if isinstance(prompt, list) and not numbers else 1
    # a larger n is refused below, and its product may have more digits than Python writes
    choices = prompts * (n if isinstance(n, int) and n <= MAX_CHOICES else 1)
    if choices > max_choices:
        raise errors.ApiError(
            400,
            f"{choices} choices are asked for in one request, and this server takes {max_choices}"
            " at a time.",
            param="n",
        )
    for ids in [prompt] if numbers else prompt if isinstance(prompt, list) else ():
        if isinstance(ids, list) and len(ids) > capacity:
            raise errors.of_refusal(CapacityError(len(ids), 1, capacity))
    messages = body.get("messages")
    parts = (
        _length(message.get("content"))
        for message in (messages[:capacity] if isinstance(messages, list) else ())
        if isinstance(message, dict)
    )
    if _length(body.get("stop")) > MAX_STOPS:
        raise errors.invalid("stop", STOPS_RULE)
    for name, count, maximum in (
        ("logit_bias", _length(body.get("logit_bias")), MAX_BIASED),
        ("messages", _length(messages), capacity),
        ("messages.content", sum(parts), capacity),
    ):
        if count > maximum:
            raise errors.invalid(name, f"there are {count}, and this server takes {maximum}")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list | dict) else 0


def _served(
    body: dict[str, Any],
    kind: type[BaseModel],
    neutral: dict[str, tuple[Any, ...]],
    where: str = "",
) -> dict[str, Any]:
    """Return the served fields. Raise ApiError if another field asks for something or is
    unknown."""
    for name, value in body.items():
        if name in kind.model_fields or value is None:
            continue
        if name not in neutral:
            raise errors.unrecognized(f"{where}{name}")
        if not any(
            value == nothing and isinstance(value, bool) == isinstance(nothing, bool)
            for nothing in neutral[name]
        ):
            if "tool" in name or "function" in name:
                raise errors.no_tools(f"{where}{name}")
            raise errors.unsupported(f"{where}{name}", value)
    return {name: value for name, value in body.items() if name in kind.model_fields}


def _first(failure: pydantic.ValidationError) -> errors.ApiError:
    """Return the first of pydantic's errors. For a union, use the member that matched furthest."""
    error = max(failure.errors(include_url=False), key=lambda candidate: len(candidate["loc"]))
    parts = [
        part
        for part in error["loc"]
        if isinstance(part, int) or not any(c in str(part) for c in "[(")
    ]
    name = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}"
        for part in parts
        if part not in ("str", "int")
    ).lstrip(".")
    if error["type"] == "missing":
        return errors.ApiError(
            400,
            f"Missing required parameter: '{name}'.",
            param=name,
            code="missing_required_parameter",
        )
    if error["type"] == "extra_forbidden":
        return errors.unrecognized(name)
    code = "invalid_type" if error["type"].endswith("_type") else "invalid_value"
    # pydantic's message names a class of ours
    message = "Input should be an object" if error["type"] == "model_type" else error["msg"]
    return errors.invalid(name, message, code)

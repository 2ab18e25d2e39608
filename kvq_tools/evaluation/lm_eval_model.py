"""Let lm-evaluation-harness read a cache: `kvq` as one of its models (extra `eval`).
docs/evaluation.md shows tasks on local files.

    import lm_eval
    from kvq_tools.evaluation.lm_eval_model import KvqLM

    lm = KvqLM(pretrained="embedded", cache="innerq:bits=2")
    print(lm_eval.simple_evaluate(model=lm, tasks=["gsm8k_cot"])["results"])

Importing this module registers the name: simple_evaluate(model="kvq", model_args={"pretrained":
..., "cache": ...}). model_args must be a dictionary, because lm-eval splits a string at the commas
of a cache spec. Run as a module, it is lm-eval's command line.

Log-likelihoods are computed by decoding: sum_t log p(token t | the cache after the tokens before
t), in steps of several tokens, which equal as many single steps. lm-eval's models score prompt and
answer in one exact forward pass without a cache. Prompts, truncation and windows follow its HFLM:
contexts lose tokens on the left.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import numpy as np
from jaxtyping import Array, Bool
from tqdm import tqdm

import kvq_jax as kvq
from kvq_jax.cache.cache import init_cache
from kvq_models.inference.generation import generate_stream
from kvq_models.inference.method_parameters import prepare
from kvq_models.inference.sampling import Sampling
from kvq_models.llama.checkpoint import load_llama
from kvq_tools.chat_template import rendered
from kvq_tools.evaluation.continuations import ContinuedRow, padded_to, score_continuations
from kvq_tools.evaluation.tasks.runner import batches, capacity
from kvq_tools.evaluation.tasks.sample import TaskSample
from kvq_tools.growing_text import decoded

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    raise ImportError(
        f"kvq_tools.evaluation.lm_eval_model needs lm-eval ({error}): pip install 'kvq-jax[eval]'"
    ) from error

Context = Literal["decode", "prefill"]

BATCH = 4
MAX_GEN_TOKS = 256  # HFLM's
SAMPLING_OPTIONS = ("top_k", "top_p", "min_p")


class RefusedError(ValueError):
    """A request of lm-eval that does not fit the model or the cache."""


@dataclasses.dataclass(frozen=True)
class _Generation:
    """The settings shared by generate_until requests that run together."""

    max_new_tokens: int
    stops: tuple[str, ...]
    sampling: Sampling


@register_model("kvq")
class KvqLM(TemplateLM):
    """A model of lm-eval whose every predicted token is read through a cache.

    Args:
        pretrained: as for `load_llama`: a local Hugging Face directory, a GGUF file, a Hub id, or a
            name ("embedded", "smollm2").
        cache: a cache spec.
        calibration: a file from `kvq calibrate`, for a cache that needs one.
        dtype: of weights, activations and full-precision rows.
        max_length: the most tokens that a prediction may see, at most (and by default) the model's
            positions.
        batch_size: requests that run together. Results without sampling do not depend on it, except
            for the rounding of sums.
        context: how log-likelihoods read a request's context. "decode" reads it token by token,
            like the continuation, without exact attention. "prefill" reads all but its last token
            as a prompt, with exact attention inside. The default is "prefill" for caches that take
            statistics from a prompt (innerq, squat), which "decode" would leave without them, and
            "decode" for others. generate_until always prefills.
        seed: of sampling, if a task asks for it.

    Raises ValueError if an argument, the spec or the calibration does not fit, or the checkpoint
    has no tokenizer. The methods below raise RefusedError for a continuation that is empty or
    longer than max_length; for a context without a prompt if the cache takes statistics from one
    (so all of loglikelihood_rolling, whose windows have a context of one token: see `kvq eval`);
    and for generation options other than until, max_gen_toks, do_sample, temperature, top_k, top_p
    and min_p. They raise FloatingPointError if the model computes nan or inf, which scores hide.
    """

    def __init__(
        self,
        pretrained: str | os.PathLike[str] = "embedded",
        cache: str | kvq.cache.CacheSpec = "dense",
        calibration: str | os.PathLike[str] | None = None,
        dtype: str = "float32",
        max_length: int | None = None,
        batch_size: int | str = BATCH,
        context: Context | None = None,
        seed: int = 0,
    ):
        super().__init__()
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ValueError(f"{batch_size=} must be an integer of at least 1")
        if context not in (None, *get_args(Context)):
            raise ValueError(f"{context=} must be one of {', '.join(get_args(Context))}")
        self.spec = kvq.parse(cache)
        llama, self.tokenizer = load_llama(pretrained, dtype=dtype)
        if self.tokenizer is None:
            raise ValueError(
                f"{str(pretrained)!r} has no tokenizer, which is needed to read requests"
            )
        self.max_length = llama.config.positions if max_length is None else max_length
        if not 1 <= self.max_length <= llama.config.positions:
            raise ValueError(
                f"{max_length=} must be between 1 and the model's {llama.config.positions}"
                " positions"
            )
        self.llama = prepare(llama, self.spec, calibration)
        self.needs_prompt = kvq.cache.has_prompt_statistics(self.spec, llama.config)
        if self.needs_prompt and context == "decode":
            raise ValueError(
                f"{str(self.spec)!r} takes statistics from a prompt, and context='decode' gives it"
                " none; leave context out"
            )
        self.context: Context = context or ("prefill" if self.needs_prompt else "decode")
        self.pretrained, self.batch_size, self.seed = str(pretrained), int(batch_size), seed

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> KvqLM:
        """Return the model for lm-eval's arguments. Its command line always names a device, but
        here JAX chooses one. Raises RefusedError if they do not fit."""
        options = {name: v for name, v in (additional_config or {}).items() if name != "device"}
        known = list(inspect.signature(cls).parameters)
        if unknown := [name for name in arg_dict if name not in known]:
            raise RefusedError(f"--model_args has no {unknown[0]!r}; it takes {', '.join(known)}")
        try:
            return super().create_from_arg_obj(arg_dict, options)
        except (ValueError, OSError) as error:
            raise RefusedError(error) from error

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Return the facts about the model that lm-eval's results record."""
        return {
            "pretrained": self.pretrained,
            "cache": str(self.spec),
            "max_length": self.max_length,
            "context": self.context,
        }

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return rendered(self.tokenizer, chat_history, continues=not add_generation_prompt)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Encode a text. The default is to add the tokenizer's special tokens, unless the text
        begins with the prefix token."""
        if add_special_tokens is None and string.startswith(
            self.tokenizer.decode([self.prefix_token_id])
        ):
            add_special_tokens = False
        chosen = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        # verbose=False: no warnings about long texts, which are cut later
        return list(self.tokenizer(string, verbose=False, **chosen).input_ids)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each text, in windows of max_length that overlap by one
        token."""
        windows = [
            [
                make_disjoint_window(w)
                for w in get_rolling_token_windows(
                    self.tok_encode(text), self.prefix_token_id, self.max_length, 1
                )
            ]
            for (text,) in (request.args for request in requests)
        ]
        flat = [(None, *window) for parts in windows for window in parts]
        scores = iter(self._loglikelihood_tokens(flat, disable_tqdm))
        totals = [
            sum(score for score, _ in itertools.islice(scores, len(parts))) for parts in windows
        ]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Return (log-probability, True if each token was the likeliest) for requests of (cache
        key, context, continuation)."""
        rows = [self._row(context, continuation) for _, context, continuation in requests]
        prompts = [
            self._prompt(row, len(continuation))
            for row, (_, _, continuation) in zip(rows, requests, strict=True)
        ]
        if self.needs_prompt and not all(prompts):
            raise RefusedError(
                f"{str(self.spec)!r} takes statistics from a prompt, and request {prompts.index(0)}"
                " leaves none: its context has a single token, or max_length cuts it off"
            )
        # max_new_tokens 0: the last token is only predicted, so the cache needs no room for more
        # than the inputs
        inputs = [TaskSample(tuple(row[:-1]), (), 0) for row in rows]
        scored: dict[int, tuple[float, bool]] = {}
        with tqdm(
            total=len(rows), desc=f"log-likelihoods through {self.spec}", disable=disable_tqdm
        ) as bar:
            for indices in batches(inputs, self.llama.config, self.batch_size):
                batch = [ContinuedRow(rows[i], len(requests[i][2]), prompts[i]) for i in indices]
                room = capacity(inputs[indices[0]], self.llama.config)
                scores = score_continuations(self.llama, self.spec, batch, room)
                self._check_finite(np.isfinite([score for score, _ in scores]))
                new = dict(zip(indices, scores, strict=True))
                for i, score in new.items():
                    if requests[i][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[i][0], score)
                scored |= new
                bar.update(len(new))
        return [scored[i] for i in range(len(rows))]

    def _check_finite(self, finite: Bool[np.ndarray, "B"]) -> None:
        if not finite.all():
            raise FloatingPointError(
                f"the model computed numbers that are not finite (nan or inf) with {self.spec}"
            )

    def _row(self, context: list[int], continuation: list[int]) -> list[int]:
        """Return the tokens of a request: the inputs, then one token that is only predicted."""
        if not context or not 1 <= len(continuation) <= self.max_length:
            raise RefusedError(
                f"a request has {len(context)} tokens of context and {len(continuation)} of"
                " continuation; it needs at least one of each, and at most"
                f" max_length={self.max_length} of the second"
            )
        return (context + continuation)[-(self.max_length + 1) :]

    def _prompt(self, row: list[int], new: int) -> int:
        """Return the number of tokens of a row to prefill: all but the last of its context, or
        0."""
        return len(row) - 1 - new if self.context == "prefill" else 0

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each prompt up to a stop string, an end-of-sequence token or max_gen_toks,
        greedily or as the task samples."""
        settings = [
            self._generation(options) for _, options in (request.args for request in requests)
        ]
        samples = []
        for request, setting in zip(requests, settings, strict=True):
            ids = self.tok_encode(request.args[0]) or [self.prefix_token_id]
            new = setting.max_new_tokens
            samples.append(TaskSample(tuple(ids[new - self.max_length :]), (), new))
        generated: dict[int, str] = {}
        with tqdm(
            total=len(samples), desc=f"generating through {self.spec}", disable=disable_tqdm
        ) as bar:
            for setting in dict.fromkeys(settings):
                alike = [i for i, other in enumerate(settings) if other == setting]
                for part in batches(
                    [samples[i] for i in alike], self.llama.config, self.batch_size
                ):
                    indices = [alike[i] for i in part]
                    # no two batches draw alike
                    key = jax.random.fold_in(jax.random.key(self.seed), indices[0])
                    texts = self._generated([samples[i] for i in indices], setting, key)
                    new = dict(zip(indices, texts, strict=True))
                    for i, text in new.items():
                        self.cache_hook.add_partial("generate_until", requests[i].args, text)
                    generated |= new
                    bar.update(len(new))
        return [generated[i] for i in range(len(samples))]

    def _generation(self, options: dict[str, Any]) -> _Generation:
        rest: dict[str, Any] = {**normalize_gen_kwargs(options, MAX_GEN_TOKS)}
        new = rest.pop("max_gen_toks")
        stops = tuple(rest.pop("until"))
        do_sample = rest.pop("do_sample", False)
        # transformers' default if a task gives only do_sample
        temperature = float(rest.pop("temperature", 1.0))
        chosen = {name: rest.pop(name) for name in SAMPLING_OPTIONS if name in rest}
        if rest:
            known = ", ".join(("do_sample", "temperature", *SAMPLING_OPTIONS))
            raise RefusedError(
                f"generation options {', '.join(rest)} are not supported; supported: until,"
                f" max_gen_toks, {known}"
            )
        if not 1 <= new < self.max_length:
            raise RefusedError(
                f"max_gen_toks={new} must be at least 1 and leave room for a prompt in"
                f" max_length={self.max_length}"
            )
        sampling = Sampling(temperature, **chosen) if do_sample else Sampling()
        sampling.check()
        return _Generation(new, tuple(stop for stop in stops if stop), sampling)

    def _generated(self, samples: list[TaskSample], settings: _Generation, key: Array) -> list[str]:
        config, room = self.llama.config, capacity(samples[0], self.llama.config)
        special = dict(
            zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True)
        )
        # stop strings that are special tokens never occur in a text
        stops = {special[stop] for stop in settings.stops if stop in special}
        ends = tuple(sorted({*config.eos_token_ids, *stops}))
        tokens = padded_to(
            [list(sample.prompt) for sample in samples], room - settings.max_new_tokens
        )
        lengths = np.array([len(sample.prompt) for sample in samples])
        cache = init_cache(self.spec, config, len(samples), room, self.llama.embed[...].dtype)
        texts = []
        for so_far in generate_stream(
            self.llama,
            cache,
            tokens,
            lengths,
            max_new_tokens=settings.max_new_tokens,
            sampling=settings.sampling,
            eos_ids=ends,
            key=key,
        ):
            self._check_finite(np.asarray(so_far.finite))
            rows = so_far.rows()
            texts = [decoded(self.tokenizer, row) for row in rows]
            if all(
                row[-1] in ends or any(stop in text for stop in settings.stops)
                for row, text in zip(rows, texts, strict=True)
            ):
                break
        return [postprocess_generated_text(text, list(settings.stops), None) for text in texts]


if __name__ == "__main__":
    cli_evaluate()  # the command line of lm-eval, in which the model is registered

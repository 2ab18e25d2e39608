"""The protocol by which caches are compared: equal windows, two ways of reading, several texts.

Every cache keeps the first SINK and the newest RECENT tokens exact, in blocks of 32 tokens or the
smallest that its method allows. Windows of a text hold `context` tokens and then `scored` ones,
which are predicted after being read in two ways:

    prompt    the context is one exact prompt, as papers measure
    decoded   all but the first DECODED_FROM tokens are decoded one by one through the cache, so
              that errors add up as they do in use

The same tokens are scored in both. `benchmarks/protocol` runs it over all methods, `kvq eval
--protocol` over caches of your choice.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

import kvq_jax as kvq
from kvq_jax.layer.regions import Regions
from kvq_jax.methods.xquant.roofline import weight_bytes
from kvq_jax.types.array_types import ModelDims
from kvq_models.calibration.progress import Progress, silent
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import HiddenBTD
from kvq_tools.evaluation.intervals import (
    Estimate,
    Interval,
    kl_interval,
    mean_interval,
    paired_ratio,
    rounding_of_mean,
    widened,
)
from kvq_tools.evaluation.results import exp
from kvq_tools.evaluation.run import Candidate, RowQuality, measure_rows
from kvq_tools.report.verdict import Choice, WindowSizes

Reading = Literal["prompt", "decoded"]
READINGS: tuple[Reading, ...] = get_args(Reading)

SINK, RECENT, BLOCKS = 4, 32, (32, 64, 128, 256)
DECODED_FROM = 64  # the exact prompt of `decoded`: methods with prompt statistics need one
MAX_EXACT = 0.03  # share of exact tokens among those that a scored one reads
BATCH = 4
AGAIN_STEP = 29  # step of the second measurement; its batches differ too, so rounding does
WORDS = {"prompt": "after an exact prompt", "decoded": f"decoded from token {DECODED_FROM} on"}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a run.

    Args:
        context: tokens of a window before its scored ones.
        scored: tokens of a window that are scored.
        windows: windows of each text.
    """

    context: int = 2048
    scored: int = 256
    windows: int = 12

    def __post_init__(self) -> None:
        if min(self.context - DECODED_FROM, self.scored, self.windows) < 1:
            raise ValueError(
                f"{self} must score and have at least one token and window, and more than"
                f" {DECODED_FROM} tokens of context"
            )

    @property
    def width(self) -> int:
        """Return the tokens of a window. The first token after a prompt is not scored: no cache has
        been read when it is predicted."""
        return self.context + 1 + self.scored


class ScoredText(NamedTuple):
    """A text by its domain, its contents' sha256, and its tokens [n]."""

    domain: str
    sha256: str
    ids: Int[np.ndarray, "n"]


@dataclasses.dataclass(frozen=True)
class Measured:
    """The numbers of one cache in one reading. Window values are in the order of the windows.

    Args:
        window_kl, window_nats, window_agreement: means over the scored tokens of each window.
        median, p999: quantiles of KL over the scored tokens of the windows of the headline.
        again: pairs (KL, KL once more, in other batches and steps) of the first window of each
            text, whose difference is rounding. () if the run ended before.
    """

    window_kl: tuple[float, ...]
    window_nats: tuple[float, ...]
    window_agreement: tuple[float, ...]
    median: float
    p999: float
    again: tuple[tuple[float, float], ...] = ()

    @property
    def every_window(self) -> range:
        return range(len(self.window_kl))

    @property
    def rounding(self) -> float:
        """Return the root mean square of the logs of again's ratios, or 0 without any."""
        logs = [math.log(b / a) for a, b in self.again if min(a, b) > 0]
        return float(np.sqrt(np.mean(np.square(logs)))) if logs else 0.0

    def kl(self, windows: Sequence[int]) -> Estimate:
        """Return the mean KL of some windows, its interval widened by rounding."""
        values = [self.window_kl[i] for i in windows]
        return Estimate(
            float(np.mean(values)),
            widened(kl_interval(values), rounding_of_mean(self.rounding, len(values))),
        )

    def perplexity(self, windows: Sequence[int]) -> Estimate:
        values = [self.window_nats[i] for i in windows]
        return Estimate(exp(float(np.mean(values))), Interval(*map(exp, mean_interval(values))))

    def agreement(self, windows: Sequence[int]) -> float:
        return float(np.mean([self.window_agreement[i] for i in windows]))

    def over(self, other: Measured, windows: Sequence[int]) -> Estimate:
        """Return the mean ratio of this KL to another's on the same windows, its paired interval
        widened by the rounding of both."""
        value, interval = paired_ratio(
            [self.window_kl[i] for i in windows], [other.window_kl[i] for i in windows]
        )
        both = math.hypot(self.rounding, other.rounding)
        return Estimate(value, widened(interval, rounding_of_mean(both, len(windows))))


def tokenized(tokenizer: Any, domain: str, text: str) -> ScoredText:
    ids = np.asarray(tokenizer(text, verbose=False).input_ids, np.int32)
    return ScoredText(domain, hashlib.sha256(text.encode()).hexdigest(), ids)


def cut(text: ScoredText, sizes: Sizes, bos: int | None) -> Int[np.ndarray, "R T"]:
    """Return disjoint windows of a text, equally spaced, each after the token that opens every
    text if the tokenizer has put one there. ValueError if the text is too short."""
    opened = 1 if len(text.ids) and text.ids[0] == bos else 0
    width = sizes.width - opened
    if len(text.ids) < opened + sizes.windows * width:
        raise ValueError(
            f"the text {text.domain!r} has {len(text.ids)} tokens, fewer than {sizes.windows}"
            f" windows of {width}: give a longer one, or fewer windows"
        )
    starts = np.linspace(opened, len(text.ids) - width, sizes.windows).astype(int)
    return np.stack(
        [np.concatenate([text.ids[:opened], text.ids[at : at + width]]) for at in starts]
    )


def windowed(
    cache: kvq.cache.CacheSpec | str, config: ModelDims, sizes: Sizes
) -> kvq.cache.CacheSpec:
    """Return the cache with the protocol's windows and the smallest of BLOCKS that its method
    allows. Raises ValueError, with the last reason, if it allows none."""
    spec, reason = kvq.parse(cache), None
    if spec.exact:
        return spec
    for block in BLOCKS:
        try:
            equal = dataclasses.replace(spec, sink=SINK, recent=RECENT, block=block)
            kvq.cache.layout(equal, config, 1, sizes.width)
        except ValueError as error:
            reason = error
        else:
            return equal
    raise ValueError(f"{cache} has no block of {', '.join(map(str, BLOCKS))} tokens: {reason}")


def exact_share(spec: kvq.cache.CacheSpec, config: ModelDims, sizes: Sizes) -> float:
    """Return the mean share of exact tokens among those that a scored one reads, over the layers of
    a model: layers with a sliding window read fewer."""
    layers = Counter(plan.regions for plan in kvq.cache.layout(spec, config, 1, sizes.width).plans)

    def share(regions: Regions, tokens: int) -> float:
        read = min(tokens, regions.window or tokens)
        return min(tokens - int(regions.aged_tokens(tokens)), read) / read

    reads = range(sizes.context + 1, sizes.width)
    shares = [np.mean([share(regions, n) for n in reads]) for regions in layers]
    return float(np.average(shares, weights=list(layers.values())))


def prompt_of(reading: Reading, sizes: Sizes) -> int:
    """Return the tokens that a reading prefills."""
    return sizes.context if reading == "prompt" else DECODED_FROM


def measure(
    candidates: Sequence[Candidate],
    rows: Int[np.ndarray, "R T"],
    headline: Sequence[int],
    sizes: Sizes,
    reading: Reading,
    kept: dict[int, HiddenBTD],
    progress: Progress[Any] | None = None,
) -> list[Measured]:
    """Measure caches that are prepared alike on the windows of all texts, in the order of the
    texts. headline: the windows of the headline. kept, progress: as in `measure_rows`. If progress
    ends early, the numbers are of the windows that were complete, and [] if none was."""
    common: dict[str, Any] = {"prompt": prompt_of(reading, sizes), "scored": sizes.scored}
    shown, shown_again = (
        _naming(progress or silent, WORDS[reading] + end) for end in ("", ", once more")
    )
    qualities = measure_rows(candidates, rows, batch=BATCH, kept=kept, progress=shown, **common)
    complete = len(qualities[0].token_kl)
    if not complete:
        return []
    headline = [window for window in headline if window < complete]
    first = np.arange(0, complete, sizes.windows)
    exact = {0: jnp.stack([kept[i // BATCH][i % BATCH] for i in first.tolist()])}
    jax.clear_caches()  # programs of other batches and steps would fill the process's mappings
    again = measure_rows(
        candidates,
        rows[first],
        batch=len(first),
        step=AGAIN_STEP,
        kept=exact,
        progress=shown_again,
        **common,
    )
    return [
        _measured(quality, once_more.kl, first, headline)
        for quality, once_more in zip(qualities, again, strict=True)
    ]


def _naming(progress: Progress[Any], words: str) -> Progress[Any]:
    """Return a progress bar whose message goes on with these words."""
    return lambda items, message: progress(items, f"{message} {words}")


def _measured(
    quality: RowQuality,
    once_more: Float[np.ndarray, "again"],
    first: Int[np.ndarray, "texts"],
    headline: Sequence[int],
) -> Measured:
    tokens = quality.token_kl[list(headline)]
    return Measured(
        tuple(quality.kl.tolist()),
        tuple(quality.nats.tolist()),
        tuple(quality.agreement.tolist()),
        float(np.median(tokens)),
        float(np.quantile(tokens, 0.999)),
        tuple(zip(quality.kl[first].tolist(), once_more.tolist(), strict=False)),
    )


def choice(
    name: str,
    spec: kvq.cache.CacheSpec,
    resident_bits: float,
    measured: Measured,
    windows: Sequence[int],
    share: float,
) -> Choice:
    """Return a cache as the verdict compares it: by resident bits (`kvq report` counts stored
    ones), KL and the windows' KL."""
    kl = measured.kl(windows).value
    return Choice(
        name=name,
        bits=resident_bits,
        kl=kl,
        numbers=f"KL {kl:.2g}, {measured.agreement(windows):.0%} of likeliest tokens kept",
        windows=WindowSizes(spec.sink, spec.recent, 1 - share),
        window_kl=tuple(measured.window_kl[i] for i in windows),
        rounding=measured.rounding,
    )


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one cache in one reading.

    Args:
        prefilled, decoded: tokens.
        operations: floating-point operations of the decoded tokens.
        prompt: of the prefilled ones, which caches that are measured together share.
        exact: of the full-precision model, which runs once for all.
        nbytes: bytes of the weights, the states of full precision and a batch's cache.
    """

    prefilled: int
    decoded: int
    operations: float
    prompt: float
    exact: float
    nbytes: int


def cost(
    spec: kvq.cache.CacheSpec, config: LlamaConfig, texts: int, sizes: Sizes, reading: Reading
) -> Cost:
    """Estimate the cost of a cache from shapes. Reads no weights."""
    windows, prompt = texts * sizes.windows, prompt_of(reading, sizes)
    layer = weight_bytes(config, 1)
    head = config.hidden_size * config.vocab_size
    width = 4 * config.num_attention_heads * config.head_dim

    def operations(first: int, last: int) -> float:
        attention = width * (first + last) / 2
        return (last - first) * config.num_hidden_layers * (2 * layer + attention)

    logits = 4 * head * sizes.scored  # for the cache and for full precision
    states = windows * sizes.width * config.hidden_size * 4
    cache = kvq.size.nbytes(kvq.cache.layout(spec, config, BATCH, sizes.width, "float32"))
    return Cost(
        windows * prompt,
        windows * (sizes.width - 1 - prompt),
        windows * (operations(prompt, sizes.width - 1) + logits),
        windows * operations(0, prompt),
        windows * operations(0, sizes.width),
        int(4 * (config.num_hidden_layers * layer + head) + states + cache),
    )

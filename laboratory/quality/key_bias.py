"""Find the caches that collapse under a key bias, and what subtracting it restores: a small model
and three biased variants of it.

    wide   the key bias of laboratory/stress.py: heads of twice the width, a
           constant in channels that no query reads. The same dense outputs. Plain is the model with
           the same wide heads and no constant.
    slow   the same constant in the two slowest RoPE pairs of every head, which queries do read.
           Where those turn by a small angle over the window, every key's score moves by the same
           amount and the outputs by little; KL is from the variant's own exact outputs.
    every  the same constant in every RoPE pair of every head. Those that turn within a group of
           tokens sweep their channels, which widens the ranges of keys by channel or pair.

The page in laboratory/results comes from the JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import pathlib
import sys
import tempfile
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

import kvq_jax as kvq
from benchmarks.markdown import head, table
from benchmarks.model_names import model_words, shown
from benchmarks.progress import progress
from benchmarks.report_file import Report, header
from kvq_models import Llama, load_llama, prepare
from kvq_models.calibration.fit import calibrate
from kvq_models.calibration.needs import needs
from kvq_models.llama import hf_names
from kvq_models.llama.model import abstract_llama
from kvq_tools.evaluation import Quality, measure
from laboratory.stress import Stress, stressed
from laboratory.study import run_study, study_parser

PASSAGE = pathlib.Path(__file__).parents[2] / "kvq_tools" / "cli" / "passage.txt"
SLOW_PAIRS = 2  # of each head
EVERY_HEADER = ("KL, every pair: no bias", "bias", "subtracted")
SAMPLES, CALIBRATED = 16, 1024  # calibration samples, and their tokens
WINDOWS = "sink=0,recent=32,block=32"
CACHES = {  # what shares a scale among keys, and the cache
    "int4": ("a token, all heads", f"int4:{WINDOWS}"),
    "int4, keys before RoPE": ("a token, all heads", f"int4:pre_rope=true,{WINDOWS}"),
    "int4, groups of 32": ("32 channels of a token", f"int4:group_size=32,{WINDOWS}"),
    "nf4": ("a token, all heads", f"nf4:{WINDOWS}"),
    "fp8": ("floats, with an exponent each", f"fp8:{WINDOWS}"),
    "turboquant 4": ("the norm of a token", f"turboquant:bits=4,{WINDOWS}"),
    "innerq 4": ("32 channels of a token, normalized", f"innerq:bits=4,{WINDOWS}"),
    "innerq 2": ("32 channels of a token, normalized", f"innerq:bits=2,{WINDOWS}"),
    "kivi 4": ("32 tokens of a channel", f"kivi:bits=4,{WINDOWS}"),
    "kivi 4, keys before RoPE": ("32 tokens of a channel", f"kivi:bits=4,pre_rope=true,{WINDOWS}"),
    "kivi 2": ("32 tokens of a channel", f"kivi:bits=2,{WINDOWS}"),
    "squat 2": ("32 tokens of a channel", f"squat:bits=2,{WINDOWS}"),
    "squat_pre 2": ("32 tokens of a channel", f"squat_pre:bits=2,{WINDOWS}"),
    "kvquant 3": ("a channel, calibrated", f"kvquant:bits=3,{WINDOWS}"),
    "polarquant 4 + 4": ("32 tokens of a pair", f"polarquant:group_size=32,{WINDOWS}"),
    "xquant 4": ("latents, without the bias", f"xquant:group_size=32,{WINDOWS}"),
}
HEADER = (
    "cache",
    "spec",
    "what shares a scale",
    "KL, unread: no bias",
    "bias",
    "subtracted",
    "KL, read: no bias",
    "bias",
    "subtracted",
)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One cache of a plain model, of its biased variant, and of that one with the option, if the
    cache takes it."""

    plain: Quality
    biased: Quality
    subtracted: Quality | None


@dataclasses.dataclass(frozen=True)
class BiasRow:
    """One cache; `refused` says why it does not take the option. Early reports lack `every`."""

    label: str
    shares: str
    cache: str
    refused: str
    wide: Variant
    slow: Variant
    every: Variant | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BiasReport(Report):
    """Rows and what they were measured on. Tokens of a window's prompt are prefilled and not
    scored."""

    model: str
    text: str
    calibration_text: str
    text_sha256: str
    windows: int
    window: int
    prompt: int
    key_bias: float
    seed: int
    perplexities: dict[str, float]  # of the exact models
    rows: tuple[BiasRow, ...]


def text_windows(ids: Int[np.ndarray, " S"], count: int, width: int) -> Int[Array, "B T"]:
    """Return windows of a text, equally spaced, each after the token that opens it. Raises
    ValueError if the text is too short."""
    if len(ids) < count * (width - 1) + 1:
        raise ValueError(f"the text has {len(ids)} tokens, fewer than {count} windows of {width}")
    starts = np.linspace(1, len(ids) - width + 1, count).astype(int)
    return jnp.asarray(
        np.stack([np.concatenate([ids[:1], ids[s : s + width - 1]]) for s in starts])
    )


def with_bias(llama: Llama, magnitude: float, seed: int, pairs: slice) -> Llama:
    """Return the model with a constant of random signs in these RoPE pairs of its keys, before
    RoPE. The slowest pairs are the last."""
    config, rng = llama.config, np.random.default_rng([seed, 3])
    widths = {
        "q_proj": config.num_attention_heads,
        "k_proj": config.num_key_value_heads,
        "v_proj": config.num_key_value_heads,
    }
    biases = {f"{name}.bias": np.zeros(heads * config.head_dim) for name, heads in widths.items()}
    weights = {path: weight.leaf for path, weight in hf_names.weights(llama).items()}
    for layer in range(config.num_hidden_layers):
        constant = np.zeros((config.num_key_value_heads, 2, config.head_dim // 2))
        constant[..., pairs] = magnitude * rng.choice([-1.0, 1.0], constant[..., pairs].shape)
        new = {
            **biases,
            "k_proj.bias": constant.ravel(),
            "o_proj.bias": np.zeros(config.hidden_size),
        }
        for name, bias in new.items():
            path = f"layers.{layer}.{name}"
            weights[path] = weights.get(path, 0) + jnp.asarray(bias, jnp.float32)
    biased = dataclasses.replace(config, model_type="llama", qkv_bias=True, o_bias=True)
    return hf_names.replace_weights(abstract_llama(biased), weights)


@dataclasses.dataclass(frozen=True)
class Texts:
    """The tokens that are scored, and those that caches are calibrated on."""

    rows: Int[Array, "B T"]
    prompt: int
    calibration: Int[np.ndarray, " S"]

    def prepared(self, llama: Llama, cache: str) -> Llama:
        """Return the model with the parameters that the cache needs. Raises ValueError if the model
        or the cache refuses."""
        spec = kvq.parse(cache)
        if not needs(spec, llama.config):
            return prepare(llama, spec)
        with tempfile.TemporaryDirectory() as work:
            length = min(CALIBRATED, len(self.calibration) // 2)
            return prepare(
                llama,
                spec,
                calibrate(llama, self.calibration, spec, samples=SAMPLES, length=length, work=work),
            )

    def through(self, llama: Llama, cache: str) -> Quality:
        return measure(self.prepared(llama, cache), cache, self.rows, self.prompt)


def measured(models: dict[str, tuple[Llama, Llama]], label: str, texts: Texts) -> BiasRow:
    """Measure one cache of `CACHES` through all models; `models` are (plain, biased) by the
    variant's name."""
    shares, cache = CACHES[label]
    option, refused = f"{cache},subtract_bias=true", ""
    try:
        texts.prepared(models["wide"][1], option)
    except ValueError as error:
        refused = str(error)

    def variant(plain: Llama, biased: Llama) -> Variant:
        subtracted = None if refused else texts.through(biased, option)
        return Variant(texts.through(plain, cache), texts.through(biased, cache), subtracted)

    return BiasRow(
        label, shares, cache, refused, **{name: variant(*pair) for name, pair in models.items()}
    )


def run(options: argparse.Namespace) -> BiasReport:
    """Measure all caches. Raises ValueError if the model cannot have a key bias, or the text is too
    short."""
    llama, tokenizer = load_llama(options.model, dtype="float32", weights="dense")
    text = options.text.read_text(encoding="utf-8")
    scored, calibration = (
        np.asarray(tokenizer(contents, verbose=False).input_ids, np.int32)
        for contents in (text, options.calibration_text.read_text(encoding="utf-8"))
    )
    texts = Texts(
        text_windows(scored, options.windows, options.window), options.prompt, calibration
    )
    models = {
        "wide": (
            stressed(llama, Stress(key_bias=0.0)),
            stressed(llama, Stress(key_bias=options.key_bias, seed=options.seed)),
        ),
        **{
            name: (llama, with_bias(llama, options.key_bias, options.seed, pairs))
            for name, pairs in (("slow", slice(-SLOW_PAIRS, None)), ("every", slice(None)))
        },
    }
    exact = {"plain": llama, **{name: biased for name, (_, biased) in models.items()}}
    perplexities = {name: texts.through(model, "dense").perplexity for name, model in exact.items()}
    print(
        "exact perplexity:",
        ", ".join(f"{name} {value:.4f}" for name, value in perplexities.items()),
        file=sys.stderr,
        flush=True,
    )
    rows = []
    for label in CACHES:
        rows.append(measured(models, label, texts))
        for name in models:
            kls = (
                f"{what} {quality['kl']:.5f}"
                for what, quality in dataclasses.asdict(getattr(rows[-1], name)).items()
                if quality
            )
            progress(f"{label:26s} {name}: KL {', '.join(kls)}")
    return BiasReport(
        title="Key biases, and caches without them",
        **header(_command(options)),
        model=shown(options.model),
        text=options.text.name,
        calibration_text=options.calibration_text.name,
        text_sha256=hashlib.sha256(text.encode()).hexdigest(),
        windows=options.windows,
        window=options.window,
        prompt=options.prompt,
        key_bias=options.key_bias,
        seed=options.seed,
        perplexities=perplexities,
        rows=tuple(rows),
    )


def _command(options: argparse.Namespace) -> list[str]:
    """Return the words of the command line, files by their names."""
    files = model_words(options.model)
    files += [] if options.text == PASSAGE else [f"--text {options.text.name}"]
    files += (
        []
        if options.calibration_text == PASSAGE
        else [f"--calibration-text {options.calibration_text.name}"]
    )
    sizes = (
        f"--{name.replace('_', '-')} {getattr(options, name)}"
        for name in ("key_bias", "windows", "window", "prompt", "seed")
    )
    return ["laboratory.quality.key_bias", *files, *sizes, f"--json {options.json.name}"]


def page(report: BiasReport, file: pathlib.Path) -> str:
    """Render what a key bias does to caches, and what is left of that when it is subtracted: two
    variants of the model, side by side."""
    exact = {variant: f"{perplexity:.3f}" for variant, perplexity in report.perplexities.items()}
    every = any(row.every for row in report.rows)
    said = (
        f"Model: {report.model}, float32; {report.windows} windows of {report.window} tokens of"
        f" {report.text}, the first {report.prompt} of each a prompt and not scored. KL is from the"
        f" exact outputs of the same model. KVQuant is calibrated on {report.calibration_text}."
    )
    return "\n\n".join(
        (
            *head(report, file, said),
            (
                f"Unread: {report.key_bias:g} by laboratory/stress.py, heads of twice the width"
                f" with constants that no query reads; exact perplexity {exact['plain']} without"
                f" them and {exact['wide']} with them. Read: {report.key_bias:g} in the slowest"
                f" RoPE pairs of every head, which queries read; exact perplexity {exact['slow']}."
                f"{_of_every_pair(report, exact)}"
                " Refused: the cache holds no keys, and adds their bias when it rebuilds them."
                " SQuat's two numbers without a bias differ because its lam weighs squares of"
                " queries, which heads of twice the width double."
            ),
            table(HEADER + EVERY_HEADER * every, map(_bias_line, report.rows)),
        )
    )


def _of_every_pair(report: BiasReport, exact: dict[str, str]) -> str:
    if "every" not in exact:
        return ""
    return f" Every pair: {report.key_bias:g} in all RoPE pairs; exact perplexity {exact['every']}."


def _bias_line(row: BiasRow) -> tuple[str, ...]:
    variants = [v for v in (row.wide, row.slow, row.every) if v]
    qualities = (kl for v in variants for kl in (v.plain, v.biased, v.subtracted))
    return (
        row.label,
        f"`{row.cache}`",
        row.shares,
        *("refused" if quality is None else f"{quality.kl:.5f}" for quality in qualities),
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = study_parser("laboratory.quality.key_bias", __doc__)
    parser.add_argument(
        "--text", metavar="FILE", type=pathlib.Path, default=PASSAGE, help="the text that is scored"
    )
    parser.add_argument(
        "--calibration-text",
        metavar="FILE",
        type=pathlib.Path,
        default=PASSAGE,
        help="the text that caches are calibrated on",
    )
    parser.add_argument("--key-bias", type=float, default=100.0, help="magnitude of the constant")
    parser.add_argument("--windows", type=int, default=4, help="windows of the text")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window")
    parser.add_argument(
        "--prompt",
        type=int,
        default=128,
        help="tokens of a window that are a prompt, and not scored",
    )
    parser.add_argument("--seed", type=int, default=0, help="draws the signs of the constants")
    run_study(parser, argv, run)


if __name__ == "__main__":
    main()

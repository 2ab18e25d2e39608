"""`kvq doctor`: tell layer by layer what a cache will do to a model, and warn of known problems."""

from __future__ import annotations

import argparse
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

import kvq_jax as kvq
from kvq_jax.attention import dispatch
from kvq_jax.codecs import kernel_readers
from kvq_jax.codecs.base import Codec
from kvq_jax.layer.plan import LayerPlan
from kvq_models.calibration.needs import needs, partial_fingerprint_of
from kvq_models.inference.method_parameters import calibration_hint, check_calibration
from kvq_models.llama import checkpoint
from kvq_models.llama.config import LlamaConfig
from kvq_models.named_models.names import located
from kvq_tools.cli import compilation_cache, doctor_outliers, inputs
from kvq_tools.cli.console import UserError, input_errors, print_json
from kvq_tools.cli.tables import print_line, print_table

# keys of a normalized input are of order 1 to 10; a constant above that dominates its group
LARGE_BIAS = 10.0
BIAS_NAME = "model.layers.{}.self_attn.k_proj.bias"

DESCRIPTION = f"""\
Tells layer by layer what a cache will apply to a model and what it will leave in full precision, and why: resolved
bits and groups, packing and its padding, skipped layers, and whether the kernels for GPUs and CPUs can read it. Looks at head dim,
QK-norm, RoPE, sliding window and the key projection's bias, and warns of known problems. Says whether the cache needs a
calibration, and whether the one given serves this cache and model. Of the weights, it reads only k_proj biases and, for
a calibration, those that tell models apart (norms and two projections), and only from a local directory.

{doctor_outliers.HELP}"""

EPILOG = f"""\
examples:
  kvq doctor path/to/Qwen2.5-1.5B --cache innerq:bits=2
  kvq doctor path/to/Llama-3.1-8B --outliers
  kvq doctor embedded --outliers --text notes.txt

{inputs.CACHE_GRAMMAR}"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    inputs.add_model(parser)
    parser.add_argument(
        "--cache", metavar="SPEC", type=inputs.cache_spec, help="the cache (default: dense)"
    )
    inputs.add_calibration(parser)
    parser.add_argument(
        "--context",
        metavar="S",
        type=inputs.positive,
        help="capacity in tokens (default: the model's max_position_embeddings)",
    )
    parser.add_argument(
        "--outliers",
        action="store_true",
        help="instead: predict from the weights which channels of keys have outliers",
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="with --outliers: a UTF-8 text on which predictions are checked",
    )
    parser.add_argument(
        "--dtype",
        choices=inputs.DTYPES,
        default="bfloat16",
        help="with --text: of weights and activations (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> None:
    if options.outliers:
        unused = [
            name
            for name in ("cache", "calibration", "context")
            if getattr(options, name) is not None
        ]
        if unused:
            raise UserError(f"--outliers looks at the model alone; leave --{unused[0]} out")
        doctor_outliers.run(options)
        return
    if options.text is not None:
        raise UserError("--text is for --outliers")
    options.cache = options.cache or inputs.cache_spec("dense")
    config = inputs.read_config(options.model, options.cache, tell=False)
    context = options.context or config.positions
    cache = kvq.layout(options.cache, config, 1, context)
    biases = key_biases(options.model, config)
    calibration, missing = calibration_state(options.model, config, cache.spec, options.calibration)
    heads = config.num_attention_heads
    layers = [
        describe_layer(index, plan, cache.spec, heads) | _bias_facts(biases, index)
        for index, plan in enumerate(cache.plans)
    ]
    result = {
        "model": options.model,
        "cache": str(cache.spec),
        "context": context,
        "regions": {
            "sink": cache.spec.sink,
            "recent": cache.spec.recent,
            "block": cache.spec.block,
            "body": cache.spec.regions(context).body_capacity,
        },
        "facts": (
            facts(config, cache.spec, inputs.raw_config(options.model), biases)
            | {
                "calibration": calibration,
                "kernels here": dispatch.kernels_here(),
                "kernels' arithmetic": dispatch.arithmetic_here(cache.plans, heads),
                "compilation cache": compilation_cache.described(),
            }
        ),
        "layers": layers,
        "warnings": warnings(config, cache, biases) + missing,
    }
    print_json("doctor", result) if options.json else _print(result)


# --- layers
# -------------------------------------------------------------------------------------------------------------------------------


def describe_layer(
    index: int, plan: LayerPlan, spec: kvq.CacheSpec, query_heads: int
) -> dict[str, Any]:
    """Describe both sides of a layer (`kv` where both are read from the same rows), the reason that
    one is left in full
    precision, and the reasons that no GPU kernel and no CPU kernel read the layer (None where one
    does).
    """
    skipped = index in spec.skip_layers
    if skipped:
        reason = "skip_layers names it"
    elif spec.exact:
        reason = "the cache is dense"
    elif not plan.quantizes:
        reason = "its options keep rows as they are"
    else:
        reason = next(
            (
                f"{side} is {method.name}"
                for side, method in (("k", spec.k), ("v", spec.v))
                if method.exact
            ),
            None,
        )
    sides = {
        side: describe_side(codec, plan)
        for side, codec in zip(plan.names, plan.codecs, strict=True)
    }
    return {
        "layer": index,
        "quantized": plan.quantizes,
        "reason": reason,
        "no_kernel": dispatch.unsupported(plan, query_heads, 1),
        "no_native_kernel": dispatch.unsupported(plan, query_heads, 1, "native"),
        **sides,
    }


def describe_side(codec: Codec, plan: LayerPlan) -> dict[str, Any]:
    """Return the codec's resolved options, its stored bits for each element of keys or values, and
    how its codes are packed."""
    tokens = 32 * plan.regions.block
    body = codec.body(1, plan.heads, tokens)
    described = codec.describe()
    described["stored_bits"] = (
        8 * kvq.nbytes(body) / (plan.heads * tokens * plan.head_dim * (2 if plan.joint else 1))
    )
    if layout := codec.code_layout:
        described["packing"] = {
            "code_bits": layout.bits,
            "plane_channels": layout.width,
            "tokens_per_word_row": layout.slots,
            "padding_channels": layout.chunks * layout.width - layout.channels,
        }
    return described


# --- the model
# ----------------------------------------------------------------------------------------------------------------------------


def facts(
    config: LlamaConfig, spec: kvq.CacheSpec, hf: dict[str, Any], biases: list[np.ndarray] | None
) -> dict[str, str]:
    """Describe in words what matters to a cache about the model."""
    h = config.head_dim
    normed = (
        "applied when keys are rebuilt"
        if rebuilds_keys(spec, config)
        else "keys are cached after it"
    )
    return {
        "model": f"{config.model_type}, {config.num_hidden_layers} layers",
        "heads": (
            f"{config.num_attention_heads} query heads on {config.num_key_value_heads} KV heads"
        ),
        "head_dim": str(h),
        "qk_norm": f"yes; {normed}" if config.qk_norm else "none",
        "rope": (
            f"{config.rope.rope_type}, theta {config.rope.theta:g}"
            + (f", factor {config.rope.factor:g}" if config.rope.factor != 1 else "")
        ),
        "sliding_window": _sliding_window(config, hf),
        "outliers": _outliers(config, spec),
        "k_proj_bias": (
            _bias_in_words(config, biases)
            + ("; subtracted before keys are quantized" if spec.subtract_bias else "")
        ),
        "prompt_statistics": (
            "fixed by the first prompt of a sequence"
            if kvq.has_prompt_statistics(spec, config)
            else "none"
        ),
    }


def rebuilds_keys(spec: kvq.CacheSpec, config: LlamaConfig) -> bool:
    """Return whether any layer rebuilds its keys from what it caches."""
    return any(plan.k.rebuilds for plan in kvq.layout(spec, config, 1, 1).plans)


def _outliers(config: LlamaConfig, spec: kvq.CacheSpec) -> str:
    width, fraction = (
        config.num_key_value_heads * config.head_dim,
        kvq.outlier_fraction(spec, config),
    )
    return (
        f"full-precision slots for {fraction:.2%} of all elements; a token has {width} of each side"
        if fraction
        else "none kept in full precision"
    )


def _sliding_window(config: LlamaConfig, hf: dict[str, Any]) -> str:
    if config.sliding_window is not None:
        return (
            f"{config.sliding_window} in {len(config.windowed_layers)} layers, and not computed:"
            f" sequences of up to {config.sliding_window} tokens are served, of the"
            f" {config.max_position_embeddings} positions"
        )
    window = hf.get("sliding_window")
    return (
        "none"
        if window is None
        else f"{window} in config.json, inactive: every layer attends to all tokens"
    )


def key_biases(model: str, config: LlamaConfig) -> list[np.ndarray] | None:
    """Read k_proj's bias of every layer, [K * H] fp32, and no other tensor; None without such a
    bias or without local weights."""
    stored = _stored_weights(model) if config.qkv_bias else None
    if stored is None:
        return None
    names = [BIAS_NAME.format(layer) for layer in range(config.num_hidden_layers)]
    with input_errors():
        missing = [name for name in names if name not in stored.tensors]
        if missing:
            raise ValueError(
                f"the files lack tensor {missing[0]!r}, which the model of config.json needs"
            )
        return [stored.read(name).astype(np.float32) for name in names]


def _stored_weights(model: str) -> checkpoint.Checkpoint | None:
    """Return the local checkpoint with its weights; None where there are none (a Hub id, a
    directory with config.json alone)."""
    path = Path(located(model))
    if not path.is_file() and not any(path.glob("*.safetensors")):
        return None
    with input_errors():
        return checkpoint.open_checkpoint(path)


def _bias_facts(biases: list[np.ndarray] | None, layer: int) -> dict[str, Any]:
    if biases is None:
        return {"k_proj_bias": None}
    bias = biases[layer]
    return {
        "k_proj_bias": {
            "norm": float(np.linalg.norm(bias)),
            "largest": float(np.abs(bias).max()),
            "median": float(np.median(np.abs(bias))),
        }
    }


def _bias_in_words(config: LlamaConfig, biases: list[np.ndarray] | None) -> str:
    if not config.qkv_bias:
        return "none"
    if biases is None:
        return "yes; not read: the weights are not in a local directory"
    worst = int(np.argmax([np.abs(b).max() for b in biases]))
    return f"yes; largest {np.abs(biases[worst]).max():.3g} in layer {worst}"


# --- calibration
# --------------------------------------------------------------------------------------------------------------------------


def calibration_state(
    model: str, config: LlamaConfig, spec: kvq.CacheSpec, file: str | None
) -> tuple[str, list[str]]:
    """Return (the state of the calibration in words, warnings). UserError where the file is not for
    this cache and model."""
    needed = needs(spec, config)
    if not needed and file is None:
        return (
            "not needed"
            + (
                "; what rebuilds keys is made from the weights"
                if rebuilds_keys(spec, config)
                else ""
            ),
            [],
        )
    if file is None:
        keys, values = (sum(need.side == side for need in needed.values()) for side in ("k", "v"))
        return f"needed for the keys of {keys} layers and the values of {values}", [
            f"{str(spec)!r} needs a calibration: {calibration_hint(spec)}"
        ]
    stored = _stored_weights(model)
    with input_errors():
        own = None if stored is None else partial_fingerprint_of(config, stored.read)
        calibration = check_calibration(spec, config, file, own)
    assert calibration is not None, "a file is refused where none is needed"
    compared = (
        "fits this cache and model"
        if own
        else "fits this cache; the weights are not in a local directory and were not compared"
    )
    origin = calibration.origin
    return (
        (
            f"{compared}: {origin.samples} samples of {origin.length} tokens of {origin.text}, seed"
            f" {origin.seed}, {origin.dtype}"
        ),
        [],
    )


# --- warnings
# -----------------------------------------------------------------------------------------------------------------------------


def warnings(config: LlamaConfig, cache: kvq.Cache, biases: list[np.ndarray] | None) -> list[str]:
    """Return the known problems of this cache with this model, one sentence each."""
    spec, problems = cache.spec, []
    windows = spec.sink + spec.recent + spec.block
    if (
        any(plan.quantizes for plan in cache.plans)
        and not spec.regions(cache.capacity).body_capacity
    ):
        problems.append(
            f"nothing is quantized within {cache.capacity} tokens: the full-precision windows hold"
            f" sink + recent + block = {windows}"
        )
    if config.rope.rope_type == "dynamic":
        problems.append(
            f"rope type dynamic: the base is frozen from the capacity ({cache.capacity}), since"
            " cached keys keep their rotation; output equals Hugging Face's up to"
            f" {config.max_position_embeddings} tokens"
        )
    if config.head_dim not in kernel_readers.HEAD_DIMS:
        problems.append(
            f"head_dim {config.head_dim} fits no GPU kernel; attention on a GPU runs on the XLA"
            " path"
        )
    problems += kvq.unmet_options(cache)
    return problems + _padding_warnings(cache) + _bias_warnings(cache, biases)


def _padding_warnings(cache: kvq.Cache) -> list[str]:
    padded: dict[int, int] = {}
    for layout in (codec.code_layout for plan in cache.plans for codec in plan.codecs):
        if layout is not None:
            padded[layout.channels] = max(
                padded.get(layout.channels, 0), layout.chunks * layout.width
            )
    return [
        f"codes of {channels} channels are padded to {stored} to fill words, and the padding is"
        " stored"
        for channels, stored in sorted(padded.items())
        if stored > channels
    ]


def _bias_warnings(cache: kvq.Cache, biases: list[np.ndarray] | None) -> list[str]:
    """Warn of large key biases: channels that share a scale are quantized with the step of the one
    with the largest constant part."""
    problems = []
    for layer, (plan, bias) in enumerate(zip(cache.plans, biases or [], strict=False)):
        bits, largest = plan.k.channel_group_bits, float(np.abs(bias).max())
        if bits is None or largest < LARGE_BIAS:
            continue
        if plan.k.normalizes_channels:
            problems.append(
                f"layer {layer}: k_proj bias up to {largest:.3g}; dividing keys by their channel's"
                " norm removes only its square root: add subtract_bias=true"
            )
        else:
            step = 2 * largest / (2**bits - 1)
            problems.append(
                f"layer {layer}: k_proj bias up to {largest:.3g} makes steps of about {step:.3g} in"
                " per-token key groups, which erases smaller channels; add subtract_bias=true, or"
                f" use per-channel keys (k=kivi) or skip_layers={layer}"
            )
    return problems


# --- text
# ---------------------------------------------------------------------------------------------------------------------------------


def _print(result: dict[str, Any]) -> None:
    regions = result["regions"]
    print_table(result["model"], ("what", "found"), list(result["facts"].items()))
    rows = []
    for _, group in groupby(
        result["layers"],
        key=lambda layer: {k: v for k, v in layer.items() if k not in ("layer", "k_proj_bias")},
    ):
        run = list(group)
        first, last = run[0]["layer"], run[-1]["layer"]
        precision = "quantized" if run[0]["quantized"] else "full precision"
        sides = (
            (_side_text(run[0]["kv"]), "from the same rows")
            if "kv" in run[0]
            else (_side_text(run[0]["k"]), _side_text(run[0]["v"]))
        )
        rows.append(
            (
                first if first == last else f"{first}-{last}",
                precision,
                run[0]["reason"] or "",
                *sides,
                *(
                    f"no: {run[0][name]}" if run[0][name] else "yes"
                    for name in ("no_kernel", "no_native_kernel")
                ),
            )
        )
    title = (
        f"{result['cache']} at {result['context']} tokens: {regions['body']} in the body,"
        f" full-precision windows sink {regions['sink']}, recent {regions['recent']}, block"
        f" {regions['block']}"
    )
    print_table(
        title, ("layers", "is", "because", "keys", "values", "GPU kernel", "CPU kernel"), rows
    )
    biases = [
        (layer["layer"], *(f"{value:.3f}" for value in layer["k_proj_bias"].values()))
        for layer in result["layers"]
        if layer["k_proj_bias"]
    ]
    if biases:
        print_table(
            "k_proj bias",
            ("layer", "norm", "largest", "median"),
            biases,
            numeric=("layer", "norm", "largest", "median"),
        )
    for warning in result["warnings"]:
        print_line(f"warning: {warning}")
    if not result["warnings"]:
        print_line("no warnings")


def _side_text(side: dict[str, Any]) -> str:
    options = {
        key: value
        for key, value in side.items()
        if key not in ("codec", "stored_bits", "packing", "channels", "block", "heads", "width")
        and value is not False
    }
    text = ", ".join(key if value is True else f"{key} {value}" for key, value in options.items())
    packing = side.get("packing")
    if packing:
        text += (
            f"; packed in planes of {packing['plane_channels']} channels,"
            f" {packing['tokens_per_word_row']} tokens per word row"
        )
        text += (
            f", {packing['padding_channels']} channels of padding"
            if packing["padding_channels"]
            else ""
        )
    return f"{side['stored_bits']:.2f} bits stored: {text}"

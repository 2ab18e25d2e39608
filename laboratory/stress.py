"""Models with the same dense outputs and a cache that is harder to quantize: small models then show
what large ones do.

    key outliers     both channels of a RoPE pair of W_k (and its bias) times F, the same channels
                     of W_q (and its bias) over F, for all query heads of the group. A rotation acts
                     inside a pair, so q . k stays: exact. With QK-norm the factors go into the
                     weights of the norms, which all heads share. With one_dimension each such pair
                     is also turned, in W_k and W_q alike, until most of its keys lie in one
                     channel.
    value outliers   channels of W_v (and its bias) times F, the rows of W_o that read them over F:
                     exact.
    input outliers   channels of a layer's input times F in the norm's weight, the rows of W_q, W_k
                     and W_v that read them over F: exact.
    key bias         a large constant in k_proj.bias, in heads of twice the width: exact, but for
                     W_q times sqrt(2), which is rounded.

Which caches this can hurt. A code sees an outlier only where it shares a scale with other entries.
Where groups lie within a channel or a RoPE pair, a factor comes out of the group as a factor of its
scale, and the codes stay, all of them if the factor is a power of two and all but rounding ties
otherwise: key outliers cannot touch KIVI's keys or PolarQuant's pairs, value outliers not InnerQ's
values. Nothing but input outliers changes the input of a layer, which XQuant stores (its latents
also follow key and value outliers, because the SVD does).

Why no single channel of a pair. Keys are rotated by all angles before they meet the queries, so
what is done to a pair of the keys must commute with every rotation, or its inverse on the queries
does not undo it: a factor and a turn, and nothing else. The turn is as far towards outliers in one
of the two channels, PolarQuant's premise, as the same outputs allow. Nor can single tokens have
outliers where queries read: no query may see a difference, so the scores of that token would have
to stay.

Why wider heads. A constant c in one RoPE pair of the keys adds q^T R_(s-t) c to the score of token
s for the query at t. Rotations by different frequencies are linearly independent functions of s, so
no other pair can take that away: the outputs stay the same only where q is zero in the pair, and no
trained pair is so. Scaling the pair of q down by F instead scales its keys up by F, and what then
leaves the scores alone to 1e-4 is far below the spread of those keys: an outlier, no bias. So a
head of H channels becomes one of 2H: channel c goes to 2c, and the odd channels are new, zero in q,
v and W_o. With the same base, pair 2i of 2H channels turns as pair i of H did (theta^(-2 (2i) / 2H)
= theta^(-2i / H)), and the new pairs lie between the old ones, at all frequencies. Scores are
divided by sqrt(2H) instead of sqrt(H), hence W_q times sqrt(2). Every new pair gets the constant,
so that some turn within any group of tokens.

What the bias can show follows: it hurts where the old channels share a scale or a norm with the new
ones (groups over channels, whole tokens), and not where every channel has its own. A real model's
biased channels also have queries; that part no variant with the same outputs can have.

Source of the pattern: the k_proj biases of Qwen2 and Qwen2.5; outlier channels of keys, KVQuant 3.1
and KIVI 3.2.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from kvq_models.llama import hf_names
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import Llama, abstract_llama
from kvq_models.llama.rope import rope_for

MAX_BIAS = float(np.finfo(np.float32).max)
FACTORS = (2.0**-126, 2.0**126)  # they and their inverses are normal numbers in float32

Weights = dict[str, jax.Array]
Factors = np.ndarray  # [K, H] float32


@dataclasses.dataclass(frozen=True)
class Outliers:
    """Outliers of each KV head, or of a layer's input: the number of RoPE pairs of keys or of
    channels, and their factor.

    A power of two leaves every code as it is if a group has one channel. Other factors leave all
    but rounding ties.
    """

    channels: int
    factor: int | float


@dataclasses.dataclass(frozen=True)
class Stress:
    """The changes to a model. key_bias is the magnitude of the constant; 0 only widens the heads,
    which is the control for the others. The seed draws channels and signs; each kind has draws of
    its own. one_dimension turns the pairs of the key outliers.
    """

    key_outliers: Outliers | None = None
    value_outliers: Outliers | None = None
    key_bias: float | None = None
    seed: int = 0
    input_outliers: Outliers | None = None
    one_dimension: bool = False


def stressed(llama: Llama, stress: Stress) -> Llama:
    """Return the model with the same dense outputs and a harder cache; untouched weights are shared
    with the given one.

    Computed in float32 and rounded to the model's dtype: powers of two are exact in every dtype,
    other factors and sqrt(2) are rounded (relative 2^-24 in float32, 2^-8 in bfloat16). Parameters
    of cache methods are dropped: they belong to other keys. Raises as `check`, and ValueError if
    a weight would leave the dtype's range.
    """
    check(llama.config, stress)
    config, layers = llama.config, range(llama.config.num_hidden_layers)
    given: Weights = {path: weight.leaf for path, weight in hf_names.weights(llama).items()}
    weights = dict(given)
    if stress.key_outliers is not None:
        for layer, factors in zip(
            layers, _key_factors(config, stress.key_outliers, stress.seed), strict=True
        ):
            if stress.one_dimension:
                _turn_pairs(weights, f"layers.{layer}", factors != 1, config)
            _scale_keys(weights, f"layers.{layer}", factors, config)
    if stress.value_outliers is not None:
        for layer, factors in zip(
            layers, _value_factors(config, stress.value_outliers, stress.seed), strict=True
        ):
            _scale_values(weights, f"layers.{layer}", factors, config)
    if stress.input_outliers is not None:
        for layer, factors in zip(
            layers, _input_factors(config, stress.input_outliers, stress.seed), strict=True
        ):
            _scale_inputs(weights, f"layers.{layer}", factors)
    if stress.key_bias is not None:
        for layer, constants in zip(
            layers, _constants(config, stress.key_bias, stress.seed), strict=True
        ):
            _widen(weights, f"layers.{layer}", constants, config)
        config = widened(config)
    _refuse_infinite({path: leaf for path, leaf in weights.items() if leaf is not given.get(path)})
    return hf_names.replace_weights(abstract_llama(config, llama.embed[...].dtype), weights)


def check(config: LlamaConfig, stress: Stress) -> None:
    """Raise ValueError, in one line, if the model cannot have what is asked for, or nothing is
    asked for."""
    if (
        stress.key_outliers
        is stress.value_outliers
        is stress.input_outliers
        is stress.key_bias
        is None
    ):
        raise ValueError(
            "nothing to do: ask for key outliers, value outliers, input outliers or a key bias"
        )
    pairs = config.head_dim // 2
    for name, outliers, maximum, places in (
        ("key", stress.key_outliers, pairs, "RoPE pairs of a head"),
        ("value", stress.value_outliers, config.head_dim, "channels of a head"),
        ("input", stress.input_outliers, config.hidden_size, "channels of a layer's input"),
    ):
        if outliers is not None and not 1 <= outliers.channels <= maximum:
            raise ValueError(
                f"{name} outliers in {outliers.channels} {places}: between 1 and {maximum} are"
                " possible"
            )
        if outliers is not None and not FACTORS[0] <= outliers.factor <= FACTORS[1]:
            minimum, largest = FACTORS
            raise ValueError(
                f"{name} outliers need a factor above 0, from {minimum:.1e} to {largest:.1e}, got"
                f" {outliers.factor}"
            )
    if stress.one_dimension and stress.key_outliers is None:
        raise ValueError("one dimension of which pairs? ask for key outliers too")
    if stress.one_dimension and stress.key_outliers is not None and stress.key_outliers.factor == 1:
        raise ValueError("one dimension of a pair needs key outliers with a factor other than 1")
    if stress.one_dimension and config.qk_norm:
        raise ValueError(
            f"model_type={config.model_type!r} weighs the two channels of a pair differently"
            " (QK-norm), so no pair can be turned"
        )
    if stress.seed < 0:
        raise ValueError(f"a seed must be at least 0, got {stress.seed}")
    if stress.key_bias is None:
        return
    if not 0 <= stress.key_bias <= MAX_BIAS:
        raise ValueError(
            f"a key bias must be at least 0 and a float32, at most {MAX_BIAS:.1e}, got"
            f" {stress.key_bias}"
        )
    if config.qk_norm:
        raise ValueError(
            f"model_type={config.model_type!r} normalizes its keys after their bias (QK-norm), so"
            " none can be large in the cache"
        )
    if not _turns_as_before(config):
        raise ValueError(
            f"the frequencies of rope_type={config.rope.rope_type!r} depend on the head's width"
            " here, and a key bias needs wider heads"
        )


def widened(config: LlamaConfig) -> LlamaConfig:
    """Return the config with heads of twice the width and a bias on keys: without one in its
    family, the model becomes a Llama with `attention_bias`."""
    wide = dataclasses.replace(config, head_dim=2 * config.head_dim)
    return (
        wide
        if config.qkv_bias
        else dataclasses.replace(wide, model_type="llama", qkv_bias=True, o_bias=True)
    )


def _turns_as_before(config: LlamaConfig) -> bool:
    """Return whether pair 2i of the wider heads has the frequency of pair i."""
    capacity = config.positions
    before, after = (
        np.asarray(rope_for(c, capacity).inverse_frequencies) for c in (config, widened(config))
    )
    return np.allclose(after[::2], before, rtol=1e-6, atol=0)


# --- what is drawn


def _key_factors(config: LlamaConfig, outliers: Outliers, seed: int) -> list[Factors]:
    """Draw the factors of each layer; both channels of a pair share a factor, and with QK-norm all
    heads."""
    rng, half = np.random.default_rng([seed, 0]), config.head_dim // 2
    heads = 1 if config.qk_norm else config.num_key_value_heads
    drawn = [_drawn(rng, heads, half, outliers) for _ in range(config.num_hidden_layers)]
    return [np.tile(factors, (config.num_key_value_heads // heads, 2)) for factors in drawn]


def _value_factors(config: LlamaConfig, outliers: Outliers, seed: int) -> list[Factors]:
    rng = np.random.default_rng([seed, 1])
    return [
        _drawn(rng, config.num_key_value_heads, config.head_dim, outliers)
        for _ in range(config.num_hidden_layers)
    ]


def _input_factors(config: LlamaConfig, outliers: Outliers, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng([seed, 3])
    return [
        _drawn(rng, 1, config.hidden_size, outliers)[0] for _ in range(config.num_hidden_layers)
    ]


def _drawn(rng: np.random.Generator, heads: int, width: int, outliers: Outliers) -> np.ndarray:
    """Draw [heads, width], the factor in as many places of each head as there are outliers, 1
    elsewhere."""
    factors = np.ones((heads, width), np.float32)
    for row in factors:
        row[rng.choice(width, outliers.channels, replace=False)] = outliers.factor
    return factors


def _constants(config: LlamaConfig, magnitude: float, seed: int) -> list[np.ndarray]:
    """Draw [K, 2H] for each layer: both channels of every new pair, with random signs."""
    rng, width = np.random.default_rng([seed, 2]), config.head_dim
    pairs = np.arange(1, width, 2)  # new pairs are the odd ones
    constants = np.zeros(
        (config.num_hidden_layers, config.num_key_value_heads, 2 * width), np.float32
    )
    for channels in (pairs, pairs + width):
        constants[:, :, channels] = magnitude * rng.choice(
            [-1.0, 1.0], (*constants.shape[:2], len(pairs))
        )
    return list(constants)


# --- what is changed


def _scale_keys(weights: Weights, layer: str, factors: Factors, config: LlamaConfig) -> None:
    if config.qk_norm:
        _multiply(weights, f"{layer}.k_norm.scale", factors[0])
        _multiply(weights, f"{layer}.q_norm.scale", 1 / factors[0])
        return
    for name in ("kernel", "bias"):
        _multiply(weights, f"{layer}.k_proj.{name}", factors.ravel())
        _multiply(weights, f"{layer}.q_proj.{name}", 1 / _for_queries(factors, config).ravel())


def _turn_pairs(weights: Weights, layer: str, chosen: np.ndarray, config: LlamaConfig) -> None:
    """Turn the chosen [K, H] pairs of keys and queries by one angle each, so that the larger axis
    of the keys is the first channel.

    The axes are those of the second moments that an input of independent channels of the norm's
    weights would give the keys.
    """
    kernel, norm = (
        np.asarray(weights[f"{layer}.{name}"], np.float64)
        for name in ("k_proj.kernel", "input_norm.scale")
    )
    bias = (
        np.asarray(weights[f"{layer}.k_proj.bias"], np.float64)[None]
        if f"{layer}.k_proj.bias" in weights
        else kernel[:0]
    )
    maps = np.concatenate([kernel * norm[:, None], bias]).reshape(-1, *chosen.shape)
    first, second = np.split(maps, 2, axis=-1)
    angles = (
        0.5
        * np.arctan2(2 * (first * second).sum(0), (first**2 - second**2).sum(0))
        * np.split(chosen, 2, axis=-1)[0]
    )  # [K, H/2]
    for name, by in (("k_proj", angles), ("q_proj", _for_queries(angles, config))):
        for path in (f"{layer}.{name}.kernel", f"{layer}.{name}.bias"):
            if path in weights:
                leaf = weights[path]
                one, other = np.split(
                    np.asarray(leaf, np.float64).reshape(*leaf.shape[:-1], by.shape[0], -1),
                    2,
                    axis=-1,
                )
                turned = np.concatenate(
                    [one * np.cos(by) + other * np.sin(by), other * np.cos(by) - one * np.sin(by)],
                    axis=-1,
                )
                weights[path] = jnp.asarray(turned.reshape(leaf.shape), leaf.dtype)


def _scale_inputs(weights: Weights, layer: str, factors: np.ndarray) -> None:
    _multiply(weights, f"{layer}.input_norm.scale", factors)
    for name in ("q_proj", "k_proj", "v_proj"):
        _multiply(weights, f"{layer}.{name}.kernel", 1 / factors[:, None])


def _scale_values(weights: Weights, layer: str, factors: Factors, config: LlamaConfig) -> None:
    for name in ("kernel", "bias"):
        _multiply(weights, f"{layer}.v_proj.{name}", factors.ravel())
    _multiply(weights, f"{layer}.o_proj.kernel", 1 / _for_queries(factors, config).reshape(-1, 1))


def _for_queries(factors: Factors, config: LlamaConfig) -> np.ndarray:
    """Repeat rows of KV heads for the query heads, [N, H]: query head n reads KV head n // G."""
    return np.repeat(factors, config.num_attention_heads // config.num_key_value_heads, axis=0)


def _refuse_infinite(changed: Weights) -> None:
    for path, leaf in changed.items():
        if not bool(jnp.isfinite(leaf).all()):
            raise ValueError(
                f"{path} is not finite in {leaf.dtype.name} after the change; ask for smaller"
                " factors or a smaller bias"
            )


def _multiply(weights: Weights, path: str, factors: np.ndarray) -> None:
    """Multiply weight and bias, broadcast against the last axes; a bias that the model does not
    have is left out."""
    if path in weights:
        leaf = weights[path]
        with np.errstate(over="ignore"):  # refused by name when all is done
            weights[path] = jnp.asarray(
                np.asarray(leaf, np.float32) * factors.astype(np.float32), leaf.dtype
            )


def _widen(weights: Weights, layer: str, constants: np.ndarray, config: LlamaConfig) -> None:
    """Put a zero channel after every channel of a head, then the constants into the keys' bias."""
    dtype, width = weights[f"{layer}.q_proj.kernel"].dtype, config.head_dim
    heads = {
        "q_proj": config.num_attention_heads,
        "k_proj": config.num_key_value_heads,
        "v_proj": config.num_key_value_heads,
    }
    for name, count in heads.items():
        for path in (f"{layer}.{name}.kernel", f"{layer}.{name}.bias"):
            old = np.asarray(
                weights[path] if path in weights else np.zeros(count * width), np.float64
            )  # biases may be new
            new = np.zeros((*old.shape[:-1], count, 2 * width))
            new[..., ::2] = old.reshape(*old.shape[:-1], count, width) * (
                math.sqrt(2) if name == "q_proj" else 1
            )
            new += constants if path.endswith("k_proj.bias") else 0
            with np.errstate(over="ignore"):
                weights[path] = jnp.asarray(new.reshape(*old.shape[:-1], -1), dtype)
    path = f"{layer}.o_proj.kernel"
    weights[path] = (
        jnp.zeros((2 * weights[path].shape[0], config.hidden_size), dtype)
        .at[::2]
        .set(weights[path])
    )
    if not config.qkv_bias:
        weights[f"{layer}.o_proj.bias"] = jnp.zeros(config.hidden_size, dtype)

"""Report what `kvq generate` did with one prompt: the facts, read from the cache after the run, and
the line that ends the output."""

from __future__ import annotations

from typing import Any

import kvq_jax as kvq
from kvq_jax.attention.dispatch import Implementation
from kvq_jax.cache.cache import Cache
from kvq_models.inference import decoding
from kvq_models.llama.config import LlamaConfig
from kvq_tools.cli import cache_sizes
from kvq_tools.cli.console import counted, format_bytes
from kvq_tools.cli.sampling_options import GREEDY
from kvq_tools.cli.timed import TimedGeneration

_END = {"ended": ", the last one the end token", "max-new-tokens": "", "stopped": ", stopped"}


def report(
    generation: TimedGeneration,
    cache: Cache,
    config: LlamaConfig,
    prompt: list[int],
    ids: list[int],
    implementation: Implementation,
) -> dict[str, Any]:
    """Return the facts about a run, from the cache after it and its new tokens `ids`."""
    stored, dense = kvq.size.nbytes(cache), kvq.size.dense_nbytes(config, 1, cache.capacity)
    dropped, kept = kvq.size.dropped_outliers(cache)
    read_by = decoding.implementations(cache, implementation)
    obstacles = [
        reason
        for reason, name in zip(decoding.obstacles(cache), read_by, strict=True)
        if name == "xla"
    ]
    return {
        "cache": str(cache.spec),
        "capacity": cache.capacity,
        "cache_bytes": stored,
        "bf16_bytes": dense,
        "ratio": dense / stored,
        "windows": cache_sizes.windows(cache.spec),
        "bits_per_element": kvq.size.bits_per_element(
            cache.spec, config, cache.capacity, cache.dtype
        ),
        "quantized_tokens": kvq.size.quantized_tokens(cache, int(cache.lengths[0])),
        "outliers": {"exact": kept, "without_slot": dropped},
        "prompt_tokens": len(prompt),
        "new_tokens": len(ids),
        "finish": _finish(generation, config, ids),
        "rows_dtype": cache.dtype,
        "prefill_seconds": generation.prefill_seconds,
        "decode_seconds": generation.decode_seconds,
        "compile_seconds": generation.compile_seconds,
        "tokens_per_second": len(ids) / generation.decode_seconds,
        "implementation": "+".join(sorted(set(read_by))),
        "xla_because": (
            None
            if implementation == "xla"
            else "; ".join(dict.fromkeys(filter(None, obstacles))) or None
        ),
        "skip_layers": list(cache.spec.skip_layers),
        "kv_scales": any(codec.learning.brought for plan in cache.plans for codec in plan.codecs),
    }


def _finish(generation: TimedGeneration, config: LlamaConfig, ids: list[int]) -> str:
    if ids[-1] in config.eos_token_ids:
        return "ended"
    return "max-new-tokens" if len(ids) == generation.max_new_tokens else "stopped"


def footer(facts: dict[str, Any], cache: str, weights: str) -> str:
    """Return the facts as one line. `cache` is the cache as the user typed it, `weights` how they
    are stored."""
    live, outliers = facts["prompt_tokens"] + facts["new_tokens"], facts["outliers"]
    sparse = (
        f"{outliers['exact']} outliers in full precision, {outliers['without_slot']} more had no"
        " slot; "
        if any(outliers.values())
        else ""
    )
    if facts["kv_scales"]:
        sparse += "scales of keys and values from the checkpoint; "
    split = f" on a mesh of {facts['mesh']}" if facts["mesh"] else ""
    drafted = (
        f" in {facts['steps']} steps with drafts of up to {facts['drafts']}"
        if facts["drafts"]
        else ""
    )
    because = f" (no kernel: {facts['xla_because']})" if facts["xla_because"] else ""
    return (
        f"[cache {cache}: {format_bytes(facts['cache_bytes'])} for {facts['capacity']}"
        f" tokens, bf16 {format_bytes(facts['bf16_bytes'])}, ratio {facts['ratio']:.2f},"
        f" {facts['bits_per_element']:.2f} bits per element; {facts['quantized_tokens']} of {live}"
        f" tokens quantized; {sparse}{_prompt(facts)} +"
        f" {counted(facts['new_tokens'], 'new tokens')}{drafted}{_END[facts['finish']]};"
        f" {_sampled(facts['sampling'])}; weights {weights}, full-precision rows"
        f" {facts['rows_dtype']}; prefill {facts['prefill_seconds']:.3f} s, decode"
        f" {facts['decode_seconds']:.3f} s, {facts['tokens_per_second']:.1f} tokens/s (compilation,"
        f" {facts['compile_seconds']:.1f} s, not counted); implementation"
        f" {facts['implementation']}{because}{split}; layers skipped:"
        f" {', '.join(map(str, facts['skip_layers'])) or 'none'}]"
    )


def _prompt(facts: dict[str, Any]) -> str:
    saved = facts["saved_tokens"]
    if not saved:
        return f"{facts['prompt_tokens']} prompt"
    return f"{saved} saved + {facts['prompt_tokens'] - saved} prompt"


def _sampled(sampling: dict[str, Any]) -> str:
    if not sampling["temperature"]:
        return "greedy"
    filters = [
        f"{name.replace('_', '-')} {sampling[name]:g}"
        for name in ("top_k", "top_p", "min_p")
        if sampling[name] != getattr(GREEDY, name)
    ]
    parts = [f"temperature {sampling['temperature']:g}", *filters, f"seed {sampling['seed']}"]
    return ", ".join(parts)

"""Quantized caches in the models of google-tunix, run by its own `Sampler`.

    model = with_cache(model, "kivi:bits=4")
    sampler = Sampler(model, tokenizer, CacheConfig(cache_size=4096, ...))

tunix pads prompts on the left and keeps a dict of one entry for each layer. Here an entry is a
`kvq.cache.LayerCache`. The sampler's attention mask says at which token a row begins and how long
the cache is. Greedy sampling, top-p and beam search work on these caches as on tunix' own.

tunix hides every token that has the padding's id from all others, and counts no position for it,
also inside a prompt and after it. Its tokenizers without a padding token, such as Llama 3's, pad
with the end of a turn, so this hides the turns' ends in a conversation. Caches here are causal and
take no mask: from a row's first other token on, such tokens are read, at tunix' positions.

A call with one token is a step, also if it is the whole prompt: a method with statistics of the
prompt then keeps its neutral ones.
"""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false
# the host need not be installed where types are checked

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3

import kvq_jax as kvq
from kvq_hosts.served import check_on_one_device, check_served, left_padded_lengths

Model = llama3.Llama3 | qwen2.Qwen2 | qwen3.Qwen3 | gemma3.Gemma3
QKV = tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]


def with_cache(model: Model, spec: kvq.cache.CacheSpec | str) -> Model:
    """Return a model with the same weights whose cache is quantized.

    Args:
        model: a Llama3, Qwen2, Qwen3 or Gemma3 of tunix.
        spec: the cache, or its text.

    Raises:
        NotImplementedError: for other models, weights on several devices, tunix' flash attention,
            and images.
        ValueError: if the spec does not fit the model, or its method needs parameters.
    """
    if type(model) not in MODELS:
        allowed = ", ".join(kind.__name__ for kind in MODELS)
        raise NotImplementedError(f"{type(model).__name__} has no adapter: {allowed} have one")
    if getattr(model.config, "use_flash_attention", False):
        raise NotImplementedError(
            "use_flash_attention=True reads tunix' own cache: set it to False for a quantized one"
        )
    if getattr(model.config, "vision_config", None) is not None:
        raise NotImplementedError("tokens of an image see later ones, which no cache here computes")
    check_on_one_device(nnx.state(model), "tunix")
    spec, config = kvq.parse(spec), model.config
    dims = kvq.CacheDims(
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.embed_dim,
    )
    model = nnx.clone(model)
    object.__setattr__(model, "__class__", MODELS[type(model)])
    for number, layer in enumerate(model.layers):
        layer.attn.kvq = _Layer(spec, dims, number, _attention(layer.attn))
        object.__setattr__(layer.attn, "__class__", ATTENTION[type(layer.attn)])
    check_served((layer.attn.kvq.plan(64, "float32") for layer in model.layers), "tunix")
    return model


@dataclasses.dataclass(frozen=True)
class _Layer:
    """The arguments of one layer's plan, kept until the sampler says how long a cache is."""

    spec: kvq.cache.CacheSpec
    dims: kvq.CacheDims
    number: int
    attention: kvq.Attention

    def plan(self, capacity: int, dtype: DTypeLike) -> kvq.cache.CachePlan:
        return kvq.layer_plan(
            self.spec,
            self.dims,
            layer=self.number,
            capacity=capacity,
            attention=self.attention,
            dtype=dtype,
        )


def _attention(attention: Any) -> kvq.Attention:
    """Return the attention of one of the host's layers: Gemma has windows and a scale."""
    if not isinstance(attention, gemma3.Attention):
        return kvq.Attention()
    local = attention.attn_type == gemma3.AttentionType.LOCAL_SLIDING
    window = attention.sliding_window_size if local else None
    return kvq.Attention(window, scale=float(attention.query_pre_attn_scalar))


def _init_cache(
    model: Any, batch_size: int, cache_size: int, dtype: DTypeLike
) -> dict[str, kvq.cache.LayerCache]:
    """Return the cache that the sampler asks a model for."""
    return {
        f"layer_{i}": layer.attn.kvq.plan(cache_size, dtype).init(batch_size)
        for i, layer in enumerate(model.layers)
    }


def _through_cache(
    attention: Any,
    qkv: QKV,
    cache: kvq.cache.LayerCache,
    mask: Bool[Array, "B T S"],
    project: Callable[[Float[Array, "B T N H"]], Float[Array, "B T D"]],
) -> tuple[kvq.cache.LayerCache, Float[Array, "B T D"]]:
    """Return the cache with new tokens, and the output of an attention layer."""
    tokens, dtype = mask.shape[1], cache.state.ring[0].dtype
    out, cache = attention.kvq.plan(mask.shape[2], dtype).attend(
        cache,
        *qkv,
        # the newest token of a prompt sees all whose id is not the padding's
        lengths=left_padded_lengths(mask[:, -1, :tokens]) if tokens > 1 else None,
        prefill=tokens > 1,
        padding="left",
    )
    return cache, project(out)


def _refuse_segments(segment_ids: Any) -> None:
    if segment_ids is not None:
        raise NotImplementedError("a cache has one sequence a row: leave segment_ids out")


class _Llama3Attention(llama3.Attention):
    def block(self, x: Array, segment_pos: Int[Array, "B T"], cache: Any, attn_mask: Any) -> Any:
        if cache is None:
            return super().block(x, segment_pos, cache, attn_mask)

        def rotated(rows: Array) -> Array:
            return llama3.apply_rope(rows, segment_pos, head_dim=self.head_dim)

        qkv = rotated(self.q_proj(x)), rotated(self.k_proj(x)), self.v_proj(x)
        return _through_cache(self, qkv, cache, attn_mask, self.o_proj)


class _Qwen3Attention(qwen3.Attention):
    def block(
        self,
        x: Array,
        segment_pos: Int[Array, "B T"],
        cache: Any,
        attn_mask: Any,
        segment_ids: Any = None,
    ) -> Any:
        if cache is None:
            return super().block(x, segment_pos, cache, attn_mask, segment_ids)
        _refuse_segments(segment_ids)

        def rotated(rows: Array) -> Array:
            return qwen3.apply_rope(rows, segment_pos, head_dim=self.head_dim)

        q, k = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x))
        return _through_cache(
            self, (rotated(q), rotated(k), self.v_proj(x)), cache, attn_mask, self.o_proj
        )


class _Qwen2Attention(qwen2.Attention):
    def block(
        self, x: Array, cache: Any, attn_mask: Any, sin: Any, cos: Any, segment_ids: Any = None
    ) -> Any:
        if cache is None:
            return super().block(x, cache, attn_mask, sin, cos, segment_ids)
        _refuse_segments(segment_ids)

        def biased(rows: Array, bias: nnx.Param) -> Array:
            return rows + bias[...].astype(rows.dtype).reshape(1, 1, *rows.shape[2:])

        def rotated(rows: Array) -> Array:
            return qwen2.apply_rotary_embedding(rows, sin, cos)

        qkv = (
            rotated(biased(self.q_proj(x), self.q_bias)),
            rotated(biased(self.k_proj(x), self.k_bias)),
            biased(self.v_proj(x), self.v_bias),
        )
        return _through_cache(self, qkv, cache, attn_mask, self.o_proj)


class _Gemma3Attention(gemma3.Attention):
    def block(self, x: Array, segment_pos: Int[Array, "B T"], cache: Any, attn_mask: Any) -> Any:
        if cache is None:
            return super().block(x, segment_pos, cache, attn_mask)

        def rotated(rows: Array) -> Array:
            return gemma3.apply_rope(
                rows,
                segment_pos,
                head_dim=self.head_dim,
                base_frequency=self.rope_base_frequency,
                scale_factor=self.rope_scale_factor,
            )

        if self.use_qkv_einsum:
            q, k, v = self.qkv_einsum(x)
        else:
            q, (k, v) = self.q_einsum(x), self.kv_einsum(x)
        qkv = rotated(self._query_norm(q)), rotated(self._key_norm(k)), v
        return _through_cache(self, qkv, cache, attn_mask, self.attn_vec_einsum)


class _Llama3(llama3.Llama3):
    init_cache = _init_cache


class _Qwen2(qwen2.Qwen2):
    init_cache = _init_cache


class _Qwen3(qwen3.Qwen3):
    init_cache = _init_cache


class _Gemma3(gemma3.Gemma3):
    init_cache = _init_cache


MODELS = {
    llama3.Llama3: _Llama3,
    qwen2.Qwen2: _Qwen2,
    qwen3.Qwen3: _Qwen3,
    gemma3.Gemma3: _Gemma3,
}
ATTENTION = {
    llama3.Attention: _Llama3Attention,
    qwen2.Attention: _Qwen2Attention,
    qwen3.Attention: _Qwen3Attention,
    gemma3.Attention: _Gemma3Attention,
}

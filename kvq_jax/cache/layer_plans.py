"""Keep the keys and values of one layer of any model in a quantized cache.

    plan = layer_plan("kivi:bits=4", dims, layer=i, capacity=4096)      # static
    cache = plan.init(batch)                                            # a pytree
    out, cache = plan.attend(cache, q, k, v, prefill=True)              # in place of attention

A layer's cache has its own lengths and knows of no other layer. So it fits wherever a model keeps a
layer's keys and values: in a dict, in a variable of a module, or stacked with others as the carry
of a `lax.scan` over layers. `begin`, `append_and_attend` and `finish` (step.py) do the same for all
layers of a model at once, through the same functions. `docs/own_model.md` has examples.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvq_jax.attention import reference
from kvq_jax.attention.dispatch import Implementation
from kvq_jax.cache import call_attention, call_layout, display, layer_step, row_operations
from kvq_jax.cache.cache import CacheDims, dims_of, plans, row_dtype
from kvq_jax.cache.dims import check_layer
from kvq_jax.cache.layer_cache import LayerCache
from kvq_jax.cache.spec import CacheSpec, parse
from kvq_jax.layer.attention import Attention
from kvq_jax.layer.plan import LayerPlan
from kvq_jax.placement.allowed import check_kind, check_rows
from kvq_jax.placement.placement import Placement
from kvq_jax.types.array_types import Integers, LayerInputs, ModelDims, PositionsBT, Tree
from kvq_jax.types.integers import positive
from kvq_jax.types.pytree import describe
from kvq_jax.types.rope import Rope


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """The static description of one layer's cache, with its functions. Made by `layer_plan`.
    Hashable. All functions are pure: a cache goes in, a cache comes out.

    Attributes:
        layer: codecs and regions.
        dims: the dimensions of the model.
        dtype: the name of the dtype of full-precision rows.
        placement: the placement on a mesh, or None for one device.
        spec: the text of the spec, and `number` the layer's number, for messages. Plans that
            differ in these alone are equal.
    """

    layer: LayerPlan
    dims: CacheDims
    dtype: str
    placement: Placement | None
    spec: str = dataclasses.field(compare=False)
    number: int = dataclasses.field(compare=False)

    def __repr__(self) -> str:
        facts = {
            "": self.spec,
            "layer": self.number,
            "of": f"{self.layer.regions.capacity} tokens",
            "in": self.dtype,
            "attention": self.layer.attention,
            "placement": self.placement,
        }
        return display.line("CachePlan", {n: f for n, f in facts.items() if f is not None})

    def init(self, batch: int) -> LayerCache:
        """Return an empty cache of B sequences."""
        batch = positive("batch", batch)
        check_rows(self.placement, batch)

        def empty() -> LayerCache:
            return LayerCache(self.layer.init(batch, self.dtype), jnp.zeros((batch,), jnp.int32))

        if self.placement is None:
            return empty()
        states = self.placement.shardings(self.layer.axes(batch, self.dtype))
        split = describe(LayerCache, state=states, lengths=self.placement.everywhere)
        return jax.jit(empty, out_shardings=split)()

    def positions(
        self,
        cache: LayerCache,
        tokens: int,
        lengths: Integers | None = None,
        padding: call_layout.Padding = "right",
    ) -> PositionsBT:
        """Return [B, T], the positions in their sequences of T new tokens, which RoPE takes. The
        positions of padding are unspecified, and not negative.

        Args:
            cache: the cache before the new tokens.
            tokens: T, padding included.
            lengths: [B] integers, the real tokens of each row. Default: all.
            padding: the side of the padding.
        """
        layer_step.check_kind(cache)
        where, _ = self._new(cache, tokens, lengths)
        shift = call_layout.left_padding(tokens, lengths, padding)
        if shift is None:
            return where
        # of all T tokens: padding on the left comes before the real ones
        consecutive, _ = self._new(cache, tokens, None)
        return jnp.maximum(consecutive - shift[:, None], 0)

    def attend(
        self,
        cache: LayerCache,
        q: call_layout.Rows,
        k: call_layout.Rows,
        v: call_layout.Rows,
        *,
        lengths: Integers | None = None,
        prefill: bool,
        layout: call_layout.Layout = "BTNH",
        padding: call_layout.Padding = "right",
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Float[Array, " N"] | None = None,
        lse: bool = False,
        parameters: Tree = (),
        implementation: Implementation = None,
        q_pre: call_layout.Rows | None = None,
        k_pre: call_layout.Rows | None = None,
        x: Float[Array, "B T D"] | None = None,
        residual: Float[Array, "B T D"] | None = None,
        rope: Rope | None = None,
    ) -> tuple[Any, ...]:
        """Add the keys and values of new tokens to the cache and return their attention.

            out[b, t, n] = softmax(scale q[b, t, n] . K) V

        over the cached tokens and the new ones up to t, with the window, soft cap and sinks of the
        plan (`kvq.Attention`). Query head n reads KV head n // (N // K).
        The attention is exact over the sink, the recent window and the other tokens of a prompt.
        Over the body it is the attention over the dequantized keys and values. Sums are accumulated
        in fp32. A token past the capacity is not stored, and its attention is NaN.

        Args:
            cache: the cache. It may be donated.
            q: queries after RoPE, [B, T, N, H], or [B, N, T, H] if `layout` says so.
            k: keys after RoPE, [B, T, K, H] or [B, K, T, H].
            v: values, as k.
            lengths: [B] integers, the real tokens of each row. Default: all. The rest is padding,
                and a row of length 0 does not change.
            prefill: static. True for prompts, whose tokens attend to each other in full precision
                and give the prompt statistics of rows that were empty. False for generated tokens,
                each of which sees the cache as if it had come alone.
            layout: the order of the axes of q, k, v, q_pre, k_pre and the result.
            padding: the side of the padding. Padding never enters the cache.
            scale: static. The factor of the scores. Default: the plan's, else 1 / sqrt(H).
            window: static. The tokens that a query sees, itself included. It must be the plan's,
                whose cache is sized for it, and is the plan's by default.
            soft_cap: static. The bound of the scores. Default: the plan's.
            sinks: [N], learned logits that take part in the softmax and have no value.
            lse: static. True to get the log-sum-exp too.
            parameters: the result of `kvq.parameters.prepare` for this layer, for methods that need
                any.
            implementation: static. "xla", "pallas" or "native". None uses kernels if they can run.
            q_pre: queries before RoPE, for methods that cache keys before RoPE.
            k_pre: keys before RoPE, for the same methods.
            x: [B, T, D], the input of the projections, for XQuant.
            residual: [B, T, D], the residual stream below x.
            rope: the model's rotation, for methods that read q_pre, k_pre or x.

        Returns:
            (out, cache): the attention, in the dtype, the shape and the layout of q, and the cache
            with the tokens added. `out` is finite and unspecified at padding, but may be NaN at the
            first token of a row of length 0 that is full. With lse=True, (out, lse, cache), with
            the logarithm of the sum that the softmax divides by, fp32 [B, T, N] or [B, N, T].

        Raises:
            ValueError: in one line, if a shape does not fit, the method needs an array that is
                missing (the message names it), or a named implementation cannot run.
        """
        layer_step.check_made(cache, self.layer, self.dtype)
        arrays = dict(q=q, k=k, v=v, q_pre=q_pre, k_pre=k_pre, x=x, residual=residual, sinks=sinks)
        inputs, shift = self._inputs(cache, arrays, rope, lengths, layout, padding)
        asked = call_attention.attending(
            self.layer,
            self.spec,
            self.number,
            self.dims,
            self.dtype,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
            lse=lse,
        )
        attending = dataclasses.replace(self, layer=asked)
        out, after = attending._run(cache, inputs, parameters, prefill, implementation)
        out = call_layout.unshifted(out, shift, axis=2)
        out = out if layout == "BNTH" else jnp.swapaxes(out, 1, 2)
        return (out[..., :-1].astype(q.dtype), out[..., -1], after) if lse else (out, after)

    def append(
        self,
        cache: LayerCache,
        k: call_layout.Rows,
        v: call_layout.Rows,
        *,
        q: call_layout.Rows | None = None,
        lengths: Integers | None = None,
        prefill: bool = True,
        layout: call_layout.Layout = "BTNH",
        padding: call_layout.Padding = "right",
        parameters: Tree = (),
        k_pre: call_layout.Rows | None = None,
        x: Float[Array, "B T D"] | None = None,
        residual: Float[Array, "B T D"] | None = None,
        rope: Rope | None = None,
    ) -> LayerCache:
        """Add the keys and values of new tokens to the cache, as `attend` does, and compute no
        attention: for models whose own flash attention reads the prompt. Arguments not named here
        are those of `attend`.

        Args:
            q: queries after RoPE, for methods that read them (SQuat, ZipCache).

        Raises:
            ValueError: as `attend`, and if the method reads queries and q is None.
        """
        layer_step.check_made(cache, self.layer, self.dtype)
        if q is None and parse(self.spec).reads_queries:
            raise ValueError(f"{self.spec!r} reads queries: give append q")
        if q is None:
            heads, tokens = self.dims.num_attention_heads, call_layout.tokens_of("k", k, layout)
            call_layout.check_floats("k", k)  # or the message would be about q
            shape = (len(k), tokens, heads) if layout == "BTNH" else (len(k), heads, tokens)
            q = jnp.zeros((*shape, self.dims.head_dim), k.dtype)
        arrays = dict(q=q, k=k, v=v, k_pre=k_pre, x=x, residual=residual)
        inputs, _ = self._inputs(cache, arrays, rope, lengths, layout, padding)
        return self._run(cache, inputs, parameters, prefill, None, attend=False)[1]

    def read(
        self,
        cache: LayerCache,
        *,
        layout: call_layout.Layout = "BTNH",
        parameters: Tree = (),
        rope: Rope | None = None,
    ) -> tuple[Float[Array, "B _ _ H"], Float[Array, "B _ _ H"]]:
        """Return keys after RoPE and values of all cached tokens, dequantized, for attention of
        your own with any mask. Slow: the whole layer is written out in fp32.

        Args:
            cache: the cache.
            layout: the order of the axes of the result.
            parameters: as in `attend`.
            rope: as in `attend`.

        Returns:
            (k, v), fp32 [B, S, K, H] or [B, K, S, H]. Token p of a row is at index p. Entries from
            the row's length on are unspecified: mask them. A layer with a window keeps the last
            window - 1 tokens of a row, which a new one sees, and perhaps more. Older ones that it
            no longer keeps are zeros: mask them too.

        Raises:
            ValueError: if the body is dealt out to the devices of a mesh, parameters are missing,
                or the layout is unknown.
        """
        layer_step.check_made(cache, self.layer, self.dtype)
        layer_step.check_cache_split(self.placement, cache.lengths, (cache.state,))
        call_layout.check_layout(layout)
        if self.layer.regions.shards > 1:
            raise ValueError(
                "read returns tokens in order, and this body is dealt out to the devices of a mesh:"
                " attend reads it there"
            )
        layer_step.check_parameters(
            self.spec, self.number, self.layer, parameters, "read(parameters=...)"
        )
        k, v = reference.decode_vectors(self.layer, parameters, cache.state, cache.lengths, rope)
        return (k, v) if layout == "BNTH" else (jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2))

    def trim(self, cache: LayerCache, lengths: Integers, parameters: Tree = ()) -> LayerCache:
        """Return the cache with every row shortened to at most lengths[b] tokens, as
        `kvq.rows.trim` does, for example to take back the rejected tokens of speculative decoding.

        Args:
            cache: the cache.
            lengths: [B] integers of at least 0, the most tokens that each row keeps. Traced lengths
                cannot be checked and are clamped.
            parameters: as in `attend`.

        Raises:
            ValueError: as `kvq.rows.trim`.
        """
        layer_step.check_made(cache, self.layer, self.dtype)
        layer_step.check_cache_split(self.placement, cache.lengths, (cache.state,))
        layer_step.check_parameters(
            self.spec, self.number, self.layer, parameters, "trim(parameters=...)"
        )
        return row_operations.trim_layer(
            self.layer, self.dims, self.dtype, self.placement, parameters, cache, lengths
        )

    def _new(self, cache: LayerCache, tokens: int, lengths: Integers | None) -> tuple[Any, Any]:
        return layer_step.new_tokens(
            cache.lengths, self.layer.regions.capacity, tokens, lengths, self.placement
        )

    def _inputs(
        self,
        cache: LayerCache,
        arrays: dict[str, Any],
        rope: Rope | None,
        lengths: Integers | None,
        layout: call_layout.Layout,
        padding: call_layout.Padding,
    ) -> tuple[LayerInputs, Int[Array, " B"] | None]:
        """Return the arrays of a call as the layer takes them, heads first and padded on the right,
        and the padding on the left that was removed."""
        tokens = call_layout.tokens_of("q", arrays["q"], layout)
        layer_step.check_shapes(self.dims, (cache.lengths.shape[0], tokens), arrays, layout)
        layer_step.check_cache_split(self.placement, cache.lengths, (cache.state,))
        layer_step.check_split(self.placement, arrays)
        positions, valid = self._new(cache, tokens, lengths)
        shift = call_layout.left_padding(tokens, lengths, padding)
        made: dict[str, Any] = dict.fromkeys(("x", "q_pre", "k_pre"))
        made |= {n: call_layout.turned(n, a, layout, shift) for n, a in arrays.items()}
        made |= {"q_rot": made.pop("q"), "k_rot": made.pop("k")}
        return LayerInputs(**made, positions=positions, valid=valid, rope=rope), shift

    def _run(
        self,
        cache: LayerCache,
        inputs: LayerInputs,
        parameters: Tree,
        prefill: bool,
        implementation: Implementation,
        attend: bool = True,
    ) -> tuple[Array, LayerCache]:
        taker = "attend(parameters=...)" if attend else "append(parameters=...)"
        layer_step.check_parameters(self.spec, self.number, self.layer, parameters, taker)
        out, state, _ = layer_step.run_layer(
            self.layer,
            self.dims,
            self.placement,
            parameters,
            cache.state,
            inputs,
            (),
            prefill=prefill,
            implementation=implementation,
            attend=attend,
        )
        return out, LayerCache(
            state, layer_step.counted(cache.lengths, inputs.valid, self.placement)
        )


def layer_plan(
    spec: CacheSpec | str,
    dims: ModelDims,
    *,
    layer: int,
    capacity: int,
    attention: Attention | None = None,
    dtype: DTypeLike | None = None,
    placement: Placement | None = None,
) -> CachePlan:
    """Return the plan of one layer's cache.

    Args:
        spec: the cache, or its text. Layers may have different ones.
        dims: the model's config, or its `CacheDims`.
        layer: the number of the layer, for methods and options that differ by layer.
        capacity: S, the tokens that each sequence has room for.
        attention: the window, scale, soft cap and sinks of the layer. Default: as `dims` say.
        dtype: the dtype of full-precision rows, as in `init_cache`. Give float32 for keys in
            float32: with `CacheDims`, the default rounds them to bfloat16.
        placement: the placement on a mesh, or None for one device.

    Raises:
        ValueError: as `init_cache`, if the model has no such layer, or the method builds each layer
            on the one below (XQuant-CL): `begin`, `append_and_attend` and `finish` serve it.
        NotImplementedError: as `init_cache`.
    """
    spec, sizes = parse(spec), dims_of(dims)
    capacity = positive("capacity", capacity)
    check_layer(layer, sizes)
    check_kind(placement)
    sizes = sizes if attention is None else sizes.attending(attention)
    name = row_dtype(dims, dtype)
    plan = plans(spec, sizes, capacity, name, placement)[layer]
    if plan.cross_layer is not None:
        raise ValueError(
            f"{str(spec)!r} builds layer {layer} on the one below, which a plan of one layer does"
            " not see: use kvq.begin, kvq.append_and_attend and kvq.finish"
        )
    return CachePlan(plan, sizes.at(layer), name, placement, str(spec), layer)

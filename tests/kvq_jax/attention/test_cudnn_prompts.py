"""Prompts through cuDNN's flash attention: what is lowered for a GPU, and that older tokens merge
with it exactly. cuDNN itself is not here: its definition stands for it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

import kvq_jax as kvq
from kvq_jax.attention import cudnn
from kvq_jax.attention.dispatch import CUDNN_PROMPTS, XLA
from kvq_jax.cache.update import prefill_layer
from kvq_jax.layer.attention import PLAIN, Attention
from tests.kvq_jax import layer_runs, windowed_runs
from tests.kvq_jax.layer_runs import ROUNDING, parameters_of, quick_jit, row_errors
from tests.methods_table import MethodCase, cases
from tests.pallas_kernels.lowering import lower_for_cuda

CALL = "__cudnn$fmhaSoftmax"
TOKENS = 48  # more than one chunk of queries
WINDOWED = Attention(window=windowed_runs.WINDOW, scale=0.3, sinks=True)


@pytest.fixture
def cudnn_is_there(monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)


class Definition:
    """Stands for cuDNN: attention by its definition, and its log-sum-exp."""

    def __init__(self, monkeypatch, rounded="float32"):
        self.rounded = rounded
        for name in ("causal_attention", "whole_attention"):
            monkeypatch.setattr(cudnn, name, getattr(self, name))

    def causal_attention(self, attention, q, keys, values):
        query, key = jnp.arange(q.shape[2])[:, None], jnp.arange(q.shape[2])[None]
        seen = key <= query
        if attention.window is not None:
            seen &= key > query - attention.window
        return self._attention(attention, q, keys, values, seen[None, None])

    def whole_attention(self, attention, q, keys, values, count):
        seen = jnp.arange(keys.shape[2])[None] < count[:, None]
        out, lse = self._attention(attention, q, keys, values, seen[:, None, None])
        return jnp.where(count[:, None, None, None] > 0, out, jnp.nan), lse

    def _attention(self, attention, q, keys, values, seen):
        group = q.shape[1] // keys.shape[1]
        keys, values = (jnp.repeat(a, group, axis=1).astype(jnp.float32) for a in (keys, values))
        scores = jnp.einsum("bnth,bnsh->bnts", q.astype(jnp.float32), keys)
        scores = jnp.where(seen, scores * attention.factor(q.shape[3]), -jnp.inf)
        lse = jax.nn.logsumexp(scores, axis=-1)
        out = jnp.einsum("bnts,bnsh->bnth", jnp.exp(scores - lse[..., None]), values)
        return out.astype(q.dtype), lse.astype(self.rounded).astype(jnp.float32)


def layer(attention=PLAIN, *, tokens=300, heads=4, head_dim=64, dtype="bfloat16"):
    """Return the state, the plan and the inputs of a prompt's layer."""
    dims = kvq.CacheDims(1, heads, 2, head_dim, heads * head_dim, attention=(attention,))
    ends = np.zeros(1, np.int32), np.full(1, tokens, np.int32)
    inputs = layer_runs.sequences(1, dims, tokens, dtype=dtype).window(*ends, tokens)
    cache = kvq.cache.layout("kivi:bits=4,recent=32,block=32", dims, 1, 512, dtype)
    return cache.layers[0], cache.plans[0], inputs


def lowered(attention=PLAIN, route=CUDNN_PROMPTS, **options):
    """Return the program of a prompt's layer for a GPU, its plan and its inputs."""
    state, plan, inputs = layer(attention, **options)

    def step(state, inputs):
        return prefill_layer(plan, (), state, inputs, (), route)

    return lower_for_cuda(step, state, inputs), plan, inputs


@pytest.mark.parametrize(
    ("attention", "options", "window", "calls"),
    # new tokens, sink and ring, and a chunk of the body; XLA reads old tokens through windows
    [(PLAIN, {}, 0, 3), (Attention(window=96), {"dtype": "float16", "heads": 2}, 96, 1)],
    ids=["plain", "window"],
)
def test_new_tokens_are_one_call_of_cudnn(cudnn_is_there, attention, options, window, calls):
    text, plan, inputs = lowered(attention, **options)
    assert cudnn.unsupported(plan, inputs) is None
    assert text.count(CALL) == calls
    call = next(line for line in text.splitlines() if CALL in line)
    assert '"CAUSAL' in call.replace("\\22", '"')
    assert f'"sliding_window_length": {window}' in call.replace("\\22", '"')
    assert call.count("f32>") == 1, "the log-sum-exp is fp32"
    assert CALL not in lowered(attention, XLA, **options)[0]


@pytest.mark.parametrize(
    ("reason", "attention", "options"),
    [
        ("256 tokens", PLAIN, {"tokens": 256}),
        ("soft caps", Attention(soft_cap=30.0), {}),
        ("float32", PLAIN, {"dtype": "float32"}),
        ("head dim", PLAIN, {"head_dim": 100}),
    ],
)
def test_xla_attends_to_what_cudnn_does_not_serve(cudnn_is_there, reason, attention, options):
    found = str(cudnn.unsupported(*layer(attention, **options)[1:]))
    assert reason in found
    assert "\n" not in found


def test_xla_attends_if_there_is_no_cudnn(monkeypatch):
    def missing():
        raise RuntimeError("cuDNN not found.")

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", missing)
    text, plan, inputs = lowered()
    assert cudnn.unsupported(plan, inputs) == "cuDNN not found."
    assert CALL not in text
    monkeypatch.delattr(fused_attention_stablehlo, "dot_product_attention")
    assert "dot_product_attention" in str(cudnn.unsupported(plan, inputs))


def two_prompts(layer, tokens, start, stop, width, route, jit=quick_jit):
    """Return the attention of a prompt up to `start`, and of one behind it up to `stop`."""
    step, (plan, state) = (
        jit(functools.partial(prefill_layer, route=route), static_argnums=0),
        layer,
    )
    outs = []
    for begin, end in ((np.zeros_like(start), start), (start, stop)):
        inputs = tokens.window(begin, end, width)
        out, state, _ = step(plan, parameters_of(plan), state, inputs, tokens.below(plan))
        out = np.asarray(out, np.float32)
        outs.append(np.where(np.asarray(inputs.valid)[:, None, :, None], out, 0))
    return outs


@cases("kivi2", "xquant_cl2", "xquant4", "polar44", usual=("kivi2",))
@pytest.mark.parametrize("attention", [PLAIN, WINDOWED], ids=["plain", "window"])
def test_older_tokens_merge_exactly(monkeypatch, case: MethodCase, attention):
    if attention is PLAIN:
        layer, tokens = layer_runs.empty(case.spec), layer_runs.sequences()
    elif case.id != "kivi2":
        return
    else:
        layer = windowed_runs.empty(case.spec, attention)
        tokens = windowed_runs.tokens_with_sinks()
    start = np.array([0, 5, 20, 40, 41, 30, 0, 40], np.int32)
    stop = np.array([48, 53, 68, 88, 81, 30, 1, 90], np.int32)
    run = functools.partial(two_prompts, layer, tokens, start, stop, TOKENS)
    Definition(monkeypatch)
    monkeypatch.setattr(cudnn, "DEQUANTIZED_ELEMENTS", 32 * 8 * 2 * 32)  # of 32 tokens
    wanted, outs = run(XLA), run(CUDNN_PROMPTS)
    for name, want, out in zip(("first", "second"), wanted, outs, strict=True):
        assert row_errors(out, want).max() < ROUNDING, f"the {name} prompt"
    if attention is WINDOWED:
        return
    Definition(monkeypatch, "bfloat16")
    assert row_errors(run(CUDNN_PROMPTS)[1], wanted[1]).max() > 100 * ROUNDING, "bf16 would pass"


@pytest.mark.gpu
@pytest.mark.parametrize("attention", [PLAIN, Attention(window=200)], ids=["plain", "window"])
def test_cudnn_attends_as_xla_does(attention):
    capacity, width = 640, 320
    dims = kvq.CacheDims(1, 4, 2, 64, 256, attention=(attention,))
    cache = kvq.init_cache("kivi:bits=4,sink=0,recent=32,block=32", dims, 3, capacity, "bfloat16")
    tokens = layer_runs.sequences(3, dims, capacity, dtype="bfloat16")
    layer, start = (cache.plans[0], cache.layers[0]), np.array([0, 100, 320], np.int32)
    stop = start + np.array([320, 257, 320], np.int32)
    assert cudnn.unsupported(layer[0], tokens.window(start, stop, width)) is None
    wanted, outs = (
        two_prompts(layer, tokens, start, stop, width, route, jax.jit)
        for route in (XLA, CUDNN_PROMPTS)
    )
    for name, want, out in zip(("first", "second"), wanted, outs, strict=True):
        assert row_errors(out, want).max() < 2e-2, f"the {name} prompt"
    assert row_errors(outs[1][1:], wanted[1][:-1]).max() > 0.1, "another row would pass"

"""Who reads the body in a decode step, and that a kernel reads the same as XLA."""

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.attention import dispatch, fused
from kvq_jax.attention.dispatch import CUDNN_PROMPTS, XLA, Route
from kvq_jax.cache.cache import CacheDims
from kvq_jax.cache.update import decode_layer, prefill_layer
from kvq_models import prefill as prefill_model
from pallas_kernels.launch import Launch
from tests.compile_options import QUICK_COMPILE
from tests.exhaustive import some
from tests.kvq_jax.layer_runs import parameters_of, row_errors, sequences
from tests.kvq_models.checkpoints import random_llama, tiny_config
from tests.pallas_kernels.lowering import lower_for_cuda

CAPACITY = 416
DIMS = CacheDims(
    num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=64, hidden_size=256
)
LENGTHS = np.array([1, 130, 131, 300, CAPACITY - 1], np.int32)
SPECS = (
    "dense:block=32",
    "kivi:bits=2",
    "kivi:bits=4,group_size=64",
    "innerq:bits=2",
    "innerq:bits=1,mode=sym",
    "k=innerq:bits=4+v=kivi:bits=8",
    "kivi:bits=4,pre_rope=true",
    "kvquant:bits=4,outliers=0.04",
    "kvquant:bits=3,outliers=0,qnorm=true",
    "kvquant:bits=2,pre_rope=false,k_axis=token,v_axis=channel",
    "nf4",
    "polarquant",
    "k=polarquant:radius_bits=2,group_size=64+v=kivi:bits=4",
    "k=nf2:group_size=32,pre_rope=true+v=int3",
    "waterfill:k_widths=65332210,v_widths=33222222,value_basis=rotation",
    "waterfill:k_widths=65332210,v_widths=44331111",
)
# Readers of which test_kernel_steps.py has none, and one of groups for CI's run of another JAX;
# tests/pallas_kernels reads the other formats.
USUAL = ("innerq:bits=2", "nf4", SPECS[-1])
INTERPRETED = Launch(interpret=True)
BY_KERNEL = Route("pallas", INTERPRETED)
ON_A_GPU = Route("pallas", Launch(), prompts="cudnn", only_on="cuda")
tokens = functools.partial(sequences, len(LENGTHS), DIMS, CAPACITY, dtype="bfloat16")

prefill = jax.jit(
    prefill_layer, static_argnums=0, static_argnames="route", compiler_options=QUICK_COMPILE
)
decode = jax.jit(
    decode_layer, static_argnums=0, static_argnames="route", compiler_options=QUICK_COMPILE
)


def plan_of(spec, dims=DIMS, capacity=CAPACITY, dtype="bfloat16"):
    return kvq.cache.layout(spec, dims, 1, capacity, dtype).plans[0]


@pytest.fixture
def without_native(monkeypatch):
    """Pretend that the C++ kernels were not compiled."""
    monkeypatch.setattr(dispatch, "unavailable", lambda: "not compiled")


def on_a_gpu(monkeypatch):
    monkeypatch.setattr(
        dispatch,
        "no_device",
        lambda kernels="pallas": None if kernels == "pallas" else "this is a GPU",
    )
    monkeypatch.setattr(dispatch, "_kernels_here", lambda: "pallas")


def test_arrays_on_the_cpu_of_a_process_with_a_gpu_are_read_by_xla(monkeypatch):
    """What nobody named follows the device that the program is compiled for, not the process's
    first one."""
    cache, new = (
        kvq.init_cache("kivi:bits=4", DIMS, 2, 160, "bfloat16"),
        tokens().rows([0, 1]).window(np.zeros(2, int), np.ones(2, int), 1),
    )

    def step(cache, implementation=None):
        taken = kvq.begin(cache, 1, prefill=False, implementation=implementation)
        out, taken = kvq.append_and_attend(taken, new.q_rot, new.k_rot, new.v)
        return out, kvq.finish(taken)

    wanted = jax.jit(functools.partial(step, implementation="xla"))(cache)
    on_a_gpu(monkeypatch)
    for one, other in zip(
        jax.tree.leaves(jax.jit(step)(cache)), jax.tree.leaves(wanted), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    assert "decode_attention" in lower_for_cuda(step, cache)
    with pytest.raises(ValueError, match="interpret"):
        jax.jit(functools.partial(step, implementation="pallas"))(cache)


@pytest.mark.parametrize("spec", some(SPECS, USUAL))
def test_a_kernel_decodes_as_xla_does(spec):
    cache = kvq.init_cache(spec, DIMS, len(LENGTHS), CAPACITY, "bfloat16")
    plan, state = cache.plans[0], cache.layers[0]
    _, state, _ = prefill(
        plan,
        parameters_of(plan),
        state,
        tokens().window(np.zeros_like(LENGTHS), LENGTHS, CAPACITY),
        (),
    )
    new = tokens().window(LENGTHS, LENGTHS + 1, 1)
    wanted, same, _ = decode(plan, parameters_of(plan), state, new, (), route=XLA)
    found, after, _ = decode(plan, parameters_of(plan), state, new, (), route=BY_KERNEL)
    assert row_errors(found, wanted).max() < 1e-2, (
        f"errors by row {row_errors(found, wanted).max(axis=(1, 2))}"
    )
    assert row_errors(found[1:], wanted[:-1]).max() > 0.1, "another row's output would pass"
    for one, other in zip(jax.tree.leaves(same), jax.tree.leaves(after), strict=True):
        assert np.count_nonzero(np.asarray(one) != np.asarray(other)) <= 1e-3 * one.size, (
            "the states differ"
        )


@pytest.mark.parametrize(
    "spec",
    some(
        ("kivi:bits=4,group_size=64", "innerq:bits=2", "innerq:bits=2,mode=hybrid_prefill"),
        ("kivi:bits=4,group_size=64", "innerq:bits=2,mode=hybrid_prefill"),
    ),
)
def test_a_kernel_quantizes_prompts_as_xla_does(spec):
    cache = kvq.init_cache(spec, DIMS, len(LENGTHS), CAPACITY, "bfloat16")
    plan, prompt = cache.plans[0], tokens().window(np.zeros_like(LENGTHS), LENGTHS, CAPACITY)
    states = {
        route: prefill(plan, parameters_of(plan), cache.layers[0], prompt, (), route=route)[1]
        for route in (XLA, BY_KERNEL)
    }
    bodies = [jax.tree.leaves(state.body) for state in states.values()]
    for one, other in zip(*bodies, strict=True):
        assert np.mean(np.asarray(one) != np.asarray(other)) < 1e-3, (
            f"{spec}: {one.dtype}{one.shape} differs"
        )
        assert np.mean(np.asarray(one[:-1]) != np.asarray(other[1:])) > 0.1, (
            "another row's body would pass"
        )


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("kivi:bits=2,group_size=16", "blocks of 16 tokens"),
        ("innerq:bits=8", "9-bit codes"),
        ("innerq:storage=slot", "k: storage=slot keeps signs and zero points in one word"),
        (
            "k=dense+v=innerq:group_size=96+cache:block=96",
            "v: groups of 96 tokens; kernels serve 32, 64, 128",
        ),
        ("k=kivi:group_size=256+v=kivi+cache:recent=32,block=256", "groups of 256 tokens"),
        ("kivi:scale_dtype=float32", "k: scales in float32; kernels compute with float16"),
        ("k=dense+v=int4:scale_dtype=bfloat16", "v: scales in bfloat16"),
        ("polarquant:radius_bits=3", "k: 7 bits for a pair at head_dim 64; kernels serve 4, 6, 8"),
        ("polarquant:grid=global", "k: one step of the radii for a whole sequence"),
        ("kivi:recent=400", "fewer than one tile of 32"),
        (
            "waterfill:k_widths=4333222222111100",
            "k: a run of 4 channels of 4 bits; kernels read runs of a multiple of 8",
        ),
        (
            "waterfill:k_widths=4320,v_widths=3222,block=16",
            "k: blocks that are not a multiple of 32 tokens",
        ),
        (
            "waterfill:k_widths=4320,v_widths=3222,recent=192",
            "the body holds 192 tokens, fewer than one tile of 256",
        ),
        (
            "k=waterfill:k_widths=4320+v=int4",
            "runs of channels of several widths on one side alone",
        ),
    ],
)
def test_what_kernels_do_not_serve_has_a_reason(monkeypatch, spec, reason):
    plan = plan_of(spec)
    found = dispatch.unsupported(plan, 4, 1)
    assert re.search(reason, str(found)), found
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert dispatch.choose(None, plan, 4, 1) == XLA
    with pytest.raises(ValueError, match=reason):
        dispatch.choose(INTERPRETED, plan, 4, 1)
    monkeypatch.setattr(dispatch, "no_device", lambda *_: None)
    with pytest.raises(ValueError, match=reason):
        dispatch.choose("pallas", plan, 4, 1)


def test_shapes_that_kernels_do_not_serve_have_a_reason():
    plan = plan_of("kivi")
    assert dispatch.unsupported(plan, 4, 1) is None
    assert "2 new tokens" in str(dispatch.unsupported(plan, 4, 2))
    assert "32 query heads" in str(dispatch.unsupported(plan, 64, 1))
    assert "head_dim 80" in str(
        dispatch.unsupported(plan_of("kivi", CacheDims(1, 4, 2, 80, 320)), 4, 1)
    )
    assert "full-precision rows in float32" in str(
        dispatch.unsupported(plan_of("dense", dtype="float32"), 4, 1)
    )
    wide = CacheDims(1, 16, 1, 256, 4096)
    assert "16 query heads for each KV head; kernels take up to 8 at head dim 256" in str(
        dispatch.unsupported(plan_of("kivi", wide), 16, 1)
    )
    assert dispatch.unsupported(plan_of("kivi", wide), 8, 1) is None
    runs = plan_of("waterfill:k_widths=4320,v_widths=3222")
    assert dispatch.unsupported(runs, 4, 1) is None
    of_256 = plan_of("waterfill:k_widths=43322110,v_widths=43322110", CacheDims(1, 4, 2, 256, 1024))
    assert "runs of channels at head_dim 256" in str(dispatch.unsupported(of_256, 4, 1))
    split = dataclasses.replace(
        runs, regions=dataclasses.replace(runs.regions, shards=2, axis="tokens")
    )
    assert "a body that is dealt out to shards" in str(dispatch.unsupported(split, 4, 1))


@pytest.mark.parametrize(
    ("backend", "capability", "reason"),
    [
        ("gpu", "8.0", None),
        ("gpu", "12.0", None),
        ("gpu", "7.5", "capability 8.0 or later, this is NVIDIA GPU \\(7.5\\)"),
        ("gpu", "gfx942", "NVIDIA GPU of compute capability .* \\(gfx942\\)"),
        ("cpu", "9.0", "this process runs on cpu"),
        ("tpu", None, "this process runs on tpu"),
    ],
)
def test_devices_that_run_no_kernels_have_a_reason(monkeypatch, backend, capability, reason):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    device = types.SimpleNamespace(
        device_kind="NVIDIA GPU",
        **({} if capability is None else {"compute_capability": capability}),
    )
    monkeypatch.setattr(jax, "devices", lambda: [device])
    if reason is None:
        assert dispatch.no_device() is None
        assert dispatch.choose(None, plan_of("kivi"), 4, 1) == ON_A_GPU
        return
    assert re.search(reason, str(dispatch.no_device()))
    monkeypatch.setattr(dispatch, "unavailable", lambda: "not compiled")
    assert dispatch.choose(None, plan_of("kivi"), 4, 1) == XLA
    with pytest.raises(ValueError, match=reason):
        dispatch.choose("pallas", plan_of("kivi"), 4, 1)


@pytest.mark.parametrize(("version", "refused"), [((0, 10, 2), False), ((0, 11, 0), True)])
def test_a_virtual_gpu_is_refused_by_name_if_pallas_does_not_know_it(monkeypatch, version, refused):
    device = types.SimpleNamespace(device_kind="GRID A100-10C", compute_capability="8.0")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(jax, "__version_info__", version)
    assert ("this is GRID A100-10C" in str(dispatch.no_device())) is refused


@pytest.mark.usefixtures("types_unchecked", "without_native")
def test_without_a_gpu_xla_is_chosen_and_kernels_by_name_are_refused():
    if jax.default_backend() == "gpu":
        pytest.skip("this process has a GPU")
    plan = plan_of("kivi")
    assert dispatch.choose(None, plan, 4, 1) == XLA
    assert dispatch.choose("xla", plan, 4, 1) == XLA
    assert dispatch.choose(INTERPRETED, plan, 4, 1) == BY_KERNEL
    with pytest.raises(
        ValueError,
        match="implementation='pallas' cannot run: kernels need a GPU, this process runs on cpu",
    ):
        dispatch.choose("pallas", plan_of("kivi:recent=400"), 4, 1)  # the GPU is missing first
    with pytest.raises(ValueError, match="choose 'xla', 'pallas' or 'native'"):
        dispatch.choose("triton", plan, 4, 1)  # type: ignore[arg-type]


def test_with_a_gpu_kernels_are_chosen_where_they_can_run(monkeypatch):
    on_a_gpu(monkeypatch)
    assert dispatch.choose(None, plan_of("kivi"), 4, 1) == ON_A_GPU
    assert dispatch.choose("pallas", plan_of("kivi"), 4, 1) == Route(
        "pallas", Launch(), prompts="cudnn"
    )
    assert dispatch.choose("xla", plan_of("kivi"), 4, 1) == XLA
    assert dispatch.choose(None, plan_of("innerq:bits=8"), 4, 1) == CUDNN_PROMPTS


def test_xla_by_name_launches_no_kernel_for_prompts_either(monkeypatch):
    on_a_gpu(monkeypatch)
    launched = []
    monkeypatch.setattr(
        fused, "quantize_rows", lambda *args, **kwargs: launched.append(args) or 1 / 0
    )
    llama = random_llama(
        tiny_config(hidden_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=64),
        dtype=jnp.bfloat16,
    )
    prompt = np.ones((1, 200), int)
    _, cache = prefill_model(
        llama,
        kvq.init_cache("kivi", llama.config, 1, 256, "bfloat16"),
        prompt,
        implementation="xla",
    )
    assert not launched
    assert int(cache.lengths[0]) == 200
    with pytest.raises(ZeroDivisionError):
        prefill_model(llama, kvq.init_cache("kivi", llama.config, 1, 256, "bfloat16"), prompt)
    assert launched, "the check above sees nothing"


@pytest.mark.usefixtures("types_unchecked")
def test_launches_say_what_they_cannot_do():
    with pytest.raises(ValueError, match="needs a GPU"):
        Launch("asm", interpret=True)
    with pytest.raises(ValueError, match="choose 'jnp' or 'asm'"):
        Launch("cuda")  # type: ignore[arg-type]

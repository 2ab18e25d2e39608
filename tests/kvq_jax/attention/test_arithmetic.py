"""Kernels run in assembly where its self-test has passed on this kind of device, and the verdict is
kept."""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import kvq_jax as kvq
from kvq_jax.attention import arithmetic, dispatch
from kvq_jax.files.user_cache import cache_folder
from kvq_jax.layer.attention import Attention
from pallas_kernels.launch import Launch
from pallas_kernels.mosaic import route
from tests.kvq_jax.attention.test_dispatch import DIMS, plan_of

HEADS = DIMS.num_attention_heads


@dataclasses.dataclass(frozen=True)
class Device:
    """What is asked of a device."""

    device_kind: str
    platform: str = "gpu"
    compute_capability: str = "9.0"


GPU = Device("NVIDIA H200")


class Answering:
    """Stands for the self-test: answers, and counts what it is asked."""

    def __init__(self, answer: str | None):
        self.answer, self.asked = answer, list[str]()

    def __call__(self, format: Any, device: Any) -> str | None:
        self.asked.append(f"{format}")
        return self.answer


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_CACHE", str(tmp_path / "kvq"))


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this process has a GPU."""
    monkeypatch.setattr(jax, "local_devices", lambda **_: [GPU])
    monkeypatch.setattr(dispatch, "no_device", lambda kernels="pallas": None)
    monkeypatch.setattr(dispatch, "_kernels_here", lambda: "pallas")


def answering(monkeypatch: pytest.MonkeyPatch, answer: str | None) -> Answering:
    test = Answering(answer)
    monkeypatch.setattr(arithmetic, "verdict", functools.partial(arithmetic.verdict, test=test))
    return test


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize(("answer", "wanted"), [(None, "asm"), ("attention differs", "jnp")])
def test_assembly_runs_where_its_test_passes_and_only_there(monkeypatch, answer, wanted):
    answering(monkeypatch, answer)
    for implementation in (None, "pallas"):
        route = dispatch.choose(implementation, plan_of("kivi:bits=4"), HEADS, 1)
        assert route.launch is not None
        assert route.launch.arithmetic == wanted


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize("answer", ["attention differs", None])
def test_without_triton_a_gpu_that_fails_mosaics_test_runs_xla(monkeypatch, answer):
    answering(monkeypatch, answer)
    monkeypatch.setattr(dispatch, "no_triton", lambda: "no Triton")
    monkeypatch.setattr(route, "missing", lambda: None)
    plan = plan_of("kivi:bits=4")
    chosen = dispatch.choose(None, plan, HEADS, 1)
    if answer is None:
        assert chosen.launch is not None
        assert chosen.launch.route == "mosaic"
        return
    assert chosen == dispatch.CUDNN_PROMPTS
    with pytest.raises(
        ValueError, match=r"no Triton\. .* does not read it on this GPU: its self-test"
    ):
        dispatch.choose("pallas", plan, HEADS, 1)


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize(
    ("answer", "launch"),
    [("attention differs", None), (None, Launch("jnp", route="mosaic"))],
    ids=["differs", "passes"],
)
def test_what_mosaic_alone_reads_runs_xla_if_it_fails_its_test(monkeypatch, answer, launch):
    answering(monkeypatch, answer)
    monkeypatch.setattr(route, "missing", lambda: None)
    plan = kvq.cache.layout("waterfill:key_basis=eigen", DIMS, 1, 512, "bfloat16").plans[0]
    assert dispatch.choose(None, plan, HEADS, 1).launch == launch


def test_a_verdict_is_kept_for_its_device_and_format_alone():
    kivi, innerq = (
        arithmetic.format_of(plan_of(spec), HEADS) for spec in ("kivi:bits=4", "innerq:bits=2")
    )
    other = Device("NVIDIA A100")
    first = arithmetic.verdict(kivi, GPU, Answering("attention differs"))
    later = Answering(None)  # another process: nothing in memory, but the same folder
    assert arithmetic.verdict(kivi, GPU, later) == first
    assert not later.asked
    assert arithmetic.verdict(innerq, GPU, later).difference is None
    assert arithmetic.verdict(kivi, other, later).difference is None
    assert len(later.asked) == 2
    assert len(list((cache_folder() / "kernels").glob("*.json"))) == 3


def test_a_file_that_cannot_be_read_is_tested_again():
    format = arithmetic.format_of(plan_of("kivi:bits=4"), HEADS)
    arithmetic.verdict(format, GPU, Answering("attention differs"))
    [file] = (cache_folder() / "kernels").glob("*.json")
    file.write_text('{"device": "NVIDIA')
    assert arithmetic.verdict(format, GPU, Answering(None)).difference is None


def test_a_test_that_cannot_run_is_not_kept():
    """A full memory says nothing about assembly: the next process asks again."""

    def stopped(format: Any, device: Any) -> str | None:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating 1 GiB")

    format = arithmetic.format_of(plan_of("kivi:bits=4"), HEADS)
    reason = arithmetic.verdict(format, GPU, stopped).difference
    assert reason == "it cannot run: RuntimeError: RESOURCE_EXHAUSTED: Out of memory"
    assert not list((cache_folder() / "kernels").glob("*.json"))
    assert arithmetic.verdict(format, GPU, Answering(None)).difference is None


def test_changed_kernels_are_tested_again(monkeypatch):
    format = arithmetic.format_of(plan_of("kivi:bits=4"), HEADS)
    arithmetic.verdict(format, GPU, Answering(None))
    monkeypatch.setattr(arithmetic, "_sources", lambda: "other code")
    assert (
        arithmetic.verdict(format, GPU, Answering("attention differs")).difference
        == "attention differs"
    )


def test_the_test_computes_while_a_step_is_traced():
    """The choice is made inside of jit, where an array would be a tracer."""
    seen: list[float] = []

    def test(format: Any, device: Any) -> str | None:
        seen.append(float(jnp.sum(jnp.ones(3))))
        return None

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        arithmetic.verdict(arithmetic.format_of(plan_of("kivi:bits=4"), HEADS), GPU, test)
        return x

    step(jnp.ones(2))
    assert seen == [3.0]


def test_without_a_gpu_nothing_is_tested(monkeypatch):
    test = answering(monkeypatch, None)
    assert arithmetic.arithmetic_of(plan_of("kivi:bits=4"), HEADS) == "jnp"
    assert dispatch.arithmetic_here([plan_of("kivi:bits=4")], HEADS).startswith(
        "not tested: kernels need a GPU"
    )
    assert not test.asked


@pytest.mark.usefixtures("with_gpu")
def test_the_doctor_says_what_was_found(monkeypatch):
    plans = kvq.cache.layout("kivi:bits=4,skip_layers=0", DIMS, 1, 416, "bfloat16").plans
    answering(monkeypatch, None)
    assert (
        dispatch.arithmetic_here(plans, HEADS)
        == f"assembly: its self-test passed on NVIDIA H200 with JAX {jax.__version__}"
    )
    plans = [plan_of("innerq:bits=2")]
    answering(monkeypatch, "attention differs by 1.0e+00")
    said = dispatch.arithmetic_here(plans, HEADS)
    assert (
        said
        == "array operations where assembly fails its self-test on NVIDIA H200: attention differs"
        " by 1.0e+00"
    )


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize(
    ("missing", "answer", "spec", "wanted"),
    [
        (None, None, "kivi:bits=4", "mosaic: its self-test passed with JAX "),
        (
            None,
            "attention differs",
            "kivi:bits=4",
            "triton: its self-test fails: attention differs",
        ),
        ("no Mosaic GPU", None, "kivi:bits=4", "triton: no Mosaic GPU"),
        (
            None,
            None,
            "polarquant:angle_bits=2,radius_bits=2",
            "triton: k: angles of 2 bits, fewer than 4",
        ),
    ],
)
def test_mosaic_reads_where_it_serves_and_passes(monkeypatch, missing, answer, spec, wanted):
    monkeypatch.setattr(route, "missing", lambda: missing)
    asked = answering(monkeypatch, answer)
    plan = plan_of(spec)
    chosen = dispatch.choose("pallas", plan, HEADS, 1).launch
    assert chosen is not None
    assert chosen.route == wanted.partition(":")[0]
    assert dispatch.route_here([plan], HEADS).startswith(wanted)
    tested = any("route='mosaic'" in format for format in asked.asked)
    assert tested == (not missing and spec == "kivi:bits=4"), (
        "a test that cannot decide takes seconds"
    )


@pytest.mark.usefixtures("with_gpu")
def test_a_route_has_a_verdict_of_its_own():
    plan = plan_of("kivi:bits=4")
    triton, mosaic = (arithmetic.format_of(plan, HEADS, name) for name in ("triton", "mosaic"))
    assert arithmetic.verdict(mosaic, GPU, Answering("attention differs")).difference
    assert arithmetic.verdict(triton, GPU, Answering(None)).difference is None


@pytest.mark.usefixtures("with_gpu")
def test_a_layer_with_a_window_has_a_verdict_of_its_own(monkeypatch):
    monkeypatch.setattr(route, "missing", lambda: None)
    asked = answering(monkeypatch, None)
    dims = dataclasses.replace(DIMS, attention=(Attention(window=150, soft_cap=50.0),))
    plan = plan_of("kivi:bits=4", dims)
    assert dispatch.route_here([plan], HEADS).startswith("mosaic: its self-test passed")
    [format] = asked.asked
    assert "windowed=True, soft_cap=50.0" in format

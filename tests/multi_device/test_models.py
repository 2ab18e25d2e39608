"""A whole model and its cache on a mesh: the tokens of one device, whatever kind of mesh is in
context."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.peak_rates import DEVICES
from kvq_jax.placement.allowed import parse
from kvq_models import (
    decode_step,
    forward,
    generate,
    generate_stream,
    load_llama,
    prefill,
    prepare,
    save_llama,
)
from kvq_models.llama.hf_directory import HfDirectory
from kvq_models.llama.hf_names import weights
from kvq_models.llama.model import Llama
from kvq_models.llama.sharding import embedded, shard_llama
from kvq_tools.cli.memory_mesh import collectives as collectives_of_a_step
from kvq_tools.cli.memory_mesh import share
from tests.compile_options import QUICK_FLAGS
from tests.kvq_models.checkpoints import random_llama, tiny_config
from tests.multi_device.placed_runs import bytes_on, collectives, differing, standing
from tests.multi_device.tiny_model import (
    CAPACITY,
    CONFIG,
    SPEC,
    TOKENS,
    cache_of,
    model,
    text_of_one_device,
)


def check_text(llama: Llama, placement: kvq.Placement, tokens: Any, expected: np.ndarray) -> None:
    """Check that a model on a mesh writes what one device writes, at once and as a stream."""
    for write in (generate, lambda *given, **settings: [*generate_stream(*given, **settings)][-1]):
        cache = kvq.init_cache(SPEC, CONFIG, 2, CAPACITY, "float32", placement=placement)
        assert np.array_equal(write(llama, cache, tokens, max_new_tokens=20).tokens, expected)
    assert len(np.unique(expected)) > 4, "one token over and over"


def two_parts(llama: Llama, cache: kvq.cache.Cache, tokens: Any) -> np.ndarray:
    """Return the logits [2, B, V] after each part of a prompt that is given in two; the second
    reads the first as it was quantized."""
    first, cache = prefill(llama, cache, tokens)
    second, cache = prefill(llama, cache, tokens)
    return np.stack([first, second])


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_a_mesh_in_context_changes_nothing(kind: str):
    """`jax.make_mesh` makes axes of type Explicit, for which JAX asks a sharding of every
    product."""
    types = (getattr(jax.sharding.AxisType, kind),) * 2
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=types)
    llama, placement = shard_llama(model(), mesh), kvq.Placement(mesh, heads="x", tokens="y")
    tokens = jax.device_put(TOKENS, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    # before the mesh is in context
    expected, written = two_parts(model(), cache_of(), TOKENS), text_of_one_device()
    with jax.set_mesh(mesh):
        if kind == "Explicit":
            check_text(llama, placement, tokens, written)
        cache = kvq.init_cache(SPEC, CONFIG, 2, CAPACITY, "float32", placement=placement)
        logits = two_parts(llama, cache, tokens)
    for part, wanted in zip(logits, expected, strict=True):
        assert np.abs(part - wanted).max() < 1e-4 < np.abs(part[::-1] - wanted).max()


def test_rows_apart_are_the_rows_alone():
    step = jax.jit(decode_step)
    logits, both = prefill(model("rows=2"), cache_of("rows=2"), TOKENS)
    token = np.array([5, 9])
    after, both = step(model("rows=2"), both, token)
    for row in range(2):
        first, alone = prefill(model(), cache_of(batch=1), TOKENS[row : row + 1])
        then, alone = step(model(), alone, token[row : row + 1])
        assert np.array_equal(first[0], logits[row])
        assert np.array_equal(then[0], after[row])
        assert not differing(alone, kvq.rows.select(kvq.rows.move(both, None), [row]))
    assert not np.array_equal(after[0], after[1])


@pytest.mark.parametrize(
    ("mesh", "number"), [("heads=2,tokens=4", 1 + 2 + 2 + 1), ("tokens=3", 1 + 2 + 1)]
)
def test_the_plan_of_memory_counts_the_collectives_of_a_step(mesh: str, number: int):
    """Two KV heads on eight devices: weights are split within heads, and gathered by one collective
    or two. On three devices, attention's weights are whole."""
    assert collectives_of_a_step(CONFIG, "float32", parse(mesh)) == number
    cache = kvq.cache.layout(SPEC, CONFIG, 2, CAPACITY, "float32", parse(mesh))
    step = jax.jit(decode_step, donate_argnames="cache")
    found = collectives(step.lower(model(mesh), cache, np.zeros(2, np.int32)).compile())
    assert len(found) == number
    assert max(found)[0] <= 2 * CONFIG.num_attention_heads * (CONFIG.head_dim + 1) * 4


def test_a_callers_own_step_is_compiled_once(caplog: pytest.LogCaptureFixture):
    """Also if a cache has arrays without entries, which XLA returns on every device."""
    mesh, step = "heads=2,tokens=4", jax.jit(decode_step, donate_argnames="cache")
    cache = cache_of(mesh, "kivi:recent=8,block=16")
    assert not cache.layers[0].sink[0].size
    token = jnp.zeros(2, jnp.int32)
    with jax.log_compiles():
        for _ in range(3):
            _, cache = step(model(mesh), cache, token)
    assert caplog.text.count("Finished XLA compilation of jit(decode_step)") == 1


def test_a_single_token_is_looked_up_without_gathering_the_embedding():
    placed, placement = model("heads=2,tokens=4"), parse("heads=2,tokens=4")
    lookup = jax.jit(lambda llama, tokens: embedded(llama, tokens, placement))
    for token in (0, 50, 95, -1, 96):
        expected = np.asarray(model().embed_tokens(jnp.array([[token]])))
        assert np.array_equal(lookup(placed, jnp.array([[token]])), expected, equal_nan=True), token
        assert np.isnan(expected).all() == (token in (-1, 96))
    found = collectives(lookup.lower(placed, jnp.array([[0]])).compile())
    assert max(found) == (CONFIG.hidden_size * 4, "all-reduce")


def test_methods_that_rebuild_keys_have_their_weights_everywhere():
    spec = "xquant:sink=2,recent=3,block=16"
    placed, one = (prepare(model(mesh), spec).cache_parameters for mesh in ("tokens=4", ""))
    assert not differing(one, placed, tolerance=1e-5)
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(placed))


def test_a_checkpoint_is_read_part_by_part(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    save_llama(model(), tmp_path / "model")
    read: dict[str, list[tuple[int, ...]]] = {}
    parts = HfDirectory.parts

    def counted(self: HfDirectory, name: str) -> Any:
        def one(index: tuple[slice, ...]) -> np.ndarray:
            found = parts(self, name)(index)
            read.setdefault(name, []).append(found.shape)
            return found

        return one

    monkeypatch.setattr(HfDirectory, "parts", counted)
    monkeypatch.setattr(HfDirectory, "read", lambda *_: pytest.fail("a tensor is read whole"))
    loaded, _ = load_llama(tmp_path / "model", dtype="float32", mesh=parse("heads=2,tokens=4"))
    assert not differing(model(), loaded)
    for weight in weights(model()).values():
        sizes = [int(np.prod(shape)) for shape in read[weight.name]]
        assert sum(sizes) == np.prod(weight.hf_shape), f"{weight.name}: read {sizes}"
        assert len(sizes) == (8 if len(weight.hf_shape) == 2 else 1), f"{weight.name}: read {sizes}"
    both = map(jax.tree.leaves, (loaded, model("heads=2,tokens=4")))
    for ours, other in zip(*both, strict=True):
        assert ours.sharding.is_equivalent_to(other.sharding, ours.ndim)


@pytest.mark.parametrize("mesh", ["heads=2,tokens=4", "rows=2,heads=2"])
def test_the_plan_of_memory_counts_what_devices_hold(mesh: str):
    planned = share(kvq.parse(SPEC), CONFIG, 2, CAPACITY, "float32", parse(mesh), DEVICES["h200"])
    held = [bytes_on(jax.devices()[1], tree) for tree in (model(mesh), cache_of(mesh))]
    assert held == [planned.weight_bytes, planned.body_bytes + planned.window_bytes]
    assert planned.total_bytes == sum(held)
    assert planned.body_bytes < kvq.size.nbytes([layer.body for layer in cache_of().layers]) / 2


def test_two_processes_write_the_text_of_one_and_end_together(tmp_path: pathlib.Path):
    """Over gloo on the loopback: each reads its parts of the checkpoint; they prepare, generate,
    save, load, trim, save again and stream. Then one is killed, and the other says so and ends
    within a minute."""
    save_llama(model(), tmp_path / "model")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count=2 {QUICK_FLAGS}",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, str(pathlib.Path(__file__).with_name("two_processes.py"))]
    started = [
        subprocess.Popen(
            [*command, str(rank), port, str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        other, told = started[1].communicate(timeout=240)
        assert started[1].returncode == -signal.SIGKILL, told
        printed, told = started[0].communicate(timeout=60)
    finally:
        for process in started:
            process.kill()
    assert started[0].returncode not in (0, -signal.SIGKILL), told
    assert re.search("another task died|[Cc]onnection (closed|reset)", told), told
    assert "came to its end" not in printed
    found, second = (
        json.loads(lines.splitlines()[-1]) for lines in (printed, other)
    )  # below what gloo says
    for process in (found, second):
        assert process["read"] == pytest.approx(process["held"], rel=0.05), "bytes of the file"
    assert found["held"] < 0.6 * kvq.size.nbytes(model()), "each process holds all weights"
    assert found["written"] == found["streamed"] == text_of_one_device().tolist()
    expected = kvq.rows.trim(kvq.files.load(tmp_path / "cache"), np.array([40, 40]))
    trimmed = kvq.files.load(tmp_path / "trimmed")
    assert not differing(standing(expected), standing(trimmed))
    assert differing(expected, kvq.files.load(tmp_path / "cache")), "nothing was trimmed"
    parameters = jax.tree.leaves(prepare(model(), "xquant").cache_parameters)
    prepared = [float(np.abs(leaf).sum()) for leaf in parameters]
    assert found["prepared"] == pytest.approx(prepared, rel=1e-4)


@pytest.mark.parametrize(
    ("family", "count", "mesh", "axis"),
    [
        ("mixtral", 5, "heads=2", 2),  # 5 experts do not divide: the inner channels do
        ("gpt_oss", 8, "rows=2,heads=2,tokens=2", 0),
    ],
)
def test_experts_are_split_among_devices_and_give_the_logits_of_one(
    family: str, count: int, mesh: str, axis: int
):
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 2}
    experts = {"num_local_experts": count, "num_experts_per_tok": 2, "sliding_window": 8}
    llama = random_llama(tiny_config(family, head_dim=16, **sizes, **experts))
    placement = parse(mesh)
    placed = shard_llama(llama, placement)
    parts = placement.size("heads") * placement.size("tokens")
    of_layer = {name.rpartition(".")[2]: weight.leaf for name, weight in weights(placed).items()}
    shape = of_layer["gate"].sharding.shard_shape(of_layer["gate"].shape)
    assert shape[axis] * parts == of_layer["gate"].shape[axis]
    for name in ("gate", "up", "down"):
        assert of_layer[name].addressable_shards[0].data.nbytes * parts == of_layer[name].nbytes
    assert of_layer["router"].is_fully_replicated
    step = jax.jit(decode_step)

    def logits(llama: Llama, placement: kvq.Placement | None) -> np.ndarray:
        """Return the logits after a prompt, whose tokens are sorted by expert, and after a step,
        whose tokens take their experts' weights."""
        cache = kvq.init_cache(SPEC, llama.config, 2, CAPACITY, "float32", placement=placement)
        first, cache = prefill(llama, cache, TOKENS)
        token = np.array([5, 9])
        compiled = step.lower(llama, cache, token).compile()
        largest = max((size for size, _ in collectives(compiled)), default=0)
        assert largest <= 2 * max(llama.config.vocab_size, 8 * 17) * 4, "experts are gathered"
        return np.stack([first, compiled(llama, cache, token)[0]])

    expected, found = logits(llama, None), logits(placed, placement)
    assert np.abs(found - expected).max() < 1e-4 < np.abs(found[:, ::-1] - expected).max()
    exact, without = (jax.jit(forward)(one, jnp.asarray(TOKENS)) for one in (llama, placed))
    assert np.abs(np.asarray(without) - np.asarray(exact)).max() < 1e-4, "without a placement"

"""Choose the arithmetic and the route of a layer's fused kernels. Assembly runs if a self-test has
shown, on this kind of device, that it computes the same as array operations, else array operations
run. Mosaic GPU reads a body if this JAX has it, it serves the format and the same test of it has
passed. Otherwise Triton does.

The self-test (pallas_kernels/self_test.py) runs at the first use of a format on a GPU. Its verdict
is kept in the user's cache folder, by device, versions of JAX and of its runtime, kernels' sources
and format, so that it runs once on a machine. A test that could not run, say because the memory was
full, has no verdict: the process uses array operations, and the next one tests again.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib

from kvq_jax.files import whole
from kvq_jax.files.json_text import parse_json
from kvq_jax.files.user_cache import cache_folder
from kvq_jax.layer.plan import LayerPlan
from pallas_kernels.launch import Arithmetic, KernelRoute, Launch

_MOSAIC = "pallas_kernels.mosaic.route"
Format = Any  # pallas_kernels.self_test.Format
# (format, device) -> how the kernel differs, or None if it does not
Test = Callable[[Format, Any], str | None]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of the self-test of a format.

    difference: how assembly, or Mosaic GPU, differs from array operations, or None if it does not.
    """

    device: str
    jax: str
    format: str
    difference: str | None


def arithmetic_of(plan: LayerPlan, query_heads: int) -> Arithmetic:
    """Return the arithmetic of the kernels that can serve this layer on this process's device. The
    first call for a format compiles for seconds."""
    device, format = jax.local_devices()[0], format_of(plan, query_heads)
    if device.platform != "gpu" or format.keys.off_triton:
        return "jnp"
    return "asm" if verdict(format, device).difference is None else "jnp"


def route_of(plan: LayerPlan, query_heads: int) -> KernelRoute:
    """Return the route that reads the body of a layer that kernels can serve, on this process's
    device. The first call for a format compiles for seconds."""
    return "triton" if mosaic_unavailable(plan, query_heads) else "mosaic"


def mosaic_unavailable(plan: LayerPlan, query_heads: int) -> str | None:
    """Return, in one line, why Mosaic GPU does not read this layer's body here, or None if it does.
    Formats that have no verdict yet are tested."""
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return f"this process runs on {device.platform}"
    mosaic, format = importlib.import_module(_MOSAIC), format_of(plan, query_heads, "mosaic")
    capacity = plan.regions.held_capacity
    body = format.keys, format.values, format.group, capacity
    reason = mosaic.missing() or mosaic.unsupported(*body, mosaic.target_capability())
    if reason:
        return reason
    difference = verdict(format, device).difference
    return None if difference is None else f"its self-test fails: {difference}"


def mosaic_unsupported(plan: LayerPlan, query_heads: int) -> str | None:
    """Return, in one line, why decode steps of this layer need other kernels than those on Mosaic
    GPU, or None if those do all of a step but writing some formats' blocks, which XLA does. The
    device is not considered."""
    mosaic: Any = importlib.import_module(_MOSAIC)
    if reason := mosaic.missing():
        return reason
    readers = [codec.kernels.reader() for codec in plan.codecs]
    for name, reader in zip("kv", readers, strict=True):
        if isinstance(reader, str):
            return f"{name}: {reader}"
    group, capacity = query_heads // plan.heads, plan.regions.held_capacity
    return mosaic.unserved(*readers, group, capacity)


def describe_routes(plans: Sequence[LayerPlan], query_heads: int) -> str:
    """Return, in one line, the routes that the layers of these plans take here, and why. Kernels
    must be able to serve all of them."""
    reasons = [mosaic_unavailable(plan, query_heads) for plan in dict.fromkeys(plans)]
    if not reasons:
        return "no layer that kernels serve"
    if other := next((reason for reason in reasons if reason), None):
        return f"{'triton' if all(reasons) else 'mosaic and triton'}: {other}"
    return f"mosaic: its self-test passed with JAX {jax.__version__}"


def describe_arithmetic(plans: Sequence[LayerPlan], query_heads: int) -> str:
    """Return, in one line, the arithmetic that the layers of these plans get here, and why. Kernels
    must be able to serve all of them. Formats that have no verdict yet are tested."""
    device = jax.local_devices()[0]
    formats = [format_of(plan, query_heads) for plan in dict.fromkeys(plans)]
    verdicts = [verdict(format, device) for format in formats if not format.keys.off_triton]
    if not verdicts:
        return "Mosaic GPU's" if formats else "no layer that kernels serve"
    if failed := next((one for one in verdicts if one.difference is not None), None):
        return (
            f"array operations where assembly fails its self-test on {failed.device}:"
            f" {failed.difference}"
        )
    return f"assembly: its self-test passed on {verdicts[0].device} with JAX {verdicts[0].jax}"


def format_of(plan: LayerPlan, query_heads: int, route: KernelRoute = "triton") -> Format:
    """Return the self-test's format of a layer that kernels can serve."""
    attention = plan.attention
    return _self_test().Format(
        plan.k.kernels.reader(),
        plan.v.kernels.reader(),
        query_heads // plan.heads,
        route,
        attention.window is not None,
        attention.soft_cap,
    )


def on_device(format: Format, device: Any) -> str | None:
    """Run the self-test. Its reference is computed on the CPU if JAX has one beside the GPU."""
    reference = None
    with contextlib.suppress(RuntimeError):
        reference = jax.local_devices(backend="cpu")[0]
    # Kernels on Mosaic GPU, their merge too, have their own assembly whatever a launch says.
    launch = Launch("asm") if format.route == "triton" else Launch("jnp", route="mosaic")
    return _self_test().difference(format, launch, device, reference)


def verdict(format: Format, device: Any, test: Test = on_device) -> Verdict:
    """Return the verdict on this format for devices of this kind. If none is kept, run the test and
    keep its verdict."""
    return _verdict(format, device, test, cache_folder() / "kernels")


@functools.cache
def _verdict(format: Format, device: Any, test: Test, folder: Path) -> Verdict:
    runtime = getattr(getattr(device, "client", None), "platform_version", "")
    versions = (
        jax.__version__,
        jaxlib.__version__,
        runtime,
        getattr(device, "compute_capability", ""),
        _sources(),
    )
    key = hashlib.sha256(repr((device.device_kind, versions, format)).encode()).hexdigest()[:32]
    file = folder / f"{key}.json"
    # none yet, or none that can be read
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Verdict(**parse_json(file.read_text(encoding="utf-8")))
    # This runs while a step is traced. Nothing is traced in a new thread, so it can compute.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        outcome = thread.submit(test, format, device)
    if error := outcome.exception():
        if not isinstance(error, Exception):
            raise error
        reason = f"it cannot run: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        return Verdict(device.device_kind, jax.__version__, repr(format), reason)
    result = Verdict(device.device_kind, jax.__version__, repr(format), outcome.result())
    with contextlib.suppress(OSError):  # the home cannot be written to: every process tests anew
        folder.mkdir(parents=True, exist_ok=True)
        whole.write(file, json.dumps(dataclasses.asdict(result), indent=1))
    return result


@functools.cache
def _sources() -> str:
    """Return a digest of the kernels' code: a verdict on other kernels says nothing about these."""
    files = sorted(Path(inspect.getfile(Launch)).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _self_test() -> Any:
    """Import the self-test, which compiles nothing: steps on a CPU do without it."""
    return importlib.import_module("pallas_kernels.self_test")

"""Kernels compile for every supported architecture, and as many of their programs run there as the
schedule assumes.
"""

import itertools
import types

import jax
import jax.numpy as jnp
import pytest

from benchmarks.machine_code.compile import compile_for
from benchmarks.machine_code.sass import assemble, main_loop
from benchmarks.machine_code.target import A100, ARCHITECTURES, B200, H200, L40, Target
from pallas_kernels.decode_attention.kernel import decode_attention
from pallas_kernels.decode_attention.tuning import Tuning, tuning_for
from pallas_kernels.launch import Launch
from pallas_kernels.readers.base import Reader
from tests.exhaustive import some
from tests.pallas_kernels.grouped_sides import format_of, reader_of, stored_structs

BATCH, HEADS, GROUP, TOKENS, CHANNELS = 16, 8, 4, 16384, 128
FORMATS = {
    "kivi:bits=4": (
        format_of(4, "asym", "tokens", CHANNELS),
        format_of(4, "asym", "channels", CHANNELS),
    ),
    "innerq:bits=2": (
        format_of(2, "hybrid", "channels", CHANNELS),
        format_of(2, "hybrid", "tokens", CHANNELS),
    ),
    "dense": (None, None),
}


def tuning_on(
    target: Target, readers: tuple[Reader, Reader], monkeypatch: pytest.MonkeyPatch
) -> Tuning:
    """Return the tuning in a process on such a GPU."""
    device = types.SimpleNamespace(
        compute_capability=f"{target.capability[0]}.{target.capability[1]}", core_count=target.cores
    )
    with monkeypatch.context() as patch:
        patch.setattr(jax, "devices", lambda: [device])
        tuning = tuning_for(*readers, 8, TOKENS, True)
        assert tuning.running == target.cores * tuning.resident
    return tuning


# each architecture, and each format where a multiprocessor has least shared memory or on the newest
USUAL = (
    *((A100, "kivi:bits=4"), (L40, "kivi:bits=4"), (L40, "dense")),
    *((H200, "kivi:bits=4"), (B200, "innerq:bits=2"), (B200, "dense")),
)


@pytest.mark.parametrize(
    ("target", "spec"),
    some(itertools.product(ARCHITECTURES, FORMATS), USUAL),
    ids=lambda value: getattr(value, "name", value),
)
def test_all_programs_of_a_launch_run_at_a_time(target, spec, monkeypatch):
    formats = FORMATS[spec]
    readers = reader_of(formats[0], CHANNELS), reader_of(formats[1], CHANNELS)
    tuning = tuning_on(target, readers, monkeypatch)

    def attend(q: jax.Array, k: list[jax.Array], v: list[jax.Array], limits: jax.Array) -> object:
        return decode_attention(
            q,
            (readers[0], k),
            (readers[1], v),
            limits,
            capacity=TOKENS,
            tuning=tuning,
            launch=Launch("asm"),
        )

    q = jax.ShapeDtypeStruct((BATCH, HEADS, GROUP, CHANNELS), jnp.float32)
    k, v = (stored_structs(format, BATCH, HEADS, TOKENS, CHANNELS) for format in formats)
    kernel = compile_for(
        target, attend, (q, k, v, jax.ShapeDtypeStruct((BATCH,), jnp.int32))
    ).kernel("decode_attention")
    assembly = assemble(kernel.ptx, kernel.name, target.architecture)
    loop = main_loop(assembly.function).counts()
    assert not loop.get("spill", 0), f"{loop} of {assembly.registers} registers"
    together = target.warps_per_sm(
        assembly.registers, kernel.threads, kernel.shared_bytes + assembly.shared_bytes
    ) // (kernel.threads // 32)
    assert together >= tuning.resident, (
        f"{together} programs run on a multiprocessor, {tuning.resident} are launched for it"
    )
    assert tuning.resident >= together / 2, (
        f"{together} programs would run on a multiprocessor, {tuning.resident} are launched for it"
    )

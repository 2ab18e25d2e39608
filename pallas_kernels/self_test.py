"""Check that inline assembly, or a kernel on Mosaic GPU, computes the same as array operations on
this machine, by comparing both on small random arrays for one pair of readers.

The only interpreter for assembly is the tests' emulator, which is not a GPU: compiler, registers
and approximate exponentials are the device's own. So each machine is tested once for each format.
Attention over a few hundred tokens is computed by the assembly kernel as it will run, and by the
same kernel in array operations, interpreted. The test covers attention, its merge, the
quantization of uniform groups, and the kernel that appends a token, with attention to the windows
and blocks of uniform groups and of tables.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode_attention.kernel import decode_attention
from pallas_kernels.decode_attention.lower_limits import LowerLimits
from pallas_kernels.decode_attention.windows import WindowQueries
from pallas_kernels.launch import KernelRoute, Launch
from pallas_kernels.mosaic import route as mosaic
from pallas_kernels.quantize.append import Blocks, Places, Side, append_token
from pallas_kernels.quantize.blocks import GroupedBlocks
from pallas_kernels.quantize.kernel import quantize_rows
from pallas_kernels.quantize.rounding import Job
from pallas_kernels.quantize.table import TableBlocks
from pallas_kernels.readers.base import Reader
from pallas_kernels.readers.codebook import CodebookReader
from pallas_kernels.readers.dense import DenseReader
from pallas_kernels.readers.eigen_keys import EigenKeys
from pallas_kernels.readers.grouped import GroupedReader
from pallas_kernels.readers.polar import PolarReader
from pallas_kernels.readers.rotary import RotatedReader
from pallas_kernels.readers.runs import RunsKeys, RunsReader
from pallas_kernels.tiles.layout import PlaneLayout
from pallas_kernels.triton_call import has_triton

HEADS, TOKENS = 2, 384  # three of the longest tiles, and whole groups of any size
LIMITS = (1, 130, 300, TOKENS)
# with a window: one segment of a ring of RING tokens, two of them, and a limit where a round begins
RING, WINDOWED_LIMITS, LOWER = 320, (1, 130, 450, 960), (0, 70, 200, 645)
# relative error of an output row: both ways round to fp16, and have errors of 0.5e-3 to 1.9e-3
# (docs/kernels.md)
TOLERANCE = 1e-2
DIFFERENT_CODES = 1e-3  # share of codes that may differ by one, because of ties
INTERPRETED = Launch(interpret=True)


@dataclasses.dataclass(frozen=True)
class Format:
    """The readers of keys and values, the number of query heads per KV head, the route whose kernel
    reads them, whether a ring is read from a lower limit on, and the soft cap of scores."""

    keys: Reader
    values: Reader
    group: int
    route: KernelRoute = "triton"
    windowed: bool = False
    soft_cap: float | None = None

    @property
    def limits(self) -> tuple[int, ...]:
        return WINDOWED_LIMITS if self.windowed else LIMITS

    @property
    def lower(self) -> LowerLimits | None:
        if not self.windowed:
            return None
        return LowerLimits(jnp.asarray(LOWER, jnp.int32), RING)


def difference(
    format: Format, launch: Launch, device: Any = None, reference: Any = None
) -> str | None:
    """Return None if kernels give the same as interpreted array operations, else the difference in
    one line.

    Args:
        format: keys, values and group that the kernels read.
        launch: how the tested kernels are launched.
        device: where they run. None is the process's default device.
        reference: where the array operations are interpreted. None is the process's default device.

    Raises whatever stops the kernels from running, such as a full memory.
    """
    interpreted = INTERPRETED
    if format.keys.off_triton or not has_triton():
        interpreted = dataclasses.replace(INTERPRETED, route="mosaic")
    return _compare(_outputs(format, launch, device), _outputs(format, interpreted, reference))


def _compare(outputs: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> str | None:
    for name, want in expected.items():
        have = outputs[name]
        if name.startswith("attention"):
            scale = np.linalg.norm(want, axis=-1)
            error = np.max(np.linalg.norm(have - want, axis=-1) / np.maximum(scale, 1e-30))
            if not error <= TOLERANCE:  # also true for NaN
                return f"{name} differs by {error:.1e} of an output row, more than {TOLERANCE:g}"
            if np.max(np.linalg.norm(np.roll(have, 1, axis=0) - want, axis=-1) / scale) < 0.1:
                return "outputs of other rows would pass: nothing was shown"
        elif np.mean(have != want) > DIFFERENT_CODES:
            return f"{name}: {np.mean(have != want):.1%} of the numbers differ"
    return None


def _outputs(format: Format, launch: Launch, device: Any) -> dict[str, np.ndarray]:
    with jax.default_device(device):
        rng = np.random.default_rng(0)
        channels = math.prod(format.keys.chunks)
        q = jnp.asarray(
            rng.standard_normal((len(LIMITS), HEADS, format.group, channels)), jnp.float32
        )
        keys, values = (
            [jnp.asarray(a) for a in random_arrays(reader, rng)]
            for reader in (format.keys, format.values)
        )

        # For a GPU, XLA drops roundings that interpreted kernels undo, and codes would differ.
        options = {"xla_allow_excess_precision": False} if launch.interpret else None

        @functools.partial(jax.jit, compiler_options=options)
        def attend(q: jax.Array, keys: Any, values: Any, limits: jax.Array) -> jax.Array:
            part = decode_attention(
                q,
                (format.keys, keys),
                (format.values, values),
                limits,
                capacity=TOKENS,
                lower=format.lower,
                soft_cap=format.soft_cap,
                launch=launch,
            )
            return part.o / part.l

        limits = jnp.asarray(format.limits, jnp.int32)
        outputs = {"attention": np.asarray(attend(q, keys, values, limits))}
        outputs |= _of_windows(format, keys, values, launch, rng, options)
        for side, reader in (("keys", format.keys), ("values", format.values)):
            reader = reader.inner if isinstance(reader, RotatedReader) else reader
            if isinstance(reader, GroupedReader):
                if format.route == "mosaic" and mosaic.unquantized(reader):
                    continue
                rows = jnp.asarray(
                    rng.standard_normal((1, HEADS, 128, reader.layout.channels)), jnp.bfloat16
                )
                scheme = "asym" if reader.centre is None else "sym"
                bits = reader.layout.bits - (scheme == "sym")
                packed = jax.jit(
                    functools.partial(
                        quantize_rows, reader=reader, scheme=scheme, bits=bits, launch=launch
                    ),
                    compiler_options=options,
                )(rows)
                outputs |= {
                    f"quantized {side}, array {i}": np.asarray(a)
                    for i, a in enumerate(jax.tree.leaves(packed))
                }
        return outputs


SINK, SLOTS, BLOCK = 8, 64, 32  # slots of windows, and tokens of a block
POSITIONS = (3, 40, SINK + SLOTS - 1, SINK + SLOTS + BLOCK - 1)  # a block leaves the last two


def _of_windows(
    format: Format,
    keys: Sequence[jax.Array],
    values: Sequence[jax.Array],
    launch: Launch,
    rng: np.random.Generator,
    options: dict[str, Any] | None,
) -> dict[str, np.ndarray]:
    """Return what appending a token leaves, and attention to the windows, or nothing if the route
    is Mosaic GPU and it does neither."""
    channels, batch = math.prod(format.keys.chunks), len(POSITIONS)

    def rows(slots: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((batch, HEADS, slots, channels)), jnp.bfloat16)

    sides = []
    for reader, stored in ((format.keys, keys), (format.values, values)):
        blocks = _blocks(reader, stored, format.route, launch.asm)
        sides.append(Side(rows(1), rows(SINK), rows(SLOTS), blocks))
    position = jnp.asarray(POSITIONS, jnp.int32)
    q = jnp.asarray(rng.standard_normal((batch, HEADS, format.group, channels)), jnp.float32)
    seen = (SLOTS if format.windowed else None), format.soft_cap
    rotation = (keys[-2], keys[-1]) if format.keys.turns else None
    queries = WindowQueries(q, position + 1, jnp.zeros_like(position), rotation, *seen)
    writers = [side.blocks.writer if isinstance(side.blocks, Blocks) else None for side in sides]
    rings = [side.ring for side in sides]
    if format.route == "mosaic" and mosaic.unappended(writers, rings, queries):
        return {}

    @functools.partial(jax.jit, compiler_options=options)
    def append() -> tuple[jax.Array, Any]:
        first = jnp.maximum(position + 1 - SINK - SLOTS, 0) // BLOCK * BLOCK
        leaving = position + 1 >= SINK + SLOTS
        places = Places(position, position >= 0, first, first, leaving)
        after, part = append_token(sides, places, block=BLOCK, queries=queries, launch=launch)
        assert part is not None
        arrays = [(side.sink, side.ring, *_body(side)) for side in after]
        return jnp.swapaxes(part.o[:, :, 0] / part.l, 2, 3), arrays

    attention, arrays = append()
    stored = {f"appended, array {i}": a for i, a in enumerate(jax.tree.leaves(arrays))}
    return {"attention over windows": np.asarray(attention)} | {
        name: np.asarray(a.astype(jnp.float32)) for name, a in stored.items()
    }


def _blocks(
    reader: Reader, stored: Sequence[jax.Array], route: KernelRoute, asm: bool
) -> Blocks | None:
    """Return the blocks of BLOCK tokens of these stored arrays, if this route writes them."""
    if isinstance(reader, RotatedReader):
        return _blocks(reader.inner, stored[:-2], route, asm)
    if isinstance(reader, GroupedReader):
        if reader.axis == "tokens" and reader.group != BLOCK:
            return None
        if route == "mosaic" and mosaic.unquantized(reader):
            return None
        scheme = "asym" if reader.centre is None else "sym"
        job = Job(reader, scheme, reader.layout.bits - (scheme == "sym"), False, 1, asm)
        writer, scales, inputs = GroupedBlocks(job), stored[len(reader.layout.sets) :], []
    elif (
        isinstance(reader, CodebookReader)
        and reader.affine == "tokens"
        and not reader.pool
        and not reader.layout.channels % reader.group  # the groups of one head
    ):
        table, *scales = stored[len(reader.layout.sets) :]
        writer = TableBlocks(reader.layout, reader.group, scale_dtype=reader.scale_dtype)
        inputs = [table[None, None], table[None, None]]  # levels, and values
    else:
        return None
    floats = jnp.dtype(reader.scale_dtype)
    scales = [jax.lax.bitcast_convert_type(scale, floats) for scale in scales]
    return Blocks([*stored[: len(reader.layout.sets)], *scales], writer, inputs)


def _body(side: Side) -> Sequence[jax.Array]:
    return side.blocks.body if isinstance(side.blocks, Blocks) else []


def random_arrays(reader: Reader, rng: np.random.Generator) -> list[np.ndarray]:
    """Return stored arrays of TOKENS tokens for a reader, as caches store them, with rows of about
    -1 .. 1.
    """
    shape = len(LIMITS), HEADS
    if isinstance(reader, RotatedReader):
        return [*random_arrays(reader.inner, rng), *_rope(math.prod(reader.chunks))]
    if isinstance(reader, DenseReader):
        return [_bits(rng.standard_normal((*shape, TOKENS, reader.channels)), reader.dtype)]
    if isinstance(reader, GroupedReader):
        step = 2 / (2**reader.layout.bits - 1)
        groups, channels = TOKENS // reader.group, reader.layout.channels
        sizes = (
            (groups, channels) if reader.axis == "tokens" else (channels // reader.group, TOKENS)
        )
        ranges = [(0.7 * step, 1.3 * step), *([(-1.2, -0.8)] if reader.centre is None else [])]
        return [
            *_words(reader.layout, rng),
            *_uniform(ranges, (*shape, *sizes), reader.scale_dtype, rng),
        ]
    if isinstance(reader, PolarReader):
        radius, angle = 2.0 ** -(reader.layout.bits - reader.angle_bits), 2.0**-reader.angle_bits
        sizes = (*shape, TOKENS // reader.group, reader.layout.channels)
        ranges = ((radius, 1.3 * radius), (0.1, 0.3), (angle, 2 * angle), (-3.1, 3.1))
        return [*_words(reader.layout, rng), *_uniform(ranges, sizes, reader.scale_dtype, rng)]
    if isinstance(reader, CodebookReader):
        return [*_words(reader.layout, rng), *_of_table(reader, rng)]
    if isinstance(reader, RunsReader):
        words = [array for layout in reader.layouts for array in _words(layout, rng)]
        scale = rng.integers(-8, 9, (*shape, TOKENS)).astype(np.int8)
        steps = 2 / (2.0 ** np.arange(1, 9) - 1)
        return [*words, scale, steps.astype(np.float32), *_of_runs(reader, rng)]
    raise TypeError(f"no random arrays for a {type(reader).__name__}")


def _of_runs(reader: RunsReader, rng: np.random.Generator) -> Sequence[np.ndarray]:
    channels = reader.channels
    mean = rng.uniform(-1, 1, (HEADS, channels)).astype(np.float32)
    if isinstance(reader, EigenKeys) or not isinstance(reader, RunsKeys):
        synthesis = rng.standard_normal((HEADS, channels, channels)) / math.sqrt(channels)
        rope = _rope(channels) if reader.turns else []
        return [synthesis.astype(np.float32), mean, *rope]
    pairs = np.stack([rng.permutation(channels // 2) for _ in range(HEADS)])
    place = np.concatenate([2 * pairs, 2 * pairs + 1], axis=-1).astype(np.int32)
    return [
        place,
        rng.uniform(0.5, 1.5, (HEADS, channels)).astype(np.float32),
        mean,
        *_rope(channels),
    ]


def _rope(channels: int) -> list[np.ndarray]:
    """Return RoPE's inverse frequencies and its attention factor."""
    half = channels // 2
    return [
        np.float32(10000.0) ** -(np.arange(half, dtype=np.float32) / half),
        np.ones((), np.float32),
    ]


def _of_table(reader: CodebookReader, rng: np.random.Generator) -> Sequence[np.ndarray]:
    batch, channels, ranges = len(LIMITS), reader.layout.channels, ((0.7, 1.3), (-0.1, 0.1))
    if reader.affine == "channels":
        scales = _uniform(ranges, (HEADS, channels), "float32", rng)
    else:
        sizes = batch, HEADS, channels // min(reader.group, channels), TOKENS
        scales = _uniform(ranges, sizes, reader.scale_dtype, rng)
    table = np.sort(rng.uniform(-1, 1, 1 << reader.layout.bits)).astype(np.float32)
    if not reader.pool:
        return [table, *scales]
    each = 16  # outliers of a head in a pool, sorted by place, all different
    pools = TOKENS // reader.pool
    places = np.stack(
        [
            np.sort(rng.choice(reader.pool * channels, each, replace=False))
            for _ in range(batch * pools * HEADS)
        ]
    )
    ends = np.broadcast_to(each * np.arange(1, HEADS + 1), (batch, pools, HEADS)).astype(np.uint16)
    residual = _bits(rng.uniform(-3, 3, (batch, pools, HEADS * each)), "float16")
    return [
        table,
        *scales,
        places.reshape(batch, pools, HEADS * each).astype(np.uint16),
        residual,
        ends,
    ]


def _words(layout: PlaneLayout, rng: np.random.Generator) -> list[np.ndarray]:
    shapes = [
        (len(LIMITS), HEADS, TOKENS // layout.slots, layout.words(bits)) for bits in layout.sets
    ]
    return [rng.integers(-(1 << 15), 1 << 15, shape, np.int16) for shape in shapes]


def _uniform(
    ranges: Sequence[tuple[float, float]],
    shape: tuple[int, ...],
    dtype: str,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    return [_bits(rng.uniform(low, high, shape), dtype) for low, high in ranges]


def _bits(numbers: np.ndarray, dtype: str) -> np.ndarray:
    """Return numbers as caches store them: floats of 16 bits as the integers that hold their
    bits."""
    stored = numbers.astype(jnp.dtype(dtype))
    return stored.view(np.uint16) if stored.itemsize == 2 else stored

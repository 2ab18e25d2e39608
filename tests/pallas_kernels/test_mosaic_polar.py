"""Polar keys on registers are those of the array form, which is all that the interpreter runs:
their assembly, executed in NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.readers.polar import PolarReader
from pallas_kernels.tiles.layout import SPAN, plane_layout
from tests.pallas_kernels.emulator import INSTRUCTIONS, asm_on_arrays
from tests.pallas_kernels.lowering import needs_mosaic
from tests.pallas_kernels.registers import SIDE, WARPS, numbers, registers

OF_MIDDLES = ("sub.rn.f32", "cvt.f32.f16", "cvt.rn.f16x2.f32")  # and of no other kernel
pytestmark = needs_mosaic


def polar(bits: int, angle_bits: int, head_dim: int):
    from pallas_kernels.mosaic.polar import PolarKeys

    layout = plane_layout(bits, head_dim // 2, SPAN)
    return PolarKeys.of(PolarReader(layout, angle_bits, SPAN), SPAN)


FORMATS = ((8, 4, 64), (8, 4, 128), (8, 4, 256), (8, 6, 128), (6, 4, 64), (6, 4, 128), (6, 5, 128))


@pytest.mark.parametrize(("bits", "angle_bits", "head_dim"), FORMATS)
def test_registers_have_the_keys_of_arrays(
    bits: int, angle_bits: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
):
    from pallas_kernels.mosaic import polar as module

    monkeypatch.setattr(module, "asm", asm_on_arrays)
    side, rng = polar(bits, angle_bits, head_dim), np.random.default_rng(bits)
    layout = side.layout
    shapes = [(WARPS, SPAN // layout.slots, layout.words(set_bits)) for set_bits in layout.sets]
    words = [rng.integers(-(1 << 15), 1 << 15, shape).astype(np.int16) for shape in shapes]
    ranges = (0, 0.2), (0, 0.5), (0, 2 * np.pi / 2**angle_bits)
    scales = [rng.uniform(*ends, layout.width).astype(np.float16) for ends in ranges]
    rows = [np.broadcast_to(scale, (WARPS, SIDE, layout.width)) for scale in scales]
    on_registers, in_arrays = (module.Polar(interpret, angle_bits) for interpret in (False, True))
    of_words, of_scales = ([registers(array[1]) for array in part] for part in (words, rows))
    arrays = [[jnp.asarray(array) for array in part] for part in (words, rows)]
    for chunk in range(layout.chunks):
        fields = side.fields(chunk)
        have = [
            numbers(key).view(np.float16).astype(np.float32)
            for key in on_registers.registers(of_words, fields, of_scales)
        ]
        wanted = in_arrays.keys(arrays[0], fields, arrays[1])
        for one, other in zip(have, wanted, strict=True):
            # The array form rounds differences to fp32 before fp16.
            np.testing.assert_allclose(one, other[1], rtol=1e-3, atol=2e-4, err_msg=f"{chunk=}")
        assert np.abs(have[0] - np.asarray(wanted[1][1])).max() > 0.1, "sines would pass"


@pytest.mark.parametrize("angle_bits", [4, 5, 6])
def test_keys_turned_by_the_middle_of_their_angles_are_those_of_the_codes(
    angle_bits: int, monkeypatch: pytest.MonkeyPatch
):
    check_turned_keys(angle_bits, monkeypatch)


@pytest.mark.parametrize("instruction", OF_MIDDLES)
def test_an_instruction_that_computes_something_else_is_noticed(
    instruction: str, monkeypatch: pytest.MonkeyPatch
):
    right = INSTRUCTIONS[instruction]
    monkeypatch.setitem(INSTRUCTIONS, instruction, lambda first, *more: right(~first, *more))
    with pytest.raises(AssertionError, match="code=0"):
        check_turned_keys(4, monkeypatch)


def check_turned_keys(angle_bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from pallas_kernels.mosaic import polar as module

    monkeypatch.setattr(module, "asm", asm_on_arrays)
    codes, pairs, rng = 1 << angle_bits, 1000, np.random.default_rng(0)
    step, minimum = (
        rng.uniform(*ends, pairs).astype(np.float16)
        for ends in ((0, 2 * np.pi / codes), (-2 * np.pi, np.pi))
    )
    ops = module.Polar(False, angle_bits)
    middle = ops.of_lane(*(x.view(np.uint32) for x in (step, minimum)))
    cos, sin = (x.view(np.float16).astype(np.float64) for x in middle)
    angle, radius = (
        module.Number.of([module.Bit(0, 0, bit) for bit in bits], 0, halved)
        for bits, halved in ((range(angle_bits), False), ((15,), True))
    )
    ones, none = np.full(pairs, 2, np.float16), np.zeros(pairs, np.float16)  # radii are halved

    def keys(code: int) -> tuple[np.ndarray, np.ndarray]:
        arrays = np.full(pairs, code, np.uint16), none, ones, step
        words, *scales = (_one_register(array) for array in arrays)
        sides = ops.registers([words], [(angle, radius)], scales)
        x, y = (side[0, 0].view(np.float16).astype(np.float64) for side in sides)
        return x * cos - y * sin, x * sin + y * cos

    for code in range(codes):
        theta = (code + 0.5) * step.astype(np.float64) + minimum
        for have, f in zip(keys(code), (np.cos, np.sin), strict=True):
            errors = np.abs(have - f(theta))
            assert errors.max() < 5e-3, f"{code=}"
            assert np.sqrt(np.mean(errors**2)) < 1.3e-3, f"{code=}"
        assert np.abs(keys(code)[0] - np.cos(theta + step)).max() > 0.8 * step.max(), "the next one"


@pytest.mark.parametrize("code", range(16))
def test_keys_as_large_as_fp16_allows_are_finite(code: int, monkeypatch: pytest.MonkeyPatch):
    from pallas_kernels.mosaic import polar as module

    monkeypatch.setattr(module, "asm", asm_on_arrays)
    angle = module.Number.of([module.Bit(0, 0, bit) for bit in range(4)], 0)
    radius = module.Number.of([module.Bit(0, 0, 15)], 0, halved=True)
    numbers_of = np.uint16(code), np.float16(0), np.float16(65504), np.float16(2 * np.pi / 16)
    words, *scales = (_one_register(np.full(2, number)) for number in numbers_of)
    sides = module.Polar(False, 4).registers([words], [(angle, radius)], scales)
    halves = [side[0, 0].view(np.float16).astype(np.float64) for side in sides]
    np.testing.assert_allclose(np.hypot(*halves), 65504 / 2, rtol=3e-3)


def _one_register(numbers: np.ndarray) -> np.ndarray:
    grid = np.empty((1, 1), dtype=object)
    grid[0, 0] = numbers.view(np.uint32)
    return grid

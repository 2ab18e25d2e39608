"""Encoders of the published layouts, written element by element from their descriptions and apart
from the library's decoders. Each returns the tensors of a module by the end of their names and the
weight that they stand for."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from kvq_models.llama.quantized.stored_parts import Layout, StoredParts
from kvq_models.llama.stored_tensor import StoredTensor

Encoded = tuple[dict[str, np.ndarray], np.ndarray]
GROUP = 32
# as in the QLoRA paper, appendix E
NF4 = np.asarray(
    [
        *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
    ],
    np.float32,
)


def words(codes: np.ndarray, bits: int, order: list[int] | None = None) -> np.ndarray:
    """Pack the last axis into int32 words. The code at place i of a word is column order[i] of its
    columns."""
    count = 32 // bits
    padded = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % count)])
    columns = padded.reshape(*codes.shape[:-1], -1, count)[..., order or slice(None)]
    packed = np.sum(columns << bits * np.arange(count), axis=-1)
    return packed.astype(np.uint32).view(np.int32)


def codes_of(
    weight: np.ndarray, bits: int, index: np.ndarray, *, symmetric: bool = False
) -> tuple[np.ndarray, ...]:
    """Return (codes [out, in], zeros [out, groups], fp16 scales [out, groups]) for the group of
    each input."""
    groups = int(index.max()) + 1
    codes = np.zeros(weight.shape, np.int64)
    zeros = np.zeros((len(weight), groups), np.int64)
    scales = np.zeros((len(weight), groups), np.float16)
    for g in range(groups):
        part = weight[:, index == g]
        high = np.abs(part).max(1) if symmetric else part.max(1)
        low = -high if symmetric else part.min(1)
        scales[:, g] = (high - low) / (2**bits - 1)
        zeros[:, g] = np.clip(np.round(-low / scales[:, g]), 0, 2**bits - 1)
        if symmetric:
            zeros[:, g] = 2 ** (bits - 1)
        scaled = np.round(part / scales[:, g, None].astype(np.float32)) + zeros[:, g, None]
        codes[:, index == g] = np.clip(scaled, 0, 2**bits - 1)
    return codes, zeros, scales


def weight_of(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, index: np.ndarray):
    """Return (codes - zeros) * scales, element by element."""
    return (codes - zeros[:, index]).astype(np.float32) * scales.astype(np.float32)[:, index]


def in_order(weight: np.ndarray, size: int = GROUP) -> np.ndarray:
    return np.arange(weight.shape[1]) // size


def gptq(
    weight: np.ndarray, *, bits: int = 4, act_order: bool = False, less_one: bool = True
) -> Encoded:
    index = in_order(weight)
    if act_order:
        index = np.random.default_rng(weight.size).permutation(index)
    codes, zeros, scales = codes_of(weight, bits, index)
    stored = {
        "qweight": words(codes, bits).T,
        "qzeros": words(zeros.T - less_one, bits),
        "scales": scales.T,
        "g_idx": index.astype(np.int32),
    }
    return stored, weight_of(codes, zeros, scales, index)


def awq(weight: np.ndarray) -> Encoded:
    index = in_order(weight)
    codes, zeros, scales = codes_of(weight, 4, index)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    stored = {"qweight": words(codes.T, 4, order), "qzeros": words(zeros.T, 4, order)}
    stored["scales"] = scales.T
    return stored, weight_of(codes, zeros, scales, index)


def packed(
    weight: np.ndarray,
    *,
    bits: int = 4,
    symmetric: bool = True,
    act_order: bool = False,
    size: int = GROUP,
    packed_zeros: bool = True,
) -> Encoded:
    index = in_order(weight, size)
    if act_order:
        index = np.random.default_rng(weight.size).permutation(index)
    codes, zeros, scales = codes_of(weight, bits, index, symmetric=symmetric)
    stored = {
        "weight_packed": words(codes, bits),
        "weight_scale": scales.astype(ml_dtypes.bfloat16),
        "weight_shape": np.asarray(weight.shape, np.int64),
    }
    if not symmetric:
        signed = (zeros - 2 ** (bits - 1)).astype(np.int8)  # as older files store it
        stored["weight_zero_point"] = words(zeros.T, bits).T if packed_zeros else signed
    if act_order:
        stored["weight_g_idx"] = index.astype(np.int32)
    return stored, weight_of(codes, zeros, stored["weight_scale"], index)


def scaled(
    weight: np.ndarray,
    block: tuple[int, int],
    *,
    dtype: Any = ml_dtypes.float8_e4m3fn,
    scale: str = "weight_scale",
    scale_dtype: Any = np.float32,
    shape: Callable[[np.ndarray], np.ndarray] = lambda grid: grid,
    zero: int | None = None,
) -> Encoded:
    """Encode one number per element, with one scale for each block."""
    grid = np.zeros([-(-size // of) for size, of in zip(weight.shape, block, strict=True)])
    expanded = np.zeros(weight.shape, np.float32)
    for i, j in np.ndindex(*grid.shape):
        rows = slice(i * block[0], (i + 1) * block[0])
        columns = slice(j * block[1], (j + 1) * block[1])
        grid[i, j] = np.abs(weight[rows, columns]).max() / 100
        if scale_dtype == ml_dtypes.float8_e8m0fnu:
            grid[i, j] = 2.0 ** np.ceil(np.log2(grid[i, j]))
        expanded[rows, columns] = grid[i, j].astype(scale_dtype).astype(np.float32)
    codes = weight / expanded + (zero or 0)
    codes = (np.round(codes) if dtype == np.int8 else codes).astype(dtype)
    stored = {"weight": codes, scale: shape(grid.astype(scale_dtype))}
    if zero is not None:
        stored["weight_zero_point"] = np.full(grid.shape, zero, np.int8)
    return stored, (codes.astype(np.float32) - (zero or 0)) * expanded


def nf4(weight: np.ndarray, *, nested: bool = False) -> Encoded:
    flat = weight.reshape(-1, 64)
    absmax = np.abs(flat).max(1).astype(np.float32)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
    stored: dict[str, np.ndarray] = {"weight.absmax": absmax, "weight.quant_map": NF4}
    if nested:
        table = np.linspace(-1, 1, 256, dtype=np.float32)
        offset = float(absmax.mean())
        scale = np.abs(absmax - offset).max()
        inner = np.abs((absmax - offset)[:, None] / scale - table).argmin(1).astype(np.uint8)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        stored |= {
            "weight.absmax": inner,
            "weight.nested_absmax": np.full(-(-len(inner) // 256), scale, np.float32),
            "weight.nested_quant_map": table,
        }
        absmax = table[inner] * scale + np.float32(offset)
    codes = np.abs(flat[..., None] / absmax[:, None, None] - NF4).argmin(-1)
    halves = codes.reshape(-1, 2)
    stored["weight"] = (halves[:, 0] * 16 + halves[:, 1]).astype(np.uint8)[:, None]
    text = json.dumps(state).encode()
    stored["weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(text, np.uint8)
    return stored, (NF4[codes] * absmax[:, None]).reshape(weight.shape)


def read(layout: Layout, parts: dict[str, np.ndarray]) -> np.ndarray:
    """Return the weight that the library reads from a module's tensors."""
    names = {np.int32: "I32", np.float16: "F16"}
    headers = {
        end: StoredTensor(pathlib.Path(), tensor.shape, names[tensor.dtype.type], end)
        for end, tensor in parts.items()
    }
    stored = StoredParts("module", headers, lambda header: parts[header.stored_as or ""])
    layout.shape(stored)
    return layout.dequantized(stored)

"""bitsandbytes' 4-bit codes: a table of 16 values (nf4, fp4) and a scale for each run of elements.

weight = quant_map[code] * absmax[run], the first code of a byte in its upper half.
Double quantization stores absmax in 8 bits: nested_quant_map[code] * nested_absmax[run] + offset.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvq_jax.files.json_text import parse_json
from kvq_models.llama.quantized.groups import GroupedCodes
from kvq_models.llama.quantized.stored_parts import GROUP, Layout, StoredParts
from kvq_models.llama.stored_tensor import CheckpointError

_F32 = ("F32",)
_BYTES = 2**20


@dataclasses.dataclass(frozen=True)
class Nf4(Layout):
    """`kind` is nf4 or fp4; the table itself comes from the file."""

    kind: str

    @property
    def ends(self) -> tuple[str, ...]:
        nested = ("weight.nested_absmax", "weight.nested_quant_map")
        return ("weight", "weight.absmax", "weight.quant_map", *nested, self._state_name)

    def shape(self, parts: StoredParts) -> tuple[int, ...]:
        state = self._state(parts)
        shape = tuple(state["shape"])
        count = math.prod(shape)
        parts.check("weight", ("U8",), (-(-count // 2), 1))
        parts.check("weight.quant_map", _F32, (16,))
        runs = -(-count // state["blocksize"])
        if "nested_blocksize" in state:
            parts.check("weight.absmax", ("U8",), (runs,))
            parts.check("weight.nested_quant_map", _F32, (256,))
            parts.check("weight.nested_absmax", _F32, (-(-runs // state["nested_blocksize"]),))
        else:
            parts.check("weight.absmax", _F32, (runs,))
        return shape

    def dequantized(self, parts: StoredParts) -> np.ndarray:
        state, packed = self._state(parts), parts.read("weight").reshape(-1)
        table = parts.read("weight.quant_map")
        pairs = np.stack([np.repeat(table, 16), np.tile(table, 16)], axis=1)  # of each byte
        values = np.empty((len(packed), 2), np.float32)
        for start in range(0, len(packed), _BYTES):  # numpy widens an index to 64 bits
            values[start : start + _BYTES] = pairs[packed[start : start + _BYTES]]
        values = values.reshape(-1)[: math.prod(state["shape"])]
        _scale(values, _scales(parts, state), state["blocksize"])
        return values.reshape(state["shape"])

    def packs(self, parts: StoredParts) -> bool:
        state = self._state(parts)
        return state["shape"][-1] % state["blocksize"] == 0 and state["blocksize"] % GROUP == 0

    def grouped(self, parts: StoredParts) -> GroupedCodes:
        state, packed = self._state(parts), parts.read("weight").reshape(-1)
        codes = np.stack([packed >> np.uint8(4), packed & 15], axis=1).reshape(state["shape"])
        scales = _scales(parts, state).reshape(len(codes), -1)
        levels = tuple(parts.read("weight.quant_map").tolist())
        return GroupedCodes(codes, scales, np.zeros_like(scales, np.int8), 4, levels=levels)

    @property
    def _state_name(self) -> str:
        return f"weight.quant_state.bitsandbytes__{self.kind}"

    def _state(self, parts: StoredParts) -> Mapping[str, Any]:
        """Return the JSON object that describes the weight. Raise CheckpointError if it does not
        state sizes."""
        parts.shape(self._state_name, ("U8",), rank=1)
        try:
            state = parse_json(parts.read(self._state_name).tobytes())
            sizes = [*state["shape"], state["blocksize"], state.get("nested_blocksize", 1)]
            offset = state.get("nested_offset", None if "nested_blocksize" in state else 0.0)
        except (ValueError, TypeError, KeyError, AttributeError):
            state, sizes, offset = {}, [], None
        whole = all(type(size) is int and size > 0 for size in sizes)
        if len(sizes) != 4 or not whole or not isinstance(offset, float | int):
            raise CheckpointError(
                f"tensor {parts.module + '.' + self._state_name!r} does not state the weight's"
                " shape and blocksize"
            )
        return state


def _scales(parts: StoredParts, state: Mapping[str, Any]) -> np.ndarray:
    absmax = parts.read("weight.absmax")
    if "nested_blocksize" in state:
        absmax = parts.read("weight.nested_quant_map")[absmax]
        _scale(absmax, parts.read("weight.nested_absmax"), state["nested_blocksize"])
        absmax += np.float32(state["nested_offset"])
    return absmax


def _scale(values: np.ndarray, scales: np.ndarray, run: int) -> None:
    """Multiply each run of values in place. The last run may be cut off."""
    whole = len(values) // run
    values[: whole * run].reshape(whole, run)[...] *= scales[:whole, None]
    values[whole * run :] *= scales[whole:]

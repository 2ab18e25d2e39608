"""The field quantization_config of config.json: the layout of each module's tensors.

Publishers write it in the dialect of their tool. Whatever would change the weights and is not read
is refused by name. Quantization of activations and of the KV cache changes no weight and is not
looked at.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from kvq_models.llama.config_fields import quantization_fields
from kvq_models.llama.quantized.awq import Awq
from kvq_models.llama.quantized.dense_and_sparse import METHOD as DENSE_AND_SPARSE
from kvq_models.llama.quantized.dense_and_sparse import DenseAndSparse
from kvq_models.llama.quantized.gptq import Gptq
from kvq_models.llama.quantized.mxfp4 import Mxfp4
from kvq_models.llama.quantized.name_patterns import NamePattern
from kvq_models.llama.quantized.nf4 import Nf4
from kvq_models.llama.quantized.packed_int import PackedInt
from kvq_models.llama.quantized.scaled_codes import PER_OUTPUT, PER_TENSOR, Block, ScaledCodes
from kvq_models.llama.quantized.stored_parts import Layout

METHODS = (
    "fp8, fbgemm_fp8, compressed-tensors, awq, gptq, bitsandbytes (4 bits), mxfp4, modelopt (FP8),"
    f" {DENSE_AND_SPARSE}"
)
_SUPPORTED = f"unquantized checkpoints, {METHODS}, or a GGUF file of the model"
# Files beside config.json in which tools state it, too, or alone, with the method they leave out.
OWN_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
_INTS = {"int": "I8", "float": "F8_E4M3"}
_CODES = {
    "int-quantized": ("int",),
    "float-quantized": ("float",),
    "naive-quantized": ("int", "float"),
}
_EVERY_LINEAR = ("Linear",)


@dataclasses.dataclass(frozen=True)
class Quantization:
    """Layouts with the modules that have them, and the modules that are left alone."""

    layouts: tuple[tuple[tuple[str, ...], Layout], ...]
    ignored: tuple[str, ...]

    def layout_of(self, module: str) -> Layout | None:
        """Return the layout of a module's weight if it is quantized. A module's own name comes
        before its class."""
        named = (layout for targets, layout in self.layouts if _names(targets, module))
        linear = (layout for targets, layout in self.layouts if "Linear" in targets)
        return next(named, None) or next(linear, None)

    def ignores(self, module: str) -> bool:
        """Return True if the configuration leaves a module out."""
        return _names(self.ignored, module)


def quantization_of(hf: Mapping[str, Any]) -> Quantization | None:
    """Return what quantization_config says, or None without one. Raise NotImplementedError, in one
    line, for a method or a setting that is not read."""
    fields = quantization_fields(hf)
    if fields is None:
        return None
    stated = fields if isinstance(fields, Mapping) else {}
    method = str(stated.get("quant_method", "bitsandbytes" if "load_in_4bit" in stated else ""))
    if method.lower().replace("_", "-") == "compressed-tensors":
        return _compressed_tensors(stated)
    readers = {
        "fp8": _fp8,
        "fbgemm_fp8": lambda _: ScaledCodes("F8_E4M3", (PER_OUTPUT,)),
        "awq": _awq,
        "gptq": _gptq,
        "bitsandbytes": _bitsandbytes,
        "mxfp4": lambda _: Mxfp4(),
        "modelopt": _modelopt,
        DENSE_AND_SPARSE: _dense_and_sparse,
    }
    if method.lower() not in readers:
        raise _refusal(stated, _SUPPORTED)
    return Quantization(((_EVERY_LINEAR, readers[method.lower()](stated)),), _left_out(stated))


def _fp8(fields: Mapping[str, Any]) -> Layout:
    _one_of(fields, "fmt", ("e4m3", "float8_e4m3fn", None))
    _one_of(fields, "expert_dtype", ("fp8", None))
    block = fields.get("weight_block_size")
    blocks: tuple[Block, ...] = (PER_TENSOR, PER_OUTPUT)
    if block is not None:
        blocks = (_block(fields, "weight_block_size", block),)
    elif "weight_block_size" not in fields:
        blocks = (*blocks, (128, 128))  # what transformers takes
    return ScaledCodes("F8_E4M3", blocks)


def _modelopt(fields: Mapping[str, Any]) -> Layout:
    """Return the layout of FP8, which is also that of a quantized KV cache alone: all weights are
    floats then."""
    if fields.get("quant_algo") not in ("FP8", None):
        raise _refusal(fields, _SUPPORTED)
    return ScaledCodes("F8_E4M3", (PER_TENSOR, PER_OUTPUT))


def _awq(fields: Mapping[str, Any]) -> Layout:
    _one_of(fields, "bits" if "bits" in fields else "w_bit", (4,))
    for name in ("version", "format", "checkpoint_format"):
        _one_of(fields, name, ("gemm", "GEMM", None))
    _one_of(fields, "zero_point", (True, None))
    if fields.get("backend") == "llm-awq":
        raise _setting(fields, "backend", "autoawq")
    name = "group_size" if "group_size" in fields else "q_group_size"
    return Awq(_group_size(fields, name))


def _gptq(fields: Mapping[str, Any]) -> Layout:
    bits = _one_of(fields, "bits", (2, 4, 8))
    name = "checkpoint_format" if fields.get("checkpoint_format") else "format"
    form = _one_of(fields, name, ("gptq", "gptq_v2", "", None))
    _one_of(fields, "is_marlin_format", (False, None))
    if any(not key.startswith("-:") for key in _strings(fields, "dynamic")):
        raise _setting(fields, "dynamic", "modules that are left out (keys with -:)")
    act_order = fields.get("desc_act") is True
    size = _group_size(fields, "group_size")
    return Gptq(bits, size, act_order, zeros_less_one=form != "gptq_v2")


def _bitsandbytes(fields: Mapping[str, Any]) -> Layout:
    _one_of(fields, "load_in_4bit", (True,))
    _one_of(fields, "bnb_4bit_quant_storage", ("uint8", None))
    return Nf4(_one_of(fields, "bnb_4bit_quant_type", ("nf4", "fp4")))


def _dense_and_sparse(fields: Mapping[str, Any]) -> Layout:
    _one_of(fields, "bits", (4,))
    return DenseAndSparse()


def _compressed_tensors(fields: Mapping[str, Any]) -> Quantization:
    """Return the layouts of the groups. A group without `weights` quantizes activations or the KV
    cache alone."""
    sparsity = fields.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, Mapping) and sparsity.get("format") == "dense"):
        raise _setting(fields, "sparsity_config", "none")
    if fields.get("transform_config"):
        raise _setting(fields, "transform_config", "none")
    layouts = []
    groups = fields.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(g, Mapping) for g in groups.values()):
        raise _setting(fields, "config_groups", "an object of groups")
    for group in groups.values():
        if group.get("weights") is not None:
            targets = _patterns(group, "targets") or _EVERY_LINEAR
            layouts.append((targets, _scheme(fields, group)))
    if not groups and fields.get("format") not in ("dense", None):
        raise _refusal(fields, "config_groups with the weights of its format")
    return Quantization(tuple(layouts), _left_out(fields))


def _scheme(fields: Mapping[str, Any], group: Mapping[str, Any]) -> Layout:
    """Return the layout of a group of compressed-tensors' modules."""
    weights = group["weights"]
    if not isinstance(weights, Mapping):
        raise _setting(group, "weights", "an object")
    layout = group.get("format") or fields.get("format")
    if layout == "pack-quantized":
        _one_of(weights, "type", ("int", None))
        _one_of(weights, "strategy", ("group", "channel"))
        size = _group_size(weights, "group_size") if weights["strategy"] == "group" else -1
        bits = _one_of(weights, "num_bits", (4, 8))
        return PackedInt(bits, size, weights.get("symmetric") is not False)
    if layout not in _CODES:
        supported = f"{', '.join(_CODES)}, pack-quantized"
        raise _refusal(dict(fields) | {"format": layout}, f"format {supported}")
    _one_of(weights, "num_bits", (8,))
    kind = _one_of(weights, "type", _CODES[layout])
    strategy = _one_of(weights, "strategy", ("tensor", "channel", "group", "block"))
    if strategy == "group":
        size = _group_size(weights, "group_size")
        block: Block = (1, None if size == -1 else size)
    elif strategy == "block":
        block = _block(weights, "block_structure", weights.get("block_structure"))
    else:
        block = PER_TENSOR if strategy == "tensor" else PER_OUTPUT
    return ScaledCodes(_INTS[kind], (block,))


def _left_out(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the modules that the configuration leaves out, under the names of all dialects."""
    names = (
        "modules_to_not_convert",
        "ignored_layers",
        "ignore",
        "exclude_modules",
        "llm_int8_skip_modules",
    )
    stated = [module for name in names for module in _patterns(fields, name)]
    return (*stated, *_patterns(fields, "dynamic"))


def _patterns(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the modules that a field names, as `_names` takes them. Raise NotImplementedError for
    a regular expression that is not read."""
    patterns = _strings(fields, name)
    if name == "dynamic":  # whose keys are regular expressions
        patterns = tuple(f"re:{key.removeprefix('-:')}" for key in patterns)
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                _compiled(pattern[3:])
            except ValueError as error:
                raise NotImplementedError(
                    f"config field quantization_config has {pattern!r:.60} in {name}, which is not"
                    f" a regular expression that is read: {error}"
                ) from error
    return patterns


def _strings(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the strings of a list, the keys of an object, or one string alone."""
    value = fields.get(name) or ()
    value = (value,) if isinstance(value, str) else value
    if not isinstance(value, list | tuple | dict) or not all(isinstance(v, str) for v in value):
        raise _setting(fields, name, "a list of names")
    return tuple(value)


def _names(patterns: tuple[str, ...], module: str) -> bool:
    """Return True if a pattern names a module: a regular expression after "re:", or whole parts of
    its name (gate is mlp.gate, and not mlp.gate_proj)."""
    return any(
        _compiled(pattern[3:]).matches(module)
        if pattern.startswith("re:")
        else f".{pattern}." in f".{module}."
        for pattern in patterns
    )


_compiled = functools.lru_cache(maxsize=1024)(NamePattern)


def _one_of(fields: Mapping[str, Any], name: str, allowed: tuple[Any, ...]) -> Any:
    value = fields.get(name)
    if not any(value == one and type(value) is type(one) for one in allowed):
        raise _setting(fields, name, " or ".join(str(one) for one in allowed if one))
    return value


def _group_size(fields: Mapping[str, Any], name: str) -> int:
    size = fields.get(name, 128)
    if type(size) is not int or (size < 1 and size != -1):
        raise _setting(fields, name, "a positive number, or -1 for all inputs")
    return size


def _block(fields: Mapping[str, Any], name: str, block: Any) -> Block:
    if (
        not isinstance(block, list | tuple)
        or len(block) != 2
        or any(type(size) is not int or size < 1 for size in block)
    ):
        raise _setting(fields, name, "two positive numbers")
    return block[0], block[1]


def _setting(fields: Mapping[str, Any], name: str, supported: str) -> NotImplementedError:
    return NotImplementedError(
        f"config field quantization_config has {name}={str(fields.get(name))[:40]!r}, which is not"
        f" supported; supported: {supported}"
    )


def _refusal(fields: Mapping[str, Any], supported: str) -> NotImplementedError:
    names = ("quant_method", "quant_algo", "bits", "format", "load_in_4bit", "load_in_8bit")
    stated = [f"{name}={str(fields[name])[:40]!r}" for name in names if name in fields]
    return NotImplementedError(
        f"config field quantization_config has {', '.join(stated) or 'no quant_method'}, which is"
        f" not supported; supported: {supported}"
    )

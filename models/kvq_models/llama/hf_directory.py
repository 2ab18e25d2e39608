"""Hugging Face checkpoints: a directory with config.json, safetensors and a tokenizer, or the local
snapshot of one on the Hub."""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from kvq_jax.files.checksum import SHA256, Checksum
from kvq_jax.files.json_text import parse_json
from kvq_models.llama import fused_tensors, generation_defaults, text_part
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.config_fields import quantization_fields, token_ids
from kvq_models.llama.end_tokens import end_tokens
from kvq_models.llama.hf_tokenizer import (
    TOKENIZER_EXTRAS,
    TOKENIZER_FILES,
    added_tokens,
    end_of_sequence,
    load_tokenizer,
)
from kvq_models.llama.quantized.groups import GroupedCodes
from kvq_models.llama.quantized.kv_scales import KVScales, read_kv_scales
from kvq_models.llama.quantized.quantization_config import OWN_FILES, quantization_of
from kvq_models.llama.quantized.quantized_weights import QuantizedWeight, gathered
from kvq_models.llama.quantized.raw_tensors import RawTensors
from kvq_models.llama.stored_tensor import (
    NUMBERS,
    CheckpointError,
    StoredTensor,
    first_line,
    lfs_pointer,
)
from kvq_models.llama.tensor_names import EMBED_NAME, HEAD_NAME

CONFIG_FILES = ("config.json", "generation_config.json")
INDEX_FILE = "model.safetensors.index.json"
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")

_PREFIX = "model."
_WRAPPERS = re.compile(r"^((_orig_mod|module)\.)+")


class HfDirectory:
    """The directory of a checkpoint. Everything is read on demand."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # checksums of the tensors read so far, by file
        self._checksums: dict[Path, Checksum] = defaultdict(Checksum)
        self._check_files()

    def _check_files(self) -> None:
        """Raise CheckpointError if a file of the checkpoint is not a regular file: reading a pipe
        would wait forever."""
        names = (*CONFIG_FILES, *OWN_FILES, *TOKENIZER_FILES, *TOKENIZER_EXTRAS, INDEX_FILE)
        for path in (
            *(self.directory / name for name in names),
            *sorted(self.directory.glob("*.safetensors")),
        ):
            if path.exists() and not path.is_file():
                raise CheckpointError(f"{str(path)!r} is not a regular file")

    @functools.cached_property
    def config(self) -> LlamaConfig:
        """Return the model's configuration. Its end tokens are those of config.json,
        generation_config.json and the tokenizer together."""
        config = LlamaConfig.from_hf(self.fields)
        if self._is_tied():
            config = dataclasses.replace(config, tie_word_embeddings=True)
        generation_file = self.directory / "generation_config.json"
        generation = read_json(generation_file) if generation_file.exists() else {}
        added = added_tokens(self.directory)
        stated = (
            *token_ids(generation, "eos_token_id"),
            *config.eos_token_ids,
            added.get(end_of_sequence(self.directory) or ""),
        )
        return dataclasses.replace(
            config,
            eos_token_ids=end_tokens(stated, added, config.vocab_size),
            generation=generation_defaults.of_hf(generation),
        )

    @functools.cached_property
    def fields(self) -> Mapping[str, Any]:
        """Return the language model's fields in config.json, with what a file of its own says about
        quantization if config.json says nothing."""
        fields = text_part.text_fields(self._stated)
        names = [name for name in OWN_FILES if (self.directory / name).exists()]
        if not names or quantization_fields(fields):
            return fields
        stated = {"quant_method": OWN_FILES[names[0]]} | read_json(self.directory / names[0])
        return {**fields, "quantization_config": stated}

    @functools.cached_property
    def _stated(self) -> dict[str, Any]:
        return read_json(self.directory / "config.json")

    @functools.cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Return the tensors in the headers of all files. A truncated file fails here, because a
        header's offsets must cover its file exactly.

        A shared tensor is stored once. `safetensors.torch.save_model` keeps one of its names, often
        lm_head.weight, and maps the others to it in the metadata. A head without an embedding in a
        tied model is the embedding, as in transformers.
        """
        (stored, _), shared = self._weights, self._headers[1]
        stored = fused_tensors.apart(stored, self._slices)
        if HEAD_NAME in stored and self.config.tie_word_embeddings:
            shared = {EMBED_NAME: HEAD_NAME} | shared
        aliases = {
            name: kept for name, kept in shared.items() if name not in stored and kept in stored
        }
        return stored | {
            name: dataclasses.replace(stored[kept], stored_as=stored[kept].stored_as or kept)
            for name, kept in aliases.items()
        }

    @functools.cached_property
    def _slices(self) -> dict[str, fused_tensors.Slice]:
        return fused_tensors.slices(self.config, self._weights[0])

    @functools.cached_property
    def _headers(self) -> tuple[dict[str, StoredTensor], dict[str, str]]:
        """Return (headers by name, names of shared tensors with the name that is stored).

        A model that was saved without its head, as LlamaModel, lacks the prefix "model." of every
        name. It is added, as in transformers. Prefixes of PyTorch's wrappers (torch.compile, DDP)
        are removed, and so are tensors that read images.
        """
        stored: dict[str, StoredTensor] = {}
        shared: dict[str, str] = {}
        for file in self.weight_files:
            with _opened(file) as tensors:
                names = tensors.keys()
                for name in names:
                    if name in stored:
                        raise CheckpointError(
                            f"tensor {name!r} is in both {stored[name].file.name!r} and"
                            f" {file.name!r}"
                        )
                    header = tensors.get_slice(name)
                    stored[name] = StoredTensor(file, tuple(header.get_shape()), header.get_dtype())
                shared |= tensors.metadata() or {}
        stored = text_part.without_images(self._stated, stored)
        bare = {name: _WRAPPERS.sub("", name) for name in stored}
        if EMBED_NAME.removeprefix(_PREFIX) in bare.values():
            bare = {
                name: one if one == HEAD_NAME else f"{_PREFIX}{one}" for name, one in bare.items()
            }
        if len(set(bare.values())) < len(bare):  # wrapped and plain names of the same tensors
            return stored, shared
        return {
            bare[name]: tensor
            if bare[name] == name
            else dataclasses.replace(tensor, stored_as=name)
            for name, tensor in stored.items()
        }, shared

    @functools.cached_property
    def _weights(self) -> tuple[dict[str, StoredTensor], dict[str, QuantizedWeight]]:
        """Return (headers with one tensor for each weight, the quantized weights by the file's
        names, which are those of the configuration)."""
        stored, quantized = gathered(
            self._headers[0], quantization_of(self.fields), RawTensors(self._check_part)
        )
        return text_part.text_tensors(self._stated, stored), quantized

    def kv_scales(self) -> KVScales | None:
        """Return the scales that the files have for an fp8 cache, or None. Raise CheckpointError
        if they are damaged."""
        config = self.config
        headers = text_part.text_tensors(self._stated, self._headers[0])
        return read_kv_scales(
            headers, RawTensors(), config.num_hidden_layers, config.num_key_value_heads
        )

    def _is_tied(self) -> bool:
        """Return True if config.json does not say whether the head is tied, and the files hold no
        head: nothing else can be meant."""
        if self.fields.get("tie_word_embeddings") is not None:
            return False
        try:
            (stored, _), shared = self._weights, self._headers[1]
        except CheckpointError:  # no weights here: a configuration alone
            return False
        return EMBED_NAME in stored and HEAD_NAME not in {*stored, *shared}

    @property
    def weight_files(self) -> list[Path]:
        """Return the weight files: model.safetensors, or the shards that the index lists, or every
        *.safetensors."""
        directory = self.directory
        if (directory / "model.safetensors").exists():
            return [directory / "model.safetensors"]
        index_file = directory / INDEX_FILE
        if index_file.exists():
            return _indexed_files(index_file)
        files = sorted(directory.glob("*.safetensors"))
        if files:
            return files
        if (
            any(directory.glob("*.bin"))
            or any(directory.glob("*.pt"))
            or any(directory.glob("*.pth"))
        ):
            raise CheckpointError(
                f"{str(directory)!r} has pickled weights only, which can run code and are refused:"
                " convert to safetensors"
            )
        raise CheckpointError(f"no *.safetensors in {str(directory)!r}")

    def read(self, name: str) -> np.ndarray:
        """Return a host copy of one tensor, a quantized weight in float32. The file is opened for
        each tensor, because the pages of an open mapping stay in memory.

        A file with a checksum (`save_llama` writes one) is verified with the last of its tensors.
        Raises CheckpointError if it is damaged.
        """
        if (weight := self._quantized(name)) is not None:
            return self._slice(name, weight.read())
        stored = self._float_tensor(name)
        with _opened(stored.file) as tensors:
            stored_name = stored.stored_as or name
            tensor, count = tensors.get_tensor(stored_name), len(tensors.keys())
            header = tensors.metadata() or {}
        self._check(stored.file, stored_name, tensor, header, count)
        return self._slice(name, tensor)

    def _check(
        self, file: Path, name: str, tensor: np.ndarray, header: Mapping[str, str], count: int
    ) -> None:
        """Add a tensor to the checksum of its file, if the header has one, and verify it with the
        last of its `count` tensors."""
        if SHA256 not in header:
            return
        checksum = self._checksums[file]
        checksum.add(name, tensor)
        if len(checksum) == count:
            try:
                checksum.check(repr(str(file)), header, required=True)
            except ValueError as error:
                raise CheckpointError(str(error)) from None

    def _check_part(self, stored: StoredTensor, tensor: np.ndarray, header: dict[str, Any]) -> None:
        """Check a tensor of a quantized weight, of a file whose header is given as it is stored."""
        metadata = header.get("__metadata__", {})
        names = header.keys() - {"__metadata__"}
        self._check(stored.file, stored.stored_as or "", tensor, metadata, len(names))

    def parts(self, name: str) -> Callable[[tuple[slice, ...]], np.ndarray]:
        """Return a function that reads only a part of one tensor. Damage of a part is not
        detected. A quantized weight, and a slice of a tensor, are read as a whole."""
        if self._quantized(name) is not None or name in self._slices:
            whole = self.read(name)
            return lambda index: whole[index]
        stored = self._float_tensor(name)

        def read(index: tuple[slice, ...]) -> np.ndarray:
            with _opened(stored.file) as tensors:
                return tensors.get_slice(stored.stored_as or name)[index]

        return read

    def packs(self, name: str) -> bool:
        """Return True if a tensor can be read packed: a matrix of numbers of 16 bits, or of codes
        with scales for whole groups of inputs or with tables, or the experts of gpt-oss in
        MXFP4."""
        from kvq_models.llama.gguf_blocks import is_whole  # imported late: it needs JAX

        stored, piece, experts = self.tensors[name], self._slices.get(name), ".experts." in name
        weight = self._quantized(name)
        if weight is not None and len(stored.shape) == 3:
            by_expert = (*stored.shape[:-2], *stored.shape[:-3:-1])
            return experts and weight.packs and is_whole(by_expert, experts=True)
        if weight is not None and weight.has_tables:
            return piece is None and not experts and weight.packs
        rows = piece is None or piece.axis == 0
        whole = len(stored.shape) == 2 and is_whole(stored.shape, experts=experts)
        kept = stored.dtype in NUMBERS if weight is None else weight.packs
        return rows and whole and kept

    def packed(self, names: Sequence[str], dtype: Any) -> tuple[Any, bool]:
        """Return a tensor that `packs` as a packed matrix [in, out] of its values, and True if all
        of it is finite. The outputs of several tensors, or of all experts in one, lie behind each
        other."""
        from kvq_models.llama import gguf_blocks, tabled_weights  # imported late: they need JAX

        weight = self._quantized(names[0])
        if weight is not None and weight.has_tables:
            return tabled_weights.matrix_of_rows(weight.tabled(), dtype)
        if weight is not None and len(self.tensors[names[0]].shape) == 2:
            return gguf_blocks.matrix_of_codes([self._grouped(name) for name in names], dtype)
        if weight is not None:
            blocks, piece = weight.blocks(), self._slices.get(names[0])
            rows = blocks if piece is None else blocks[:, piece.part]
            return gguf_blocks.packed_matrix(
                rows.reshape(-1, *rows.shape[-2:]), "MXFP4", None, dtype
            )
        rows = [np.asarray(self.read(name)) for name in names]
        return gguf_blocks.matrix_of_numbers(
            rows[0] if len(rows) == 1 else np.concatenate(rows), dtype
        )

    def _grouped(self, name: str) -> GroupedCodes:
        weight = self._quantized(name)
        assert weight is not None
        codes, of = weight.grouped(), functools.partial(self._slice, name)
        return dataclasses.replace(
            codes, codes=of(codes.codes), scales=of(codes.scales), zeros=of(codes.zeros)
        )

    def _slice(self, name: str, tensor: np.ndarray) -> np.ndarray:
        """Return the weight of this name, which may be a slice of the file's tensor."""
        return self._slices[name].of(tensor) if name in self._slices else tensor

    def is_zero_bias(self, name: str) -> bool:
        """Return True for a bias of zeros beside a quantized weight. AutoGPTQ writes one for every
        module, also if the model has no biases."""
        weight = f"{name.removesuffix('.bias')}.weight"
        beside = name.endswith(".bias") and weight in self.tensors
        return beside and self._quantized(weight) is not None and not self.read(name).any()

    def _quantized(self, name: str) -> QuantizedWeight | None:
        return self._weights[1].get(self.tensors[name].stored_as or name)

    def _float_tensor(self, name: str) -> StoredTensor:
        """Return the header of a tensor of floats. Raise CheckpointError if it is of another
        type."""
        stored = self.tensors[name]
        if stored.dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"tensor {name!r} is stored as {stored.dtype}; supported: {', '.join(FLOAT_DTYPES)}"
            )
        return stored

    def tokenizer(self) -> Any:
        return load_tokenizer(self.directory)

    def write_tokenizer(self, directory: Path) -> None:
        """Copy the tokenizer's files and the generation settings unchanged."""
        for name in ("generation_config.json", *TOKENIZER_FILES, *TOKENIZER_EXTRAS):
            if (self.directory / name).exists():
                shutil.copy(self.directory / name, directory / name)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raise CheckpointError if there is none."""
    if not path.is_file():
        raise CheckpointError(f"{path.name} is missing in {str(path.parent)!r}")
    try:
        fields = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{str(path)!r} is not valid JSON: {first_line(error)}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(
            f"{str(path)!r} must hold a JSON object, not a {type(fields).__name__}"
        )
    return fields


def _indexed_files(index_file: Path) -> list[Path]:
    weight_map = read_json(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{str(index_file)!r} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(
                f"{index_file.name} lists {name!r}, which is not a file name in the same directory"
            )
        if not (index_file.parent / name).is_file():
            raise CheckpointError(
                f"{index_file.name} lists {name!r}, which is missing in {str(index_file.parent)!r}"
            )
    return [index_file.parent / name for name in names]


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="numpy") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        reason = lfs_pointer(file) or first_line(error)
        raise CheckpointError(f"{str(file)!r} is not a whole safetensors file: {reason}") from error

"""Hugging Face checkpoints in and out: safetensors only, no pickle, no code from the checkpoint.

Loading checks every name, shape and dtype from the files' headers first, then reads tensor by tensor: the host's peak is the model itself
plus two copies of its largest tensor. Every problem is one line that names the file, tensor or field.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tqdm import tqdm

from kvq_jax.cache.atomic_files import replacing
from kvq_models.llama import hf_names
from kvq_models.llama.config import LlamaConfig, token_ids
from kvq_models.llama.model import Llama, abstract_llama

CONFIG_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json")
TOKENIZER_EXTRAS = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
WEIGHT_FILES = ("*.safetensors", "model.safetensors.index.json")
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
MODEL_DTYPES = ("float32", "bfloat16", "float16")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message is one line and says which file or tensor, and why."""


@dataclasses.dataclass(frozen=True)
class _Stored:
    """Where a tensor lies and what its header says."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def load_llama(path_or_hub_id: str | os.PathLike[str], *, dtype: DTypeLike = "bfloat16") -> tuple[Llama, Any]:
    """Loads a local directory or a Hub checkpoint as (llama, tokenizer); the tokenizer is None where the checkpoint has none.

    Weights are cast to `dtype` (float32, bfloat16 or float16) one tensor at a time. A tied checkpoint that also stores a head keeps that
    head where it differs from the embedding, as in transformers.
    Raises CheckpointError for files and tensors, ValueError or NotImplementedError for fields of config.json (`LlamaConfig.from_hf`).
    """
    if jnp.dtype(dtype).name not in MODEL_DTYPES:
        raise ValueError(f"dtype={jnp.dtype(dtype).name!r} is not supported; supported: {', '.join(MODEL_DTYPES)}")
    directory = checkpoint_directory(path_or_hub_id, CONFIG_FILES + WEIGHT_FILES + TOKENIZER_FILES + TOKENIZER_EXTRAS)
    config = _read_config(directory)
    stored = read_headers(weight_files(directory))
    config = _untie_if_stored_apart(config, stored)
    abstract = abstract_llama(config, dtype)
    _check_tensors(hf_names.weights(abstract), stored, tied=config.tie_word_embeddings)
    return _read_weights(abstract, stored), load_tokenizer(directory)


def read_config(path_or_hub_id: str | os.PathLike[str]) -> LlamaConfig:
    """The configuration alone, without touching (or downloading) weights. Raises as `load_llama`."""
    return _read_config(checkpoint_directory(path_or_hub_id, CONFIG_FILES))


def save_llama(llama: Llama, directory: str | os.PathLike[str], tokenizer: Any = None) -> None:
    """Writes config.json, model.safetensors and the tokenizer's files, which transformers' AutoModelForCausalLM loads.

    Weights keep their dtype; parameters of cache methods are not part of a checkpoint and are not written. The host holds one more copy of
    the model meanwhile. Each file appears whole or not at all. Raises ValueError where `LlamaConfig.to_hf` does.
    """
    directory = Path(directory)
    fields = llama.config.to_hf() | {"torch_dtype": llama.embed[...].dtype.name}  # the key that old and new versions read
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {w.name: np.asarray(w.leaf.T if w.transpose else w.leaf) for w in hf_names.weights(llama).values()}
    with replacing(directory / "model.safetensors") as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    with replacing(directory / "config.json") as temporary:
        temporary.write_text(json.dumps(fields, indent=2) + "\n")
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


# --- files --------------------------------------------------------------------------------------------------------------------------------


def checkpoint_directory(path_or_hub_id: str | os.PathLike[str], patterns: tuple[str, ...]) -> Path:
    """The local directory, or the local snapshot of the files of a Hub checkpoint that match `patterns`."""
    path = Path(path_or_hub_id)
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{str(path)!r} is not a directory; a checkpoint is a directory with config.json and safetensors")
    if not isinstance(path_or_hub_id, str) or not _HUB_ID.fullmatch(path_or_hub_id):
        raise CheckpointError(f"{str(path)!r} does not exist, and is no Hub id (organisation/name)")
    from huggingface_hub import snapshot_download  # imported late: only Hub ids need it
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        # Originals in another layout would double the download.
        ignored = ["consolidated*", "original/*"]
        return Path(snapshot_download(path_or_hub_id, allow_patterns=list(patterns), ignore_patterns=ignored))
    except LocalEntryNotFoundError as error:
        raise CheckpointError(f"{path_or_hub_id!r} does not exist here, and the Hub could not be reached to look for it there") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path_or_hub_id!r} does not exist here, and the Hub answered: {_first_line(error)}") from error


def _read_config(directory: Path) -> LlamaConfig:
    """config.json, with the end-of-sequence tokens of generation_config.json where it has them: those are what generation stops at."""
    config = LlamaConfig.from_hf(read_json(directory / "config.json"))
    generation_file = directory / "generation_config.json"
    eos_token_ids = token_ids(read_json(generation_file), "eos_token_id") if generation_file.exists() else ()
    return dataclasses.replace(config, eos_token_ids=eos_token_ids or config.eos_token_ids)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; CheckpointError where there is none."""
    if not path.is_file():
        raise CheckpointError(f"{path.name} is missing in {str(path.parent)!r}")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{str(path)!r} is not valid JSON: {_first_line(error)}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{str(path)!r} must hold a JSON object, not a {type(fields).__name__}")
    return fields


def weight_files(directory: Path) -> list[Path]:
    """model.safetensors, or the shards that the index lists, or every *.safetensors."""
    if (directory / "model.safetensors").exists():
        return [directory / "model.safetensors"]
    index_file = directory / "model.safetensors.index.json"
    if index_file.exists():
        return _indexed_files(index_file)
    files = sorted(directory.glob("*.safetensors"))
    if files:
        return files
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt")) or any(directory.glob("*.pth")):
        raise CheckpointError(f"{str(directory)!r} has pickled weights only, which can run code and are refused: convert to safetensors")
    raise CheckpointError(f"no *.safetensors in {str(directory)!r}")


def _indexed_files(index_file: Path) -> list[Path]:
    weight_map = read_json(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{str(index_file)!r} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{index_file.name} lists {name!r}, which is not a file name in the same directory")
        if not (index_file.parent / name).is_file():
            raise CheckpointError(f"{index_file.name} lists {name!r}, which is missing in {str(index_file.parent)!r}")
    return [index_file.parent / name for name in names]


def read_headers(files: list[Path]) -> dict[str, _Stored]:
    """What every file says that it holds. A truncated file fails here: the header's offsets must cover the file exactly."""
    stored: dict[str, _Stored] = {}
    for file in files:
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118  (safe_open is no mapping)
                if name in stored:
                    raise CheckpointError(f"tensor {name!r} is in both {stored[name].file.name!r} and {file.name!r}")
                header = tensors.get_slice(name)
                stored[name] = _Stored(file, tuple(header.get_shape()), header.get_dtype())
    return stored


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="numpy") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{str(file)!r} is not a whole safetensors file: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# --- tensors ------------------------------------------------------------------------------------------------------------------------------


def _untie_if_stored_apart(config: LlamaConfig, stored: Mapping[str, _Stored]) -> LlamaConfig:
    """A tied config whose files hold a head that differs from the embedding was not tied when it was trained."""
    pair = [stored.get(hf_names.EMBED_NAME), stored.get(hf_names.HEAD_NAME)]
    if not config.tie_word_embeddings or None in pair:
        return config
    embed, head = (read_tensor(stored, name) for name in (hf_names.EMBED_NAME, hf_names.HEAD_NAME))
    return config if np.array_equal(embed, head) else dataclasses.replace(config, tie_word_embeddings=False)


def _check_tensors(expected: Mapping[str, hf_names.Weight], stored: Mapping[str, _Stored], *, tied: bool) -> None:
    shapes = {weight.name: weight.hf_shape for weight in expected.values()}
    accounted = shapes.keys() | ({hf_names.HEAD_NAME} if tied else set())
    unmatched = [name for name in stored if name not in accounted and not hf_names.IGNORED.fullmatch(name)]
    if unmatched:
        raise CheckpointError(f"the files hold {_some(unmatched)}, for which the model of config.json has no place")
    missing = [name for name in shapes if name not in stored]
    if missing:
        raise CheckpointError(f"the files lack {_some(missing)}, which the model of config.json needs")
    for name, shape in shapes.items():
        if stored[name].dtype not in FLOAT_DTYPES:
            raise CheckpointError(f"tensor {name!r} is stored as {stored[name].dtype}; supported: {', '.join(FLOAT_DTYPES)}")
        if stored[name].shape != shape:
            raise CheckpointError(f"tensor {name!r} has shape {stored[name].shape}, and config.json asks for {shape}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"tensor {names[0]!r}{more}"


def _read_weights(abstract: Llama, stored: Mapping[str, _Stored]) -> Llama:
    """Fills the abstract model tensor by tensor."""
    values: dict[str, jax.Array] = {}
    expected = hf_names.weights(abstract).items()
    for path, weight in tqdm(expected, desc="loading weights", unit="tensor", leave=False, delay=1.0, disable=None):
        values[path] = _placed(read_tensor(stored, weight.name), transpose=weight.transpose, dtype=weight.leaf.dtype)
    return hf_names.replace_weights(abstract, values)


def read_tensor(stored: Mapping[str, _Stored], name: str) -> np.ndarray:
    """A host copy of one tensor. Its file is opened for it alone, because the pages of an open mapping stay in memory."""
    with _opened(stored[name].file) as tensors:
        return tensors.get_tensor(name)


@functools.partial(jax.jit, static_argnames=("transpose", "dtype"))
def _placed(tensor: np.ndarray | jax.Array, *, transpose: bool, dtype: DTypeLike) -> jax.Array:
    """The tensor on the device, turned and cast there: strided copies on the host would take most of the loading time."""
    return (jnp.transpose(tensor) if transpose else jnp.asarray(tensor)).astype(dtype)


def load_tokenizer(directory: Path) -> Any:
    """The directory's tokenizer, or None where it has none."""
    if not any((directory / name).exists() for name in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer  # imported late: seconds

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises no narrower one for a broken file
        raise CheckpointError(f"the tokenizer in {str(directory)!r} cannot be loaded: {_first_line(error)}") from error

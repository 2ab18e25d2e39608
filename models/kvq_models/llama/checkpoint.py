"""Load and save checkpoints: Hugging Face directories, Hub ids and GGUF files. No pickle, and no
code from the checkpoint.

Loading checks every name, shape and type from the files' headers first, then reads tensor by
tensor: the host's peak is the model itself plus about three copies of its largest weight (all
experts of a projection are one), because one weight is placed while the next one is read. Every
problem is one line that names the file, tensor or field.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from tqdm import tqdm

from kvq_jax.files.checksum import write_tensors
from kvq_jax.files.whole import link_others, replacing_directory
from kvq_jax.placement.placement import AnyMesh, Placement
from kvq_models.llama import fused_tensors, generation_defaults, hf_names
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.gguf_rope import FACTORS
from kvq_models.llama.hf_directory import HfDirectory
from kvq_models.llama.model import Llama, abstract_llama
from kvq_models.llama.open_checkpoint import Checkpoint as Checkpoint
from kvq_models.llama.open_checkpoint import open_checkpoint as open_checkpoint
from kvq_models.llama.open_checkpoint import read_config as read_config
from kvq_models.llama.packed_loading import Weights, packing, read_packed, with_activations
from kvq_models.llama.packed_weights import Activations, Weight, dense
from kvq_models.llama.quantized.dense_and_sparse import CONFIG
from kvq_models.llama.sharding import placement_of, weight_shardings
from kvq_models.llama.stored_tensor import CheckpointError
from kvq_models.llama.tabled_weights import TabledMatrix, rows_of_matrix
from kvq_models.llama.tensor_names import EMBED_NAME, HEAD_NAME

_COMPARED = 4096  # rows of an embedding and a head at a time
MODEL_DTYPES = ("float32", "bfloat16", "float16")


def load_llama(
    path_or_hub_id: str | os.PathLike[str],
    *,
    dtype: DTypeLike = "bfloat16",
    mesh: AnyMesh | Placement | None = None,
    weights: Weights | None = None,
    activations: Activations = "float32",
) -> tuple[Llama, Any]:
    """Load a checkpoint as (llama, tokenizer). The tokenizer is None if the checkpoint has none.

    Args:
        path_or_hub_id: a Hugging Face directory, a GGUF file, a Hub id (organisation/name, or
            organisation/name/FILE.gguf, either with @REVISION for a branch, tag or commit), or a
            name: "embedded" for the model that ships with kvq, or "smollm2" after `kvq fetch
            smollm2`.
        dtype: float32, bfloat16 or float16, of activations and of weights that are not packed.
            Weights are cast one tensor at a time. GGUF weights are dequantized first.
        mesh: the devices that share the weights (sharding.py). Each process reads only the parts
            that its devices hold, so checksums of files are not verified.
        weights: "packed" keeps matrices of GGUF blocks, quantized checkpoints, bfloat16 and float16
            in the file's own bits (packed_weights.py, tabled_weights.py). "dense" makes arrays of
            dtype of all. None packs what can be packed if the model is on one CPU and the native
            kernels are there, but matrices of 16 bits only if they take 64 MiB or more.
        activations: "int8" rounds what packed codes multiply to 8 bits, by groups of 16 or 32
            inputs: prompts and batches take half the time in products, and results are not exact.
            "float32" rounds nothing.

    A tied checkpoint that also stores a head keeps the head if it differs from the embedding, as in
    transformers.

    Raises CheckpointError for bad files and tensors, including values that are not finite,
    FileNotFoundError for a named model that is not on this machine yet, and ValueError or
    NotImplementedError for fields of the configuration.
    """
    checkpoint = open_checkpoint(path_or_hub_id)
    options: dict[str, Any] = dict(weights=weights, activations=activations)
    llama = load_weights(checkpoint, dtype=dtype, mesh=mesh, **options)
    return llama, checkpoint.tokenizer()


def load_weights(
    checkpoint: Checkpoint,
    *,
    dtype: DTypeLike,
    mesh: AnyMesh | Placement | None = None,
    weights: Weights | None = None,
    activations: Activations = "float32",
) -> Llama:
    """Return the model of an open checkpoint with its weights as `dtype`, on a mesh if one is
    given. Raises as `load_llama` does."""
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in MODEL_DTYPES:
        raise ValueError(f"dtype={name!r} is not supported; supported: {', '.join(MODEL_DTYPES)}")
    abstract = described(checkpoint, dtype)
    packs = packing(checkpoint, weights, dtype, on_mesh=mesh is not None)
    placement = None if mesh is None else placement_of(mesh)
    return with_activations(_read_weights(abstract, checkpoint, placement, packs), activations)


def described(checkpoint: Checkpoint, dtype: DTypeLike = "bfloat16") -> Llama:
    """Return the abstract model of an open checkpoint, whose tensors are all there and of the right
    shapes. Raises as `load_llama` does."""
    _check_layers(checkpoint)
    config = _untie_if_stored_apart(checkpoint)
    abstract = abstract_llama(config, dtype)
    _check_tensors(hf_names.weights(abstract), checkpoint, tied=config.tie_word_embeddings)
    if config.brings_kv_scales and isinstance(checkpoint, HfDirectory):
        # after the check, as there is one for each of the heads that the configuration states
        config = dataclasses.replace(config, kv_scales=checkpoint.kv_scales())
        abstract = abstract_llama(config, dtype)
    return abstract


def save_llama(llama: Llama, directory: str | os.PathLike[str], tokenizer: Any = None) -> None:
    """Write config.json, model.safetensors, the tokenizer's files, and generation_config.json if
    the model asks for sampling. transformers' AutoModelForCausalLM can load them. Scales for an fp8
    cache, which a checkpoint may bring, are left out.

    Args:
        llama: the model. Weights keep their dtype, and packed ones are dequantized, but for
            matrices with tables (tabled_weights.py), which kvq alone can read. Parameters of cache
            methods are not part of a checkpoint and are not written.
        directory: appears with all its files at once or not at all. If it exists, it is replaced at
            once, and its other files are kept.
        tokenizer: a transformers tokenizer, or None to write no tokenizer.

    The host holds one more copy of the model meanwhile. Raises ValueError if `LlamaConfig.to_hf`
    does, and OSError if the directory cannot be written or is the current one.
    """
    write = (lambda _: None) if tokenizer is None else tokenizer.save_pretrained
    save_checkpoint(llama, directory, write)


def save_checkpoint(
    llama: Llama, directory: str | os.PathLike[str], write_tokenizer: Callable[[Path], object]
) -> None:
    """Do what `save_llama` does, with a function that writes the tokenizer's files into a
    directory."""
    # the key that old and new versions read
    config = dataclasses.replace(llama.config, brings_kv_scales=False)  # not of the model
    fields = config.to_hf() | {"torch_dtype": llama.embed[...].dtype.name}
    tensors: dict[str, np.ndarray] = {}
    for weight in hf_names.weights(llama).values():
        if isinstance(weight.leaf, TabledMatrix):
            module = weight.name.removesuffix(".weight")
            rows = rows_of_matrix(weight.leaf)._asdict()
            tensors |= {f"{module}.{end}": rows[end] for end in rows}
            fields["quantization_config"] = CONFIG
            continue
        whole = dense(weight.leaf)
        leaf = np.asarray(jnp.swapaxes(whole, -1, -2) if weight.transpose else whole)
        parts = leaf if "*" in weight.name else (leaf,)
        tensors |= dict(zip(weight.stored_names, parts, strict=True))
    tensors = fused_tensors.joined(llama.config, tensors)
    with replacing_directory(directory) as unfinished:
        write_tensors(unfinished / "model.safetensors", tensors, {"format": "pt"})
        (unfinished / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
        if generation := generation_defaults.to_hf(llama.config.generation):
            text = json.dumps(generation, indent=2) + "\n"
            (unfinished / "generation_config.json").write_text(text)
        write_tokenizer(unfinished)
        if (there := Path(directory)).exists():
            link_others(there, unfinished)


def _check_layers(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if the configuration has more layers than the files, before building
    them."""
    matches = (re.match(r"model\.layers\.(\d+)\.", name) for name in checkpoint.tensors)
    stored = 1 + max((int(match[1]) for match in matches if match), default=-1)
    layers = checkpoint.config.num_hidden_layers
    if layers > stored:
        missing = f"model.layers.{stored}.self_attn.q_proj.weight"
        raise CheckpointError(
            f"the files lack tensor {missing!r} and more: they hold {stored} layers, and"
            f" their configuration has {layers}"
        )


def _untie_if_stored_apart(checkpoint: Checkpoint) -> LlamaConfig:
    """Return the config, untied if the files hold a head that differs from the embedding: such a
    model was trained untied."""
    config, pair = checkpoint.config, (EMBED_NAME, HEAD_NAME)
    stored = [checkpoint.tensors.get(name) for name in pair]
    if not config.tie_word_embeddings or None in stored:
        return config
    names = {tensor.stored_as or name for name, tensor in zip(pair, stored, strict=True) if tensor}
    if len(names) == 1:  # of one tensor
        return config
    shape, *others = [tensor.shape for tensor in stored if tensor]
    if others == [shape] and len(shape) == 2:
        embed, head = map(checkpoint.parts, pair)
        starts = range(0, shape[0], _COMPARED)
        some = [slice(start, min(start + _COMPARED, shape[0])) for start in starts]
        if all(np.array_equal(embed((rows,)), head((rows,))) for rows in some):
            return config
    return dataclasses.replace(config, tie_word_embeddings=False)


def _check_tensors(
    expected: Mapping[str, hf_names.Weight], checkpoint: Checkpoint, *, tied: bool
) -> None:
    stored = checkpoint.tensors
    shapes = {name: weight.hf_shape for weight in expected.values() for name in weight.stored_names}
    accounted = shapes.keys() | ({HEAD_NAME} if tied else set()) | {*FACTORS}
    unmatched = [
        name
        for name in stored
        if name not in accounted
        and not hf_names.IGNORED.fullmatch(name)
        and not (isinstance(checkpoint, HfDirectory) and checkpoint.is_zero_bias(name))
    ]
    if unmatched:
        raise CheckpointError(
            f"the files hold {_some(unmatched)}, for which the model of their configuration has no"
            " place"
        )
    missing = [name for name in shapes if name not in stored]
    if missing:
        hint = (
            ": if the embedding is its head, set tie_word_embeddings to true in config.json"
            if missing == [HEAD_NAME]
            else ""
        )
        raise CheckpointError(
            f"the files lack {_some(missing)}, which the model of their configuration needs{hint}"
        )
    for name, shape in shapes.items():
        if stored[name].shape != shape:
            raise CheckpointError(
                f"tensor {name!r} has shape {stored[name].shape}, and the configuration asks for"
                f" {shape}"
            )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"tensor {names[0]!r}{more}"


def _read_weights(
    abstract: Llama,
    checkpoint: Checkpoint,
    placement: Placement | None,
    packs: Callable[[hf_names.Weight], bool],
) -> Llama:
    shardings = {} if placement is None else weight_shardings(abstract, placement)
    values: dict[str, Weight] = {}
    # read at the end, so that the host does not wait for each tensor
    finite: dict[str, jax.Array | bool] = {}
    expected = hf_names.weights(abstract).items()
    for path, weight in tqdm(
        expected, desc="loading weights", unit="tensor", leave=False, delay=1.0, disable=None
    ):
        if packs(weight):
            placed = read_packed(checkpoint, weight)
        elif placement is None:
            tensor = _whole(checkpoint, weight)
            placed = _placed(tensor, transpose=weight.transpose, dtype=weight.leaf.dtype)
        else:
            placed = _placed_in_parts(checkpoint, weight, shardings[path], placement.everywhere)
        values[path], finite[weight.name] = placed
    broken = [name for name, of_tensor in finite.items() if not of_tensor]
    if broken:
        dtype = next(iter(values.values())).dtype.name
        raise CheckpointError(
            f"{_some(broken)} holds nan, or values beyond {dtype}: the model would compute nan"
        )
    return hf_names.replace_weights(abstract, values)


def _whole(checkpoint: Checkpoint, weight: hf_names.Weight) -> np.ndarray | jax.Array:
    """Return a weight as it is stored, the tensors of all experts in one array."""
    if "*" not in weight.name:
        return checkpoint.read(weight.name)
    return _stacked(map(checkpoint.read, weight.stored_names), weight.spec.shape[0])


def _stacked(tensors: Iterable[np.ndarray | jax.Array], count: int) -> np.ndarray:
    """Return `count` tensors of one shape in one array, without holding all of them twice."""
    whole: np.ndarray | None = None
    for i, tensor in enumerate(map(np.asarray, tensors)):
        if whole is None:
            whole = np.empty((count, *tensor.shape), tensor.dtype)
        elif tensor.dtype != whole.dtype:
            whole = whole.astype(np.promote_types(whole.dtype, tensor.dtype))
        whole[i] = tensor
    assert whole is not None
    return whole


def _cast(
    tensor: np.ndarray | jax.Array, *, transpose: bool, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Return the tensor on the device, transposed and cast there (strided copies on the host would
    take most of the loading time), and True if all of it is finite."""
    placed = (jnp.swapaxes(tensor, -1, -2) if transpose else jnp.asarray(tensor)).astype(dtype)
    return placed, jnp.all(jnp.isfinite(placed))


_placed = jax.jit(_cast, static_argnames=("transpose", "dtype"))


def _reader(
    checkpoint: Checkpoint, weight: hf_names.Weight
) -> Callable[[tuple[slice, ...]], np.ndarray]:
    """Return a function that reads a part of a weight as it is stored, of all experts together."""
    if "*" not in weight.name:
        return checkpoint.parts(weight.name)

    def read(index: tuple[slice, ...]) -> np.ndarray:
        names = weight.stored_names[index[0]]
        return _stacked((checkpoint.parts(name)(index[1:]) for name in names), len(names))

    return read


def _placed_in_parts(
    checkpoint: Checkpoint,
    weight: hf_names.Weight,
    sharding: NamedSharding,
    everywhere: NamedSharding,
) -> tuple[jax.Array, jax.Array]:
    """Do what `_placed` does on a mesh. Each part is read once by each process that holds it."""
    axes = [*sharding.spec, *[None] * (len(weight.spec.shape) - len(sharding.spec))]
    shape = list(weight.spec.shape)
    if weight.transpose:
        axes[-2:], shape[-2:] = axes[:-3:-1], shape[:-3:-1]
    stored = NamedSharding(sharding.mesh, PartitionSpec(*axes))
    read = _reader(checkpoint, weight)
    parts: dict[str, np.ndarray] = {}

    def part(index: Any) -> np.ndarray:
        key = str(index)
        if key not in parts:
            parts[key] = read(index)
        return parts[key]

    tensor = jax.make_array_from_callback(tuple(shape), stored, part)
    return _placing(sharding, everywhere)(
        tensor, transpose=weight.transpose, dtype=weight.leaf.dtype
    )


@functools.cache
def _placing(
    sharding: NamedSharding, everywhere: NamedSharding
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    return jax.jit(
        _cast, static_argnames=("transpose", "dtype"), out_shardings=(sharding, everywhere)
    )

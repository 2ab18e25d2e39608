"""Named parameters, the optimizer, and resumable checkpoints (safetensors and JSON only)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from safetensors.numpy import load_file, save_file

from kvq_jax.files.whole import replacing
from kvq_models.llama.model import Llama

Parameters: TypeAlias = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class OptimizerPlan:
    """Warm-up, constant, then linear decay to zero over the last `decay_steps`; embedding and norms
    learn at `embedding_rate` of that."""

    learning_rate: float
    embedding_rate: float
    warmup_steps: int
    decay_steps: int
    total_steps: int
    weight_decay: float
    clip_norm: float

    def rate(self, step: ArrayLike) -> jax.Array:
        """Return the learning rate of a step, counted from 0."""
        step = jnp.asarray(step, jnp.float32)
        rising = (step + 1) / self.warmup_steps
        falling = (self.total_steps - step) / self.decay_steps
        return self.learning_rate * jnp.clip(jnp.minimum(rising, falling), 0.0, 1.0)


def parameters_of(llama: Llama) -> Parameters:
    """Return the weights by their path, for example 'layers/0/q_proj/kernel/value'."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(llama)
    return {_name(path): leaf for path, leaf in leaves}


def with_parameters(llama: Llama, parameters: Parameters) -> Llama:
    """Return the model with other weights; `llama` may be abstract."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(llama)
    return jax.tree_util.tree_unflatten(treedef, [parameters[_name(path)] for path, _ in leaves])


def make_optimizer(plan: OptimizerPlan) -> optax.GradientTransformation:
    """Make the optimizer: Muon for matrices between hidden states, AdamW for embedding and norms,
    and clipping by the global norm.

    Both have update sizes like those of AdamW.

    Source: Jordan et al., Muon; update size 0.2 after Liu et al., Muon is Scalable for LLM
    Training.
    """
    adamw = optax.adamw(
        lambda step: plan.embedding_rate * plan.rate(step), b1=0.9, b2=0.95, weight_decay=0.0
    )
    muon = optax.contrib.muon(plan.rate, consistent_rms=0.2, weight_decay=plan.weight_decay)
    return optax.chain(
        optax.clip_by_global_norm(plan.clip_norm),
        optax.partition({"hidden_matrix": muon, "other": adamw}, _labels),
    )


def save_checkpoint(
    path: Path, step: int, parameters: Parameters, optimizer_state: Any, notes: dict[str, Any]
) -> None:
    """Write `path` (weights and optimizer state) atomically, with the step and `notes` in its
    header."""
    tensors = {f"parameters/{name}": leaf for name, leaf in parameters.items()} | _state_tensors(
        optimizer_state
    )
    arrays = {name: jax.device_get(leaf) for name, leaf in tensors.items()}
    with replacing(path) as unfinished:
        save_file(arrays, unfinished, metadata={"step": str(step), "notes": json.dumps(notes)})


def load_checkpoint(
    path: Path, parameters: Parameters, optimizer_state: Any
) -> tuple[Parameters, Any]:
    """Return (parameters, optimizer state) of a checkpoint, structured as those given. Raise
    ValueError naming what does not fit."""
    stored = load_file(path)
    expected = {f"parameters/{name}": leaf for name, leaf in parameters.items()} | _state_tensors(
        optimizer_state
    )
    for name, leaf in expected.items():
        if name not in stored or stored[name].shape != leaf.shape:
            shape = stored[name].shape if name in stored else "nothing"
            raise ValueError(
                f"checkpoint {str(path)!r}, tensor {name!r}: expected shape {leaf.shape}, found"
                f" {shape}; was the model changed?"
            )
    restored = {name: jnp.asarray(stored[f"parameters/{name}"]) for name in parameters}
    leaves, treedef = jax.tree_util.tree_flatten_with_path(optimizer_state)
    return restored, jax.tree_util.tree_unflatten(
        treedef, [jnp.asarray(stored[f"optimizer/{_name(path)}"]) for path, _ in leaves]
    )


def checkpoint_notes(path: Path) -> tuple[int, dict[str, Any]]:
    """Return (step, notes) from a checkpoint's header."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return int(header["__metadata__"]["step"]), json.loads(header["__metadata__"]["notes"])


def _labels(parameters: Parameters) -> dict[str, str]:
    return {
        name: "hidden_matrix" if leaf.ndim == 2 and "embed" not in name else "other"
        for name, leaf in parameters.items()
    }


def _state_tensors(optimizer_state: Any) -> dict[str, jax.Array]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(optimizer_state)
    return {f"optimizer/{_name(path)}": leaf for path, leaf in leaves}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")

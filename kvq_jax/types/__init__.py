"""The types that everything else uses: arrays with named axes, pytrees that check their types,
checked integers, rotary positions."""

from kvq_jax.types.array_types import ArraySpec, Axis, LayerInputs, LayerWeights, ModelDims
from kvq_jax.types.rope import Rope, rotate

__all__ = ["ArraySpec", "Axis", "LayerInputs", "LayerWeights", "ModelDims", "Rope", "rotate"]

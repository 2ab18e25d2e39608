"""Make the parameters of methods that learn from a text, or that follow from a model's weights."""

from kvq_jax.cache.parameters import calibrate_layer as calibrate
from kvq_jax.cache.parameters import prepare_layer as prepare
from kvq_jax.types.array_types import LayerWeights

__all__ = ["LayerWeights", "calibrate", "prepare"]

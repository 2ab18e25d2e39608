"""Method parameters: what a cache method needs beside the weights, computed or loaded once and carried by the model."""

from __future__ import annotations

from pathlib import Path

from kvq_jax.cache import CacheDims, dims_of, plans
from kvq_jax.spec import CacheSpec, parse
from models.llama import Llama


def prepare(llama: Llama, spec: CacheSpec | str, calibration: str | Path | None = None) -> Llama:
    """The model with what `spec` needs in its `cache_parameters`; the identity for methods without parameters.

    ValueError where the spec does not fit the model, or a calibration is given to methods that take none.
    """
    spec = parse(spec)
    dims: CacheDims = dims_of(llama.config)
    plans(spec, dims, spec.sink + spec.recent + spec.block, "float32")
    if calibration is not None:
        raise ValueError(f"{str(spec)!r} takes no calibration, but {str(calibration)!r} was given")
    return llama

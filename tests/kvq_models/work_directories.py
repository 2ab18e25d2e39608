"""A calibration without a model, for tests of its files: samples are numbers in place of
activations, and a fit is their sum."""

import pathlib

import numpy as np

from kvq_jax.cache.cache import CacheDims
from kvq_models.calibration import file
from kvq_models.calibration.activations import Recorded
from kvq_models.calibration.file import Calibration, Origin
from kvq_models.calibration.store import Identity, Store

DIMS = CacheDims(
    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=4, hidden_size=8
)


def opened(work: pathlib.Path, content: int = 0) -> Store:
    return Store(work, Identity("model", "tokens", 2, 3, content, "float32"), DIMS)


def calibration(tensors: dict[str, np.ndarray], seed: int) -> Calibration:
    origin = Origin("text", "0", 2, 3, seed, "float32", 1.0)
    return Calibration("kvquant", DIMS, "fingerprint", {"layers.0.k": "kvquant"}, origin, tensors)


def calibrate(folder: pathlib.Path, content: int) -> None:
    """Calibrate with the files that `kvq calibrate` uses."""
    work = folder / "out.safetensors.work"
    with opened(work, content) as store:
        for index in range(len(store.losses), 2):
            with store.sample() as writer:
                for side in ("k", "v"):
                    for number, kind in enumerate(("rows", "gradients")):
                        writer(
                            Recorded(
                                0,
                                side,
                                kind,
                                np.full((3, 1, 4), 10 * content + 2 * index + number, np.float32),
                            )
                        )
                writer.loss = 0.5 * index
        tensors = {}
        for side in ("k", "v"):
            fitted = store.fitted(0, side, "options")
            if fitted is None:
                fitted = {"sum": np.stack(store.read(0, side)).sum(axis=(0, 2))}
                store.keep(0, side, "options", fitted)
            tensors[f"layers.0.{side}.sum"] = fitted["sum"]
    file.save_calibration(calibration(tensors, content), folder / "out.safetensors")
    Store.delete(work)

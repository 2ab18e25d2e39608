"""The work directory of a calibration: the arrays that its samples recorded, and the parameters fitted so far.

    state.json                  the run that the samples belong to (`Identity`), and the loss of each complete sample
    k.rows, k.gradients,        [layers, samples, length, K, H] in the model's dtype, which is all the digits that the forward and the
    v.rows, v.gradients         backward pass have; gradients are those of the sum of a sample's losses
    fitted/*.safetensors        one for each layer, side and set of options

Each layer and side is contiguous in its files, so fitting it reads nothing else. A sample counts once its loss is in state.json, and a
fit once its file has its final name: an interrupted run loses only the step in progress. The samples do not depend on the cache they are
for, so one directory serves several.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from kvq_jax.cache.atomic_files import replacing
from kvq_jax.cache.cache import CacheDims
from kvq_jax.codecs.base import Side
from kvq_models.calibration.activations import Recorded, RowsTKH

FORMAT = "kvq-calibration-work-1"
STATE, FITTED = "state.json", "fitted"
FILES = ("k.rows", "k.gradients", "v.rows", "v.gradients")
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Identity:
    """The inputs that the samples depend on."""

    model_fingerprint: str
    tokens_sha256: str
    samples: int
    length: int
    seed: int
    dtype: str


class Store:
    """An open work directory. `losses` holds one entry for each complete sample, in order."""

    def __init__(self, directory: Path, identity: Identity, dims: CacheDims):
        """Resume the run of this identity that the directory holds, or begin one in a new or empty directory.

        Raises ValueError, in one line, where the directory holds something else; OSError where the disk has no space for the samples to
        come.
        """
        self.directory, self.identity = directory, identity
        self.losses: list[float] = []
        self._shape = (dims.num_hidden_layers, identity.samples, identity.length, dims.num_key_value_heads, dims.head_dim)
        self._dtype = jnp.dtype(identity.dtype)
        if (directory / STATE).exists():
            self._take_up()
        elif directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise ValueError(f"{str(directory)!r} is not the work directory of a calibration, and it is not empty; name another one")
        self._check_disk()
        (directory / FITTED).mkdir(parents=True, exist_ok=True)
        self._write_state()

    @contextmanager
    def sample(self) -> Iterator[SampleWriter]:
        """Write the next sample; it is complete when the block ends without an exception."""
        with ExitStack() as stack:
            files = {name: stack.enter_context(_opened(self.directory / name)) for name in FILES}
            writer = SampleWriter(files, self._shape, len(self.losses))
            yield writer
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())  # state.json must not say more than the disk holds
        assert writer.loss is not None, "a sample ends with its loss"
        self.losses.append(writer.loss)
        self._write_state()

    def read(self, layer: int, side: Side) -> tuple[np.ndarray, np.ndarray]:
        """Return (rows, gradients) of one side of one layer, mapped from their files: [samples, length, K, H] in the model's dtype."""
        rows, gradients = (
            np.memmap(self.directory / f"{side}.{kind}", self._dtype, "r", shape=self._shape)[layer] for kind in ("rows", "gradients")
        )
        return rows, gradients

    def fitted(self, layer: int, side: Side, options: str) -> dict[str, np.ndarray] | None:
        """Return the parameters fitted for a layer and side with these options, or None."""
        try:
            return load_file(self._fitted_file(layer, side, options))
        except (FileNotFoundError, SafetensorError):
            return None

    def keep(self, layer: int, side: Side, options: str, parameters: dict[str, np.ndarray]) -> None:
        """Keep fitted parameters."""
        with replacing(self._fitted_file(layer, side, options)) as temporary:
            save_file(parameters, temporary)

    @staticmethod
    def delete(directory: Path) -> None:
        """Delete a work directory that a run has resumed or begun, with all its files."""
        shutil.rmtree(directory)

    def _fitted_file(self, layer: int, side: Side, options: str) -> Path:
        return self.directory / FITTED / f"{hashlib.sha256(options.encode()).hexdigest()[:16]}.{layer}.{side}.safetensors"

    def _take_up(self) -> None:
        file = self.directory / STATE
        try:
            state = json.loads(file.read_text(encoding="utf-8"))
            known, stored, losses = state["format"] == FORMAT, Identity(**state["identity"]), [float(loss) for loss in state["losses"]]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"{str(file)!r} cannot be read as the state of a calibration; delete {str(self.directory)!r}") from error
        if not known:
            raise ValueError(f"{str(file)!r} was written by another version of kvq; delete {str(self.directory)!r}")
        for field in dataclasses.fields(Identity):
            theirs, ours = getattr(stored, field.name), getattr(self.identity, field.name)
            if theirs != ours:
                raise ValueError(
                    f"{str(self.directory)!r} holds the samples of another run: {field.name} is {_short(theirs)} there and {_short(ours)} "
                    "here; name another work directory, or delete this one"
                )
        self.losses = losses

    def _check_disk(self) -> None:
        """Raise OSError where the samples to come do not fit the disk; those recorded before already have their place."""
        layers, samples, *sample = self._shape
        need = len(FILES) * layers * (samples - len(self.losses)) * int(np.prod(sample)) * self._dtype.itemsize
        existing = next(path for path in (self.directory, *self.directory.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free
        if need > free:
            raise OSError(
                f"{samples - len(self.losses)} samples of {self.identity.length} tokens need {need / GIB:.2f} GiB in "
                f"{str(self.directory)!r}, and {free / GIB:.2f} GiB are free there; take fewer or shorter samples, or another disk"
            )

    def _write_state(self) -> None:
        state = {"format": FORMAT, "identity": dataclasses.asdict(self.identity), "losses": self.losses}
        with replacing(self.directory / STATE) as temporary:
            temporary.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")


class SampleWriter:
    """Writer of one sample's arrays to their places in the files. `loss` is the sample's mean loss, set at its end."""

    def __init__(self, files: dict[str, BinaryIO], shape: tuple[int, ...], sample: int):
        self.loss: float | None = None
        self._files, self._shape, self._sample = files, shape, sample

    def __call__(self, recorded: Recorded) -> None:
        file = self._files[f"{recorded.side}.{recorded.what}"]
        array: RowsTKH = np.ascontiguousarray(recorded.array)
        file.seek((recorded.layer * self._shape[1] + self._sample) * array.nbytes)
        file.write(
            array.reshape(-1).view(np.uint8).data
        )  # written, not mapped: a full disk then raises an error and does not kill the process


def _opened(file: Path) -> BinaryIO:
    """Open a file for writing at any place; create it where it is missing."""
    file.touch()
    return file.open("r+b")


def _short(value: object) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 12 else str(value)

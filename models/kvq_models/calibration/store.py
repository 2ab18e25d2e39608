"""The work directory of a calibration: the arrays that its samples recorded, and the parameters
fitted so far.

    lock                  held by the process that works here
    state.json            the run that the samples belong to (`Identity`), the loss of each complete
                          sample, the sha256 of each of its arrays, and a sha256 of all that
    k.rows, k.gradients,  [layers, samples, length, K, H] in the model's dtype, which is all the
    v.rows, v.gradients   precision that the forward and the backward pass have; gradients of the
                          sum of a sample's losses
    q.moments             [layers, samples, K, H, H] fp32: E q q^T of each sample's queries
    q.last                [layers, samples, LAST_QUERIES, N, H]: the last queries, after RoPE
    fitted/*.safetensors  one for each layer, side and set of options, with a checksum

Each layer and side is contiguous in its files, so fitting it reads nothing else. A sample counts
once its loss is in state.json, and a fit once its file has its final name: an interrupted run loses
only the step in progress. The samples do not depend on the cache, so one directory serves several
caches. state.json is the first file after the lock, and the directory is deleted as a whole. A
process that is killed at any moment therefore leaves a directory from which the same command
continues.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import filelock
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from safetensors import SafetensorError, safe_open

import kvq_jax
from kvq_jax.cache.cache import CacheDims
from kvq_jax.codecs.codec import Side
from kvq_jax.files.checksum import NoChecksum, read_tensors, save_tensors, sha256_of
from kvq_jax.files.json_text import parse_json
from kvq_jax.files.whole import UNFINISHED, delete_directory, remove_unfinished, replacing
from kvq_models.calibration.activations import LAST_QUERIES, Recorded

FORMAT = "kvq-calibration-work-2"
LOCK, STATE, FITTED = "lock", "state.json", "fitted"
FILES = ("k.rows", "k.gradients", "v.rows", "v.gradients")
MOMENTS, LAST = "q.moments", "q.last"  # older versions did not record them
DIGESTS, CHECKSUM = "sha256_of_arrays", "sha256"  # fields of state.json
GIB = 2**30
ATTEMPTS = 10  # attempts to lock a directory that others delete at the same time

# sha256 of one sample's arrays: by file, one for each layer
Digests: TypeAlias = dict[str, list[str]]


@dataclasses.dataclass(frozen=True)
class Identity:
    """Everything that the samples depend on."""

    model_fingerprint: str
    tokens_sha256: str
    samples: int
    length: int
    seed: int
    dtype: str


class Store:
    """A work directory, open inside a `with` block. `losses` has one entry for each complete
    sample, in order."""

    def __init__(self, directory: Path, identity: Identity, dims: CacheDims):
        self.directory, self.identity = directory, identity
        self.losses: list[float] = []
        # digests of each complete sample; None if an older version wrote it
        self._digests: list[Digests | None] = []
        dtype, heads, width = jnp.dtype(identity.dtype), dims.num_key_value_heads, dims.head_dim
        last = min(LAST_QUERIES, identity.length)
        self._runs = dims.num_hidden_layers, identity.samples
        # shape and dtype of one sample of one layer, by file
        self._arrays: dict[str, tuple[tuple[int, ...], np.dtype]] = {
            **{name: ((identity.length, heads, width), dtype) for name in FILES},
            MOMENTS: ((heads, width, width), np.dtype(np.float32)),
            LAST: ((last, dims.num_attention_heads, width), dtype),
        }
        self._lock = _lock(directory)

    def __enter__(self) -> Store:
        """Resume this run if the directory holds it, or begin it in a new or empty directory.

        Raises ValueError, in one line, if the directory holds something else, is damaged, or is in
        use by another process, and OSError if the disk has no space for the remaining samples.
        Nothing is changed then.
        """
        self._resume()
        self._check_disk()
        self._acquire_lock()
        try:
            self._resume()  # again: another process may have worked here until now
            remove_unfinished(self.directory)
            self._write_state()
            (self.directory / FITTED).mkdir(exist_ok=True)
            remove_unfinished(self.directory / FITTED)
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @contextmanager
    def sample(self) -> Iterator[SampleWriter]:
        """Write the next sample. It is complete when the block ends without an exception."""
        with ExitStack() as stack:
            files = {
                name: stack.enter_context(_opened(self.directory / name)) for name in self._arrays
            }
            writer = SampleWriter(files, self._runs, len(self.losses))
            yield writer
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())  # state.json must not say more than the disk holds
        assert writer.loss is not None, "a sample ends with its loss"
        self.losses.append(writer.loss)
        self._digests.append(writer.digests)
        self._write_state()

    def read(self, layer: int, side: Side) -> tuple[np.ndarray, np.ndarray]:
        """Return (rows, gradients) of one side of one layer, mapped from their files: [samples,
        length, K, H] in the model's dtype.

        Raises ValueError, in one line, if they are not what was recorded.
        """
        return self._recorded(f"{side}.rows", layer), self._recorded(f"{side}.gradients", layer)

    def query_moments(self, layer: int) -> Float[np.ndarray, "K H H"]:
        """Return E q q^T over the queries of all samples that read each KV head of a layer.

        Raises ValueError, in one line, if a sample has none, or they are not what was recorded.
        """
        self._check_queries()
        return self._recorded(MOMENTS, layer).mean(axis=0, dtype=np.float64).astype(np.float32)

    def last_queries(self, layer: int) -> Float[np.ndarray, "samples W N H"]:
        """Return the last queries of each sample of a layer, mapped from their file.

        Raises ValueError as `query_moments` does.
        """
        self._check_queries()
        return self._recorded(LAST, layer)

    def fitted(self, layer: int, side: Side, options: str) -> dict[str, np.ndarray] | None:
        """Return the parameters fitted for a layer and side with these options, or None if there
        are none or their file is damaged."""
        file = self._fitted_file(layer, side, options)
        try:
            header = self._fitted_header(layer, side, options)
            with safe_open(file, framework="numpy") as stored:
                if (stored.metadata() or {}).items() >= header.items():
                    return read_tensors(stored, repr(str(file)))
        except (OSError, SafetensorError, ValueError):
            pass  # fit damaged ones again, like missing ones
        return None

    def keep(self, layer: int, side: Side, options: str, parameters: dict[str, np.ndarray]) -> None:
        """Save fitted parameters."""
        header = self._fitted_header(layer, side, options)
        save_tensors(self._fitted_file(layer, side, options), parameters, header)

    @staticmethod
    def delete(directory: Path) -> None:
        """Delete a work directory that a run has used, with all its files. Leave it if another
        process uses it."""
        with suppress(filelock.Timeout), _lock(directory):
            delete_directory(directory)

    def _fitted_header(self, layer: int, side: Side, options: str) -> dict[str, str]:
        """Return the header of a file of fitted parameters: everything they depend on."""
        return {
            "identity": json.dumps(dataclasses.asdict(self.identity)),
            "layer": str(layer),
            "side": side,
            "options": options,
            "algorithms": algorithms(),
        }

    def _fitted_file(self, layer: int, side: Side, options: str) -> Path:
        digest = hashlib.sha256(options.encode()).hexdigest()[:16]
        return self.directory / FITTED / f"{digest}.{layer}.{side}.safetensors"

    def _acquire_lock(self) -> None:
        """Create the directory if it is missing, and lock it. Raise ValueError if another process
        uses it."""
        for _ in range(ATTEMPTS):
            self.directory.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire()
            except filelock.Timeout:
                raise ValueError(
                    f"another process is calibrating in {str(self.directory)!r} right now; wait"
                    " for it"
                ) from None
            except FileNotFoundError:
                continue  # a process that had finished deleted it in between
            return
        raise ValueError(f"{str(self.directory)!r} cannot be locked: it disappears again and again")

    def _resume(self) -> None:
        """Read the state, if there is one. Raise ValueError if it belongs to another run, or if the
        directory holds something else."""
        file = self.directory / STATE
        if not file.exists():
            self._check_empty()
            return
        state = self._read_state(file)
        for field in dataclasses.fields(Identity):
            theirs, ours = getattr(state.identity, field.name), getattr(self.identity, field.name)
            if theirs != ours:
                raise ValueError(
                    f"{str(self.directory)!r} holds the samples of another run: {field.name} is"
                    f" {_short(theirs)} there and {_short(ours)} here; name another work directory,"
                    " or delete this one"
                )
        self.losses, self._digests = state.losses, state.digests

    def _check_empty(self) -> None:
        ours = self.directory.is_dir() and all(
            path.name == LOCK or path.name.startswith(UNFINISHED)
            for path in self.directory.iterdir()
        )
        if self.directory.exists() and not ours:
            raise ValueError(
                f"{str(self.directory)!r} is not the work directory of a calibration, and it is not"
                " empty; name another one"
            )

    def _read_state(self, file: Path) -> _State:
        delete = f"delete {str(self.directory)!r}"
        try:
            fields = parse_json(file.read_text(encoding="utf-8"))
            known, identity = fields["format"] == FORMAT, Identity(**fields["identity"])
            losses = [float(loss) for loss in fields["losses"]]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{str(file)!r} cannot be read as the state of a calibration; {delete}"
            ) from error
        if not known:
            raise ValueError(f"{str(file)!r} was written by another version of kvq; {delete}")
        if not fields.keys() & {DIGESTS, CHECKSUM}:
            warnings.warn(
                f"{str(file)!r} was written before files had checksums: damage would not be seen",
                NoChecksum,
                stacklevel=2,
            )
            return _State(identity, losses, [None] * len(losses))
        if fields.pop(CHECKSUM, None) != _checksum(fields):
            raise ValueError(
                f"{str(file)!r} is damaged: its content does not have the checksum that it states;"
                f" {delete}"
            )
        return _State(identity, losses, fields[DIGESTS])

    def _check_queries(self) -> None:
        if any(digests is None or LAST not in digests for digests in self._digests):
            raise ValueError(
                f"the samples in {str(self.directory)!r} are of an older version, which recorded no"
                " queries; delete it"
            )

    def _recorded(self, name: str, layer: int) -> np.ndarray:
        """Return one layer of a file of arrays, memory-mapped, after verifying the checksums of its
        samples."""
        file = self.directory / name
        of_sample, dtype = self._arrays[name]
        shape = *self._runs, *of_sample
        size = int(np.prod(shape)) * dtype.itemsize
        if not file.is_file() or file.stat().st_size != size:
            raise ValueError(
                f"{str(file)!r} is missing or does not have the {size} recorded bytes; delete"
                f" {str(self.directory)!r}"
            )
        recorded = np.memmap(file, dtype, "r", shape=shape)[layer]
        for sample, digests in enumerate(self._digests):
            if digests is not None and sha256_of(recorded[sample]) != digests[name][layer]:
                raise ValueError(
                    f"{str(file)!r} is damaged: sample {sample} of layer {layer} does not have its"
                    f" checksum; delete {str(self.directory)!r}"
                )
        return recorded

    def _check_disk(self) -> None:
        """Raise OSError if the remaining samples do not fit the disk."""
        layers, samples = self._runs
        of_sample = sum(
            int(np.prod(shape)) * dtype.itemsize for shape, dtype in self._arrays.values()
        )
        need = layers * (samples - len(self.losses)) * of_sample
        existing = next(
            path for path in (self.directory, *self.directory.absolute().parents) if path.exists()
        )
        free = shutil.disk_usage(existing).free
        if need > free:
            raise OSError(
                f"{samples - len(self.losses)} samples of {self.identity.length} tokens need"
                f" {need / GIB:.2f} GiB in {str(self.directory)!r}, and {free / GIB:.2f} GiB are"
                " free there; take fewer or shorter samples, or another disk"
            )

    def _write_state(self) -> None:
        state = {
            "format": FORMAT,
            "identity": dataclasses.asdict(self.identity),
            "losses": self.losses,
            DIGESTS: self._digests,
        }
        with replacing(self.directory / STATE) as unfinished:
            unfinished.write_text(
                json.dumps(state | {CHECKSUM: _checksum(state)}, indent=2) + "\n", encoding="utf-8"
            )


@functools.cache
def algorithms() -> str:
    """Return a hash of the source that fits parameters: another version may fit other ones."""
    package = Path(kvq_jax.__file__).parent
    digest = hashlib.sha256()
    for folder in (package / "codecs", package / "methods", Path(__file__).parent):
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


class _State(NamedTuple):
    """The content of state.json."""

    identity: Identity
    losses: list[float]
    digests: list[Digests | None]


class SampleWriter:
    """Writes one sample's arrays to their places in the files. Set `loss`, the sample's mean loss,
    at the end. `digests` has the sha256 of every array."""

    def __init__(self, files: dict[str, BinaryIO], runs: tuple[int, int], sample: int):
        self.loss: float | None = None
        self.digests: Digests = {name: [""] * runs[0] for name in files}
        self._files, self._samples, self._sample = files, runs[1], sample

    def __call__(self, recorded: Recorded) -> None:
        name = f"{recorded.side}.{recorded.what}"
        array = np.ascontiguousarray(recorded.array)
        self.digests[name][recorded.layer] = sha256_of(array)
        file = self._files[name]
        file.seek((recorded.layer * self._samples + self._sample) * array.nbytes)
        # written, not mapped: a full disk raises an error instead of killing the process
        file.write(array.reshape(-1).view(np.uint8).data)


def _opened(file: Path) -> BinaryIO:
    """Open a file for writing at any offset. Create it if it is missing."""
    file.touch()
    return file.open("r+b")


def _lock(directory: Path) -> filelock.BaseFileLock:
    return filelock.FileLock(directory / LOCK, timeout=0)


def _checksum(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _short(value: object) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 12 else str(value)

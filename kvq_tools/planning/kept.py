"""Stored plans: the calibration that `--cache auto:bits=B` finds, and the files that `--cache
plan.json` reads.

    ~/.cache/kvq/plans/NAME-HASH/waterfill.safetensors, waterfill_eigen.safetensors, ...
        the calibrations that `kvq plan` made for a model, one for each pair of bases; HASH is of
        the model's path
    plan.json
        {"format": "kvq.cache-plan", "cache": SPEC, "calibration": FILE or null,
        "calibration_sha256": of the file, as the plan was made with it; older plans have none}
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import kvq_jax as kvq
from kvq_jax.cache.spec import CacheSpec
from kvq_jax.files import whole
from kvq_jax.files.json_text import parse_json
from kvq_models.named_models.names import located
from kvq_models.named_models.published import cache_folder
from kvq_tools.planning.defaults import METHOD, Bases

FORMAT = "kvq.cache-plan"
USUAL = Bases()
MAX_BYTES = 1 << 20  # of a plan; a spec of 4096 layers is far smaller


class StoredPlan(NamedTuple):
    """A cache, and its calibration file if it needs one."""

    spec: CacheSpec
    calibration: str | None


def folder(model: str) -> Path:
    """Return the folder of a model's plans. It depends on the model's path, not on its weights."""
    place = os.path.abspath(located(model)) if os.path.exists(located(model)) else str(model)
    name = "".join(
        letter if letter.isalnum() or letter in "-_." else "_" for letter in Path(str(model)).name
    )[:40]
    return cache_folder() / "plans" / f"{name}-{hashlib.sha256(place.encode()).hexdigest()[:12]}"


def calibration_file(model: str, bases: Bases = USUAL) -> Path:
    """Return the path of the calibration that `kvq plan` keeps for a model and these bases."""
    return folder(model) / file_name(bases)


def file_name(bases: Bases) -> str:
    """Return the name of the kept calibration of these bases."""
    if bases.values != USUAL.values:
        return f"{METHOD}_{bases.keys}_{bases.values}.safetensors"
    return f"{METHOD}.safetensors" if bases == USUAL else f"{METHOD}_{bases.keys}.safetensors"


def write_plan(path: str | os.PathLike[str], plan: StoredPlan) -> None:
    """Write a plan, whole or not at all. It names the calibration by its absolute path, and by its
    content, which the next plan of the model may replace."""
    fields = {"format": FORMAT, "cache": str(plan.spec), "calibration": None}
    if plan.calibration is not None:
        fields["calibration"] = os.path.abspath(plan.calibration)
        fields["calibration_sha256"] = _sha256(plan.calibration)
    whole.write(path, json.dumps(fields, indent=2) + "\n")


def read_plan(path: str | os.PathLike[str]) -> StoredPlan:
    """Read a plan. Raises ValueError, in one line, if the file is not a plan, or if its calibration
    is another one by now, and OSError if a file cannot be read."""
    fields = _json(Path(path))
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise ValueError(
            f"{str(path)!r} is not a plan of kvq: `kvq plan MODEL --out {path}` writes one"
        )
    cache, calibration, digest = map(fields.get, ("cache", "calibration", "calibration_sha256"))
    if not isinstance(cache, str) or not all(
        isinstance(value, str | None) for value in (calibration, digest)
    ):
        raise ValueError(
            f"{str(path)!r}: a plan has the text of a cache, and a calibration file or null"
        )
    plan = StoredPlan(kvq.parse(cache), calibration)
    # a file that is gone is an error only of what needs it
    if calibration and digest and Path(calibration).is_file() and _sha256(calibration) != digest:
        raise ValueError(
            f"{str(path)!r} was made with another calibration than {calibration!r} is now: run the"
            " `kvq plan` that wrote it again"
        )
    return plan


def _sha256(file: str | os.PathLike[str]) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _json(path: Path) -> Any:
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{str(path)!r} is not a plan of kvq: it has more than {MAX_BYTES} bytes")
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{str(path)!r} is not a plan of kvq: {str(error).splitlines()[0]}"
        ) from error

"""Several runs in one work directory of a calibration never mix, and damage is found."""

import json
import pathlib

import numpy as np
import pytest

from kvq_jax.files.checksum import NoChecksum
from kvq_models.calibration import file, store
from kvq_models.calibration.store import Store
from tests.crashes import listing
from tests.kvq_models.work_directories import calibrate, opened


def test_the_same_calibration_twice_at_once_is_one_line(tmp_path: pathlib.Path):
    with (
        opened(tmp_path / "work"),
        pytest.raises(
            ValueError, match=r"\Aanother process is calibrating in '[^\n]*work' right now[^\n]*\Z"
        ),
    ):
        opened(tmp_path / "work").__enter__()
    with opened(tmp_path / "work"):
        Store.delete(tmp_path / "work")
        assert (tmp_path / "work" / "state.json").exists(), "it was deleted while a run was in it"
    Store.delete(tmp_path / "work")
    assert not listing(tmp_path)


def test_two_seeds_at_once_never_share_a_work_directory(tmp_path: pathlib.Path):
    """Both if the other run has written its state and if it has not."""
    (tmp_path / "work").mkdir()
    first, second = opened(tmp_path / "work", 0), opened(tmp_path / "work", 1)
    with first, pytest.raises(ValueError, match="seed is 0 there and 1 here"):
        second.__enter__()
    with pytest.MonkeyPatch.context() as patch:  # it looks before the first has written anything
        (tmp_path / "late").mkdir()
        late, acquire = opened(tmp_path / "late", 1), Store._acquire_lock

        def after_the_other(self: Store) -> None:
            patch.setattr(Store, "_acquire_lock", acquire)
            with opened(tmp_path / "late", 0):
                pass
            acquire(self)

        patch.setattr(Store, "_acquire_lock", after_the_other)
        with pytest.raises(ValueError, match="seed is 0 there and 1 here"):
            late.__enter__()


@pytest.mark.parametrize("name", ["v.gradients", "state.json"])
def test_damage_of_a_half_made_calibration_is_found(name: str, tmp_path: pathlib.Path):
    """Damage of rows that are still to be fitted is an error. Damaged fits are made again."""
    half_made(tmp_path)
    for fit in (tmp_path / "out.safetensors.work" / "fitted").iterdir():
        fit.unlink()
    damaged = tmp_path / "out.safetensors.work" / name
    content = damaged.read_bytes()
    for place in (content.index(b"0.5"),) if name == "state.json" else (3, len(content) - 2):
        damaged.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(
            ValueError, match=rf"\A'[^\n]*{name}' is damaged: [^\n]*delete '[^\n]*work'\Z"
        ):
            calibrate(tmp_path, 0)
    damaged.write_bytes(content)
    calibrate(tmp_path, 0)


def test_damaged_and_swapped_fits_are_made_again(tmp_path: pathlib.Path):
    (tmp_path / "sound").mkdir()
    calibrate(tmp_path / "sound", 0)
    for damage in ("bit", "swap"):
        folder = tmp_path / damage
        folder.mkdir()
        half_made(folder)
        keys, values = sorted((folder / "out.safetensors.work" / "fitted").iterdir())
        content = values.read_bytes()
        if damage == "bit":
            values.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        else:
            values.write_bytes(keys.read_bytes())
        calibrate(folder, 0)
        assert (folder / "out.safetensors").read_bytes() == (
            tmp_path / "sound" / "out.safetensors"
        ).read_bytes(), damage


def test_a_work_directory_of_an_older_version_is_taken_up_with_a_note(tmp_path: pathlib.Path):
    half_made(tmp_path)
    state = tmp_path / "out.safetensors.work" / "state.json"
    fields = json.loads(state.read_text())
    state.write_text(json.dumps({name: fields[name] for name in ("format", "identity", "losses")}))
    with pytest.warns(NoChecksum, match=r"state\.json' was written before files had checksums"):
        calibrate(tmp_path, 0)


def test_fits_of_another_version_are_made_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    with opened(tmp_path / "work") as work:
        work.keep(0, "k", "options", {"sum": np.ones(3, np.float32)})
        assert work.fitted(0, "k", "options") is not None
        monkeypatch.setattr(store, "algorithms", lambda: "of another version")
        assert work.fitted(0, "k", "options") is None


def half_made(folder: pathlib.Path) -> None:
    """Calibrate until the result would be written."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file, "save_calibration", interrupt)
        with pytest.raises(KeyboardInterrupt):
            calibrate(folder, 0)

"""`kvq eval --protocol`: equal windows for all caches, both readings, and what it refuses."""

import json

import numpy as np
import pytest

from kvq_models import EMBEDDED
from kvq_models.llama.open_checkpoint import read_config
from kvq_tools.cli.protocol_evaluation import sizes_for
from kvq_tools.evaluation.protocol import READINGS, RECENT, SINK, WORDS, Measured, ScoredText, Sizes

CACHES = "--cache=int4:sink=1,recent=0", "--cache=int2"


@pytest.fixture
def request_of(tiny, tmp_path):
    """Return a function that makes a command from its further words."""
    text = tmp_path / "text.txt"
    text.write_text("one two three four " * 90 + "four three two one " * 90, encoding="utf-8")

    def words(*more: str, caches: tuple[str, ...] = CACHES) -> tuple[str, ...]:
        return "eval", str(tiny), f"--text={text}", "--window=70", *caches, "--protocol", *more

    return words


def test_all_caches_get_the_same_windows_and_both_readings(request_of, run):
    code, out, err = run(*request_of("--json"))
    found = json.loads(out)
    assert code == 0
    for reading in READINGS:
        assert err.count(f"evaluating {WORDS[reading]}, ") == 2, "nothing shows how far it is"
    assert found["format"] == "kvq.protocol"
    assert (found["context"], found["scored"]) == (70, 32)
    four, two = found["caches"]
    assert four["windows"] == two["windows"] == {"sink": SINK, "recent": RECENT, "block": 32}
    assert four["exact_share"] == two["exact_share"] > 0
    for reading in READINGS:
        assert len(two[reading]["window_kl"]) == found["text_windows"] >= 2
        assert two[reading]["kl"] > four[reading]["kl"] > 0
        low, high = two[reading]["kl_interval"]
        assert low < two[reading]["kl"] < high
        assert two[reading]["kl_median"] <= two[reading]["kl_p999"]
        assert "int2" in found["verdicts"][reading]


def test_the_tables_end_with_what_their_intervals_leave_out(request_of, run):
    said = run(*request_of())[1].splitlines()[-1]
    assert said == "Each interval is at 95 %, not corrected for the number of comparisons."


def test_a_short_text_has_fewer_windows_or_is_refused_in_its_tokens():
    config = read_config(EMBEDDED)

    def sizes(tokens: int) -> Sizes:
        return sizes_for(config, ScoredText("text", "", np.zeros(tokens, np.int32)), None)

    assert sizes(4 * 400) == Sizes(400 - 257, 256, 4)
    assert sizes(1200) == Sizes(65, 256, 3), "four windows would have 43 tokens before them"
    with pytest.raises(ValueError, match=r"a text of 600 tokens .*: give a longer text"):
        sizes(600)


@pytest.mark.parametrize("broken", READINGS)
def test_a_reading_that_is_not_finite_has_a_status_of_its_own(broken, request_of, run, monkeypatch):
    def measured(candidates, rows, headline, sizes, reading, *_):
        bad = np.nan if reading == broken else 1.0
        of_windows = tuple(bad * np.linspace(1, 2, len(rows)))
        return [Measured(of_windows, of_windows, of_windows, bad, bad) for _ in candidates]

    monkeypatch.setattr("kvq_tools.cli.protocol_evaluation.measure", measured)
    code, _, err = run(*request_of())
    assert (code, "not finite (nan or inf) with int4:sink=1,recent=0, int2" in err) == (3, True)


@pytest.mark.parametrize(
    ("loop", "item", "complete"),
    [
        (f"{WORDS['prompt']}, once more", 0, {"prompt": 8}),
        (WORDS["prompt"], 0, {}),
        (WORDS["decoded"], 0, {"prompt": 8}),
        (WORDS["decoded"], 4, {"prompt": 8, "decoded": 2}),
    ],
)
def test_ctrl_c_shows_the_windows_that_were_read(
    request_of, run, monkeypatch, press_in, loop, item, complete
):
    monkeypatch.setattr("kvq_tools.evaluation.protocol.BATCH", 1)
    press_in(loop, item)
    code, out, err = run(*request_of("--json"))
    shown = json.loads(out)
    assert code == 130
    if not complete:
        assert shown["error"] == "interrupted"
        return
    assert err.endswith("interrupted: the numbers are of the windows that were read by then\n")
    assert list(shown["verdicts"]) == list(complete)
    for cache in shown["caches"]:
        numbers = {reading: cache[reading] for reading in READINGS if reading in cache}
        assert {reading: len(one["window_kl"]) for reading, one in numbers.items()} == complete
        assert all(one["kl"] > 0 for one in numbers.values())

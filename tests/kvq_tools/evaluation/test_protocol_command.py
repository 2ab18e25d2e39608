"""`kvq eval --protocol`: equal windows for all caches, both readings, and what it refuses."""

import pytest

from kvq_tools.evaluation.protocol import READINGS, RECENT, SINK

CACHES = "--cache=int4:sink=1,recent=0", "--cache=int2"


@pytest.fixture
def request_of(tiny, tmp_path):
    """Return a function that makes a command from its further words."""
    text = tmp_path / "text.txt"
    text.write_text("one two three four " * 90 + "four three two one " * 90, encoding="utf-8")

    def words(*more: str, caches: tuple[str, ...] = CACHES) -> tuple[str, ...]:
        return "eval", str(tiny), f"--text={text}", "--window=70", *caches, "--protocol", *more

    return words


def test_all_caches_get_the_same_windows_and_both_readings(request_of, run_json):
    found = run_json(*request_of())
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

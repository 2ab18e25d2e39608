"""The table of families in docs/models.md is the one that its command writes."""

from __future__ import annotations

from benchmarks.families_table import MODELS, PAGE, config_of, replaced
from kvq_models.llama.families import FAMILIES


def test_the_table_is_of_today_and_has_every_family():
    page = PAGE.read_text(encoding="utf-8")
    assert replaced(page) == page, "python -m benchmarks.families_table writes it"
    assert {model.model_type for model in MODELS} == set(FAMILIES)
    windowed = {m.model_type for m in MODELS if config_of(m).sliding_window}
    assert windowed == {"mistral", "olmo3", "gemma2", "gemma3_text", "gpt_oss"}

"""The key-bias benchmark: a small run of it says what collapses and what is restored, and what it
refuses."""

from __future__ import annotations

import dataclasses

import pytest

from kvq_models import load_llama
from laboratory import results_page
from laboratory.quality import key_bias
from laboratory.quality.key_bias import BiasReport


def test_a_run_measures_both_variants_and_makes_a_table(shallow, tmp_path, monkeypatch):
    labels = "int4", "kivi 4"
    monkeypatch.setattr(key_bias, "CACHES", {name: key_bias.CACHES[name] for name in labels})
    file = tmp_path / "key_bias_test.json"
    key_bias.main(
        [f"--model={shallow}", "--windows=1", "--window=96", "--prompt=0", f"--json={file}"]
    )
    report = BiasReport.read(file)
    int4, kivi = report.rows
    assert kivi.slow.biased.kl < 1.5 * kivi.slow.plain.kl, "these pairs hardly turn"
    assert kivi.every.biased.kl > 20 * kivi.every.plain.kl, "these turn within a group"
    assert kivi.every.subtracted.kl < kivi.every.biased.kl / 4, "what is left is the harder model"
    for name in ("wide", "slow"):
        found = getattr(int4, name)
        assert found.biased.kl > 20 * found.plain.kl > 0, (
            f"{name}: {found.biased.kl:.5f} with a bias, {found.plain.kl:.5f} without"
        )
        assert found.subtracted.kl < 1.5 * found.plain.kl, (
            f"{name}: {found.subtracted.kl:.5f} with the option"
        )
    assert report.perplexities["wide"] == pytest.approx(report.perplexities["plain"], rel=1e-4)
    assert report.perplexities["slow"] == pytest.approx(report.perplexities["plain"], rel=0.05)
    assert str(tmp_path) not in report.command
    assert (
        f"| {int4.wide.plain.kl:.5f} | {int4.wide.biased.kl:.5f} | {int4.wide.subtracted.kl:.5f} |"
        in results_page.render(tmp_path)["key_bias_test.md"]
    )
    refused = dataclasses.replace(
        int4, wide=dataclasses.replace(int4.wide, subtracted=None), refused="a reason"
    )
    dataclasses.replace(report, rows=(refused,)).write(file)
    assert (
        f"| {int4.wide.biased.kl:.5f} | refused |"
        in results_page.render(tmp_path)["key_bias_test.md"]
    )


def test_a_text_that_is_too_short_is_refused_before_anything_is_measured(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        key_bias.main(["--windows=1000", f"--json={tmp_path / 'none.json'}"])
    assert stopped.value.code == 2
    assert "fewer than 1000 windows" in capsys.readouterr().err
    assert not (tmp_path / "none.json").exists()


def test_the_slow_constant_stands_in_pairs_that_turn_least(shallow):
    llama, _ = load_llama(shallow, dtype="float32")
    biased = key_bias.with_bias(llama, 100.0, 0, slice(-key_bias.SLOW_PAIRS, None))
    half = llama.config.head_dim // 2
    for layer in biased.layers:
        assert layer.k_proj.bias is not None
        bias = layer.k_proj.bias[...].reshape(-1, 2, half)
        assert (abs(bias[..., -key_bias.SLOW_PAIRS :]) == 100).all()
        assert (bias[..., : -key_bias.SLOW_PAIRS] == 0).all()
        assert (layer.q_proj.bias[...] == 0).all()

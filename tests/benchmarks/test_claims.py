"""Every comparative sentence of the README and the papers' page has an interval behind it."""

from __future__ import annotations

from benchmarks import claims


def all_claims() -> list[claims.Claim]:
    return [
        claim
        for page in claims.PAGES
        for claim in claims.claims(page, (claims.ROOT / page).read_text(encoding="utf-8"))
    ]


def test_every_comparison_holds_an_interval_or_links_the_page_that_has_it():
    found = all_claims()
    assert {claim.page for claim in found} == set(claims.PAGES)
    assert not claims.without_interval(found), (
        "give the interval, or the page that has it, in the sentence or its paragraph"
    )


def test_the_list_names_sentences_intervals_and_pages_and_is_that_of_today():
    text = claims.contents()
    assert claims.FILE.read_text(encoding="utf-8") == text, "python -m benchmarks.results_page"
    assert len(text.splitlines()) > len(all_claims())


def test_a_comparison_without_an_interval_is_noticed():
    (bare,) = claims.claims("a page", "# Better\n\nkivi is ahead of int4. It is small.")
    assert bare.sentence == "kivi is ahead of int4."
    assert claims.without_interval([bare]) == [bare]
    (told,) = claims.claims("a page", "`kivi` has 0.5 times int4's KL, 0.5 [0.4, 0.6] of it.")
    assert told.intervals == ("0.5 [0.4, 0.6]",)
    assert not claims.without_interval([told])
    (linked,) = claims.claims("a page", "kivi is [faster than int4](results/a.md).")
    assert linked.sources == ("results/a.md",)

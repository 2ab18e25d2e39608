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

"""ROUGE-L as LongBench uses it: the summary-level F score of the package `rouge` 1.0.1, which counts different words.

    sentences: what stands between full stops;  words: what stands between spaces
    union = the words in a longest common subsequence of any sentence of the reference with any of the prediction
    p = |union| / |words of the prediction|,  r = |union| / |words of the reference|,  F = 2 p r / (p + r + 1e-8)

Lin 2004 counts words as often as they occur; the benchmark's package takes sets, and of several longest subsequences the one that its
walk through the table meets. Both decide about the third digit of a score, so both are kept.
"""

from __future__ import annotations


def rouge_l(prediction: str, reference: str) -> float:
    """F between 0 and 1; 0 where either has no sentence."""
    predicted, wanted = _sentences(prediction), _sentences(reference)
    if not predicted or not wanted:
        return 0.0
    common: set[str] = set()
    for sentence in wanted:
        for other in predicted:
            common |= _common_words(sentence, other)
    precision, recall = (len(common) / len({word for sentence in side for word in sentence}) for side in (predicted, wanted))
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    """Lists of words. White space after the last full stop is a sentence of one empty word, as in the package."""
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _common_words(first: list[str], second: list[str]) -> set[str]:
    """The words of a longest common subsequence, found by walking back from the ends, along `second` where both ways are as good."""
    lengths = [[0] * (len(second) + 1)]
    for word in first:
        above, row = lengths[-1], [0]
        for j, other in enumerate(second):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
        lengths.append(row)
    i, j, words = len(first), len(second), set()
    while i and j:
        if first[i - 1] == second[j - 1]:
            words.add(first[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words

"""LongBench's metrics (Bai et al. 2023), each metric(prediction, answer, classes) -> score between 0 and 1.

Kept as the benchmark computes them, oddities included, because scores are only comparable so. Chinese texts are cut into words by jieba,
which is not installed with kvq: `needed` says what is missing.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from kvq_tools.evaluation.tasks.rouge import rouge_l

Metric = Callable[[str, str, Sequence[str]], float]

ARTICLES = re.compile(r"\b(a|an|the)\b")
CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)


def qa_f1(prediction: str, answer: str, _: Sequence[str]) -> float:
    """F1 of the words that both have, without case, punctuation and articles."""
    return _f1(_plain_words(prediction), _plain_words(answer))


def qa_f1_zh(prediction: str, answer: str, _: Sequence[str]) -> float:
    """F1 = 2 p r / (p + r), 0 to 1, of jieba's words that both have, without case and punctuation of both scripts."""
    return _f1(*([word for word in map(_without_punctuation, _cut(text)) if word] for text in (prediction, answer)))


def rouge(prediction: str, answer: str, _: Sequence[str]) -> float:
    """ROUGE-L, 0 to 1, as the package rouge 1.0.1 computes it (rouge.py)."""
    return rouge_l(prediction, answer)


def rouge_zh(prediction: str, answer: str, _: Sequence[str]) -> float:
    """`rouge` of jieba's words."""
    return rouge_l(" ".join(_cut(prediction)), " ".join(_cut(answer)))


def classification(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """1 / the number of class names in the prediction, if the right one is among them.

    Names that are a part of the right one do not count; but as the benchmark deletes them while it walks through its list, the name after
    a deleted one is not looked at.
    """
    found, at = [name for name in classes if name in prediction], 0
    while at < len(found):
        if found[at] in answer and found[at] != answer:
            del found[at]
        at += 1
    return 1 / len(found) if answer in found else 0.0


def retrieval(prediction: str, answer: str, _: Sequence[str]) -> float:
    """The share of the prediction's numbers that are the right paragraph's."""
    return _share_of_numbers(prediction, re.findall(r"Paragraph (\d+)", answer))


def retrieval_zh(prediction: str, answer: str, _: Sequence[str]) -> float:
    """`retrieval`, 0 to 1, where the answer names its paragraph in Chinese."""
    return _share_of_numbers(prediction, re.findall(r"段落(\d+)", answer))


def count(prediction: str, answer: str, _: Sequence[str]) -> float:
    """The share of the prediction's numbers, 0 to 1, that are the answer."""
    return _share_of_numbers(prediction, [answer])


def code_sim(prediction: str, answer: str, _: Sequence[str]) -> float:
    """Similarity of the first line that is no comment or fence, rounded to percent as fuzzywuzzy's `ratio` does without its C extension."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100


METRICS: dict[str, Metric] = {
    "qa_f1": qa_f1,
    "qa_f1_zh": qa_f1_zh,
    "rouge": rouge,
    "rouge_zh": rouge_zh,
    "classification": classification,
    "retrieval": retrieval,
    "retrieval_zh": retrieval_zh,
    "count": count,
    "code_sim": code_sim,
}


def needed(metric: str) -> str | None:
    """The package that a metric lacks here, or None."""
    return "jieba" if metric in ("qa_f1_zh", "rouge_zh") and importlib.util.find_spec("jieba") is None else None


def _f1(predicted: Sequence[str], wanted: Sequence[str]) -> float:
    same = sum((Counter(predicted) & Counter(wanted)).values())
    if not same:
        return 0.0
    precision, recall = same / len(predicted), same / len(wanted)
    return 2 * precision * recall / (precision + recall)


def _plain_words(text: str) -> list[str]:
    return ARTICLES.sub(" ", "".join(c for c in text.lower() if c not in string.punctuation)).split()


def _without_punctuation(word: str) -> str:
    return "".join("".join(c for c in word.lower() if c not in string.punctuation + CHINESE_PUNCTUATION).split())


def _cut(text: str) -> list[str]:
    jieba = importlib.import_module("jieba")  # only Chinese tasks need it
    jieba.setLogLevel("WARNING")  # it tells about its dictionary otherwise
    return list(jieba.cut(text, cut_all=False))


def _share_of_numbers(prediction: str, wanted: Sequence[str]) -> float:
    """0 where the prediction has no number, or the answer names none."""
    numbers = re.findall(r"\d+", prediction)
    return sum(number == wanted[0] for number in numbers) / len(numbers) if numbers and wanted else 0.0

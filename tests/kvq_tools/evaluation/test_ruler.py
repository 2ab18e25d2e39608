"""Variable tracking, common words and frequent words: the answer follows from the prompt, and from
nothing else in it."""

import collections
import re

import pytest

from kvq_tools.evaluation.tasks import niah, ruler
from tests.kvq_tools.evaluation.task_samples import embedded_prompts, prompt_text

# the embedded model's tokens are short
LENGTHS = {"vt": (1400, 2800), "cwe": (2400, 5800), "fwe": (600, 1200)}


def puzzles(kind, **changes):
    return ruler.generated(
        embedded_prompts(), kind, **{"lengths": LENGTHS[kind], "count": 2} | changes
    )


@pytest.mark.parametrize("kind", ruler.KINDS)
def test_the_seed_decides_about_samples_and_each_length_and_index_has_its_own(kind):
    made = puzzles(kind)
    assert made == puzzles(kind)
    assert made != puzzles(kind, seed=1)
    assert len({sample.answers for sample in made}) == len(made) == 4
    assert puzzles(kind, lengths=LENGTHS[kind][1:], count=1) == made[2:3], (
        "what else is asked for makes a difference"
    )


@pytest.mark.parametrize("kind", ruler.KINDS)
@pytest.mark.parametrize("new", [None, 8])
def test_prompt_and_answer_have_the_length(kind, new):
    for sample in puzzles(kind, max_new_tokens=new):
        assert sample.max_new_tokens == (new or ruler.MAX_NEW_TOKENS[kind])
        need, length = len(sample.prompt) + sample.max_new_tokens, sample.labels["length"]
        assert length - 100 < need <= length, f"{need} tokens"


def test_all_variables_of_the_chain_have_the_value_and_no_others_do():
    for sample in puzzles("vt"):
        words = prompt_text(sample)
        value = re.findall(r"5 variables are assigned the value (\d{5}), they are:", words)[-1]
        assert words.endswith(
            f"in the text above, 5 variables are assigned the value {value}, they are:"
        )
        having = {value}
        # in the order of the text
        for name, given in re.findall(r"^VAR ([A-Z]+) = (?:VAR )?(\w+)$", words, re.MULTILINE):
            having |= {name} if given in having else set()
        assert having == {value, *sample.answers}
        assert len(set(sample.answers)) == ruler.HOPS + 1
        assert len(re.findall(r"^VAR ", words, re.MULTILINE)) == 2 * (ruler.HOPS + 1), (
            "the example has a chain of its own"
        )


def numbered(words):
    """The words of the numbered lists of a prompt, for each list."""
    found = []
    for number, word in re.findall(r"(\d+)\. ([a-z]+)", words):
        if number == "1":
            found.append([])
        found[-1].append(word)
        assert int(number) == len(found[-1])
    return found


@pytest.mark.parametrize("length", LENGTHS["cwe"])
def test_the_common_words_are_the_most_frequent_of_the_list_and_stand_nowhere_else(length):
    often = ruler.SHORT if length < ruler.LONG_FROM else ruler.LONG
    for sample in puzzles("cwe", lengths=(length,)):
        example, shown, asked = numbered(prompt_text(sample))
        counts = collections.Counter(asked)
        assert {word for word, _ in counts.most_common(ruler.COMMON)} == set(sample.answers)
        assert {counts[word] for word in sample.answers} == {often.common}
        others = counts.keys() - set(sample.answers)
        assert {counts[word] for word in others} == {often.other}
        assert not any(answer in word for answer in sample.answers for word in (*others, *example))
        assert set(shown) == {
            word for word, _ in collections.Counter(example).most_common(ruler.COMMON)
        }
        assert sorted(asked) != asked != sorted(asked, key=asked.index), "the list is shuffled"


def test_the_frequent_words_come_after_the_dots_and_before_all_others():
    for sample in puzzles("fwe", count=4, lengths=(600, 3000)):
        text = (
            prompt_text(sample)
            .removeprefix(ruler.FWE.partition("{")[0])
            .partition("\nQuestion")[0]
            .split()
        )
        (dots, maximum), *ranks = collections.Counter(text).most_common()
        assert dots == ruler.DOTS
        assert {word for word, _ in ranks[:3]} == set(sample.answers)
        frequencies = [count for _, count in ranks]
        assert frequencies[2] > frequencies[3]
        assert frequencies[0] / maximum == pytest.approx(1 / 4, rel=0.1)
        assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranks)


@pytest.mark.parametrize("kind", ruler.KINDS)
def test_right_answers_score_one_and_wrong_ones_nothing(kind):
    sample, other, *_ = puzzles(kind)
    right, wrong = ", ".join(sample.answers), ", ".join(other.answers)
    half = sample.answers[: len(sample.answers) // 2]
    assert niah.score(sample, f" {right.upper()}.") == {"accuracy": 1}
    assert niah.score(sample, wrong) == niah.score(sample, "") == {"accuracy": 0}
    assert niah.score(sample, " ".join(half)) == {"accuracy": len(half) / len(sample.answers)}
    example = re.search("(?:in the list|they) are: (.*)", prompt_text(sample))
    assert (example is None) is (kind == "fwe"), "two tasks begin with an example"
    assert example is None or niah.score(sample, example[1]) == {"accuracy": 0}, (
        "its answer is right"
    )

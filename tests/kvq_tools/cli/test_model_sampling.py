"""Commands sample as the model asks for, unless an option says otherwise."""

import argparse
import types

import pytest

from kvq_models.inference.sampling import Sampling
from kvq_tools.cli import sampling_options
from kvq_tools.cli.console import UserError
from kvq_tools.cli.options.shared import add_generation

ASKED = Sampling(0.6, 20, 0.95, 0.0)


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_generation(parser, max_new_tokens=1)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("arguments", "sampling"),
    [
        ((), ASKED),
        (("--temperature", "1.5"), Sampling(1.5, 20, 0.95, 0.0)),
        (("--top-k", "0"), Sampling(0.6, 0, 0.95, 0.0)),
        (("--min-p", "0.1"), Sampling(0.6, 20, 0.95, 0.1)),
        (("--temperature", "0"), Sampling()),
    ],
)
def test_an_option_replaces_what_the_model_asks_for(arguments, sampling):
    assert sampling_options.checked_sampling(options(*arguments), ASKED) == sampling


def test_a_model_that_asks_for_nothing_is_greedy():
    assert sampling_options.checked_sampling(options()) == Sampling(0.0)
    assert sampling_options.checked_sampling(options("--top-p", "1")) == Sampling(0.0)
    assert sampling_options.checked_sampling(options("--top-p", "0.9")) == Sampling(1.0, 0, 0.9)


def test_a_filter_beside_temperature_0_is_refused_whatever_the_model_asks_for():
    with pytest.raises(UserError, match="--top-k has no effect at --temperature 0"):
        sampling_options.checked_sampling(options("--temperature", "0", "--top-k", "5"), ASKED)


def test_what_is_asked_for_and_not_computed_is_a_warning(capsys, types_unchecked):
    asked = types.SimpleNamespace(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0.0, unapplied=("repetition_penalty=1.1",)
    )
    assert sampling_options.model_sampling(types.SimpleNamespace(generation=asked)) == ASKED
    assert "repetition_penalty=1.1, which kvq does not compute" in capsys.readouterr().err

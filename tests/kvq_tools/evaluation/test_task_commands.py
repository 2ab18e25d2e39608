"""Task commands: default lengths, tables, and users' mistakes in one line."""

import argparse
import functools
import itertools

from kvq_tools.cli import task_runs
from kvq_tools.evaluation.tasks import passkey
from tests.kvq_models.checkpoints import tiny_config
from tests.kvq_tools.evaluation.task_samples import embedded_prompts


def default_lengths(make, positions):
    """Return the lengths of the samples that a command makes for a model of so many positions
    without --lengths."""
    options = argparse.Namespace(lengths=None, limit=1, seed=0, max_new_tokens=None)
    samples = task_runs.generated(options, tiny_config(max_position_embeddings=positions), make)
    return [
        length for length, _ in itertools.groupby(sample.labels["length"] for sample in samples)
    ]


def test_default_lengths_are_those_within_the_positions_that_the_question_fits(capsys):
    make = functools.partial(passkey.generated, embedded_prompts(), depths=(0.0,))
    assert default_lengths(make, 4096) == [1024, 2048, 4096]
    assert capsys.readouterr().err == ""
    assert default_lengths(make, 256) == [128, 256], "the question alone takes more than 64 tokens"
    told = capsys.readouterr().err
    assert "no samples of 64 tokens: the question needs about 1" in told, told

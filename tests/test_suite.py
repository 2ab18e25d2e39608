"""The run of tests itself: every method has a row that runs by default, and workers share compiled
programs."""

import pathlib
import re
import warnings

import jax
import jax.numpy as jnp
import pytest

import kvq_jax as kvq
from tests.exhaustive import some
from tests.methods_table import METHOD_CASES, ONE_OF_EACH, kind


def test_every_method_has_a_row_that_slow_tests_run_by_default():
    def methods(rows) -> set[str]:
        return {kind(re.split("[:=]", row.spec)[0]) for row in rows}

    named = set(map(kind, kvq.methods.METHODS))
    assert named <= methods(ONE_OF_EACH), (
        f"{named - methods(ONE_OF_EACH)} runs with --exhaustive alone"
    )
    assert methods(METHOD_CASES) == methods(ONE_OF_EACH)
    assert len(ONE_OF_EACH) < len(METHOD_CASES) / 2, "slow tests run over almost everything"


def test_cases_that_are_not_usual_are_marked_whatever_their_values():
    marked = {
        param.values: [mark.name for mark in param.marks]
        for param in some([("a", 1), ("b", 2), "c"], [("a", 1)])
    }
    assert marked == {("a", 1): [], ("b", 2): ["exhaustive"], ("c",): ["exhaustive"]}
    with pytest.raises(AssertionError, match="are not cases"):
        some(["a"], ["b"])


def test_a_program_that_another_worker_is_still_writing_is_compiled_again():
    @jax.jit
    def half_written_program(x):
        return jnp.sin(x) * 1.875

    expected = half_written_program(jnp.ones(3))
    folder = pathlib.Path(jax.config.jax_compilation_cache_dir)
    [program] = folder.glob("jit_half_written_program-*-cache")
    try:
        program.write_bytes(b"")
        half_written_program.clear_cache()
        assert (half_written_program(jnp.ones(3)) == expected).all()
        half_written_program.clear_cache()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what every other warning does
            with pytest.raises(UserWarning, match="Error reading"):
                half_written_program(jnp.ones(3))
    finally:
        program.unlink()

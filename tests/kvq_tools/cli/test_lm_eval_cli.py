"""`kvq lm-eval` passes its command line on unchanged, and kvq is one of lm-evaluation-harness's
models."""

import sys

import pytest

from kvq_tools import evaluation
from kvq_tools.cli.commands import lm_eval as command
from tests.kvq_tools.cli.test_cli_errors import assert_one_line_error


@pytest.fixture
def model():
    """Return the module of lm-eval's model."""
    name, reason = "kvq_tools.evaluation.lm_eval_model", "the extra eval is not installed"
    return pytest.importorskip(name, reason=reason, exc_type=ImportError)


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        (["run", "--tasks", "t"], ["run", "--tasks", "t", "--model", "kvq"]),
        (["--tasks", "t", "--json"], ["--tasks", "t", "--json", "--model", "kvq"]),
        (["run", "--model", "hf"], ["run", "--model", "hf"]),
        (["run", "--model=hf"], ["run", "--model=hf"]),
        (["run", "--help"], ["run", "--help"]),
        (["ls", "tasks"], ["ls", "tasks"]),
    ],
)
def test_the_command_line_is_passed_on_with_a_model(arguments, passed, model, run, monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(model, "cli_evaluate", lambda: seen.append(list(sys.argv)))
    code, _, err = run("lm-eval", *arguments)
    assert code == 0, err
    assert seen == [["kvq lm-eval", *passed]]


def test_an_unknown_task_is_one_line(model, run, monkeypatch):
    def refuse() -> None:  # as lm-eval does
        raise ValueError("Tasks not found: no_such_task")

    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(model, "cli_evaluate", refuse)
    assert_one_line_error(
        run("lm-eval", "run", "--tasks", "no_such_task"),
        "Tasks not found: no_such_task; `kvq lm-eval ls tasks` lists all",
    )


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"pretrained": "nowhere"}, "'nowhere' does not exist"),
        ({"cache": "kivi:bits=99"}, "99"),
        ({"max_lenght": 9}, "--model_args has no 'max_lenght'; it takes pretrained, cache"),
    ],
)
def test_arguments_that_do_not_fit_are_one_line(given, line, model, run, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    beside = {"batch_size": 1, "max_batch_size": None, "device": "cpu"}  # as lm-eval does
    create = model.KvqLM.create_from_arg_obj
    monkeypatch.setattr(model, "cli_evaluate", lambda: create(given, beside))
    assert_one_line_error(run("lm-eval", "run", "--tasks", "t"), line)


@pytest.mark.usefixtures("model")
def test_lm_eval_knows_the_model():
    from lm_eval.api.registry import get_model

    assert get_model(command.MODEL).__name__ == "KvqLM"


def test_without_lm_eval_the_error_names_the_extra(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    loaded = ("lm_eval.", "kvq_tools.evaluation.lm_eval_model")
    for module in [name for name in sys.modules if name.startswith(loaded)]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr(evaluation, "lm_eval_model", raising=False)
    assert_one_line_error(run("lm-eval", "ls", "tasks"), "pip install 'kvq-jax[eval]'")

"""The benchmark of long-context tasks: a small run of it, its page, how it goes on, and what it
refuses."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

import kvq_tools.cli
from laboratory import results_page
from laboratory.quality import long_context
from laboratory.quality.intervals import gap_interval, share_interval
from laboratory.quality.long_context_report import (
    FULL_PRECISION,
    CacheSize,
    Cell,
    LongContextReport,
)
from laboratory.results_page import RESULTS

PASSAGE = pathlib.Path(kvq_tools.cli.__file__).parent / "passage.txt"
SMALL = [
    "--tasks",
    "passkey",
    "single_1",
    "--lengths",
    "320",
    "--count=2",
    "--batch=2",
    "--threshold=0.4",
]


def arguments(file, *more):
    return [*SMALL, f"--json={file}", "--caches", "kivi:bits=4,recent=32", "int2", *more]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """What a small run on the embedded model wrote: the model finds pass keys, and has not seen
    questions for needles."""
    file = tmp_path_factory.mktemp("results") / "long_context_test.json"
    long_context.main(arguments(file))
    return file


@pytest.fixture(scope="module")
def report(file):
    return LongContextReport.read(file)


def test_scores_are_those_of_the_samples_and_tell_good_caches_from_bad_ones(report):
    exact, kivi, coarse = (report.cells_of(size.cache, 320) for size in report.caches)
    assert [size.cache for size in report.caches] == [
        FULL_PRECISION,
        "kivi:bits=4,recent=32",
        "int2",
    ]
    assert exact["passkey"].scores == kivi["passkey"].scores == (1.0, 1.0)
    assert coarse["passkey"].accuracy < 1
    assert 16 > report.caches[1].stored_bits > report.caches[2].stored_bits


def test_what_full_precision_cannot_do_is_not_asked_of_others(report):
    exact, *others = (report.cells_of(size.cache, 320) for size in report.caches)
    assert exact["single_1"].accuracy < report.threshold
    assert [list(found) for found in others] == [["passkey"], ["passkey"]]


def test_a_complete_run_leaves_its_report_and_its_command_names_no_folder(report, file):
    assert list(file.parent.iterdir()) == [file]
    assert report.command.startswith(
        "python -m laboratory.quality.long_context --caches kivi:bits=4,recent=32 int2 --tasks"
        " passkey"
    )
    assert report.command.endswith(f"--json {file.name}")
    assert str(file.parent) not in report.command


CACHES = (CacheSize(FULL_PRECISION, 16.0), CacheSize("kivi", 2.5))


def made(*cells):
    fields: dict[str, Any] = {
        "command": "",
        "date": "",
        "jax_version": "",
        "model": "",
        "text": None,
        "calibration_text": None,
    }
    sizes: dict[str, Any] = {
        "count": 4,
        "threshold": 0.1,
        "chat": False,
        "samples": 1,
        "sample_length": 1,
        "new_tokens": {"vt": 64},
    }
    return LongContextReport(
        **fields,
        **sizes,
        tasks=("vt", "cwe", "fwe"),
        lengths=(512, 1024),
        caches=CACHES,
        cells=cells,
    )


def test_the_page_has_means_by_length_and_a_table_of_tasks_for_each(tmp_path):
    vt, cwe, kivi_vt, kivi_cwe = (
        (1.0, 0.5, 0.75, 0.25),
        (0.5, 0.5, 0.0, 1.0),
        (0.5, 0.5, 0.5, 0.5),
        (0.0, 0.5, 0.0, 1.0),
    )
    cells = [
        Cell("dense", "vt", 512, vt),
        Cell("dense", "cwe", 512, cwe),
        Cell("dense", "fwe", 512, (0.0,) * 4),
    ]
    cells += [
        Cell("dense", "vt", 1024, (0.0,) * 4),
        Cell("kivi", "vt", 512, kivi_vt),
        Cell("kivi", "cwe", 512, kivi_cwe),
    ]
    report = made(*cells)
    report.write(tmp_path / "long_context_made.json")
    page = results_page.render(tmp_path)["long_context_made.md"]

    def cell(scores):
        low, high = share_interval(scores)
        return f"{100 * np.mean(scores):.0f} [{100 * low:.0f}, {100 * high:.0f}]"

    assert f"| `dense` | 16.00 | {cell(vt)} | {cell(cwe)} | 0 [0, 60] |" in page
    assert f"| `kivi` | 2.50 | {cell(kivi_vt)} | {cell(kivi_cwe)} |  |" in page
    assert "| `dense` | 16.00 | 0 [0, 60] |  |  |" in page
    assert "| cache | stored bits | 512 tokens (2 tasks) | to full precision |\n" in page, (
        "no task is left at 1024"
    )
    exact, coded = (*vt, *cwe), (*kivi_vt, *kivi_cwe)
    gap, (low, high) = np.mean(coded) - np.mean(exact), gap_interval(coded, exact)
    assert f"| `dense` | 16.00 | {cell(exact)} |  |" in page
    difference = f"{100 * gap:+.0f} [{100 * low:+.0f}, {100 * high:+.0f}]"
    assert f"| `kivi` | 2.50 | {cell(coded)} | {difference} |" in page


def test_every_task_has_count_samples_and_those_of_one_fact_stand_at_all_depths(tmp_path):
    options = long_context.argument_parser().parse_args(
        [
            f"--text={RESULTS.parents[1] / 'LICENSE'}",
            "--lengths=2000",
            "--count=3",
            f"--json={tmp_path / 'a'}",
            "--caches=int4",
        ]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            long_context.ruler.KINDS, "cwe", long_context.ruler.KINDS["fwe"]
        )  # its list has no room in the model's positions
        bench = long_context.Bench(options)
    assert {task for task, _ in bench.samples} == set(long_context.TASKS)
    for (task, length), samples in bench.samples.items():
        assert len({sample.prompt for sample in samples}) == 3, task
        assert all(
            len(sample.prompt) + long_context.new_tokens(task) <= length for sample in samples
        )
        depths = [sample.labels.get("depth") for sample in samples]
        far = [1 / 12, 1 / 4, 5 / 12] if task == "quote" else [1 / 6, 1 / 2, 5 / 6]
        assert depths in ([None] * 3, pytest.approx(far))


def test_a_stopped_run_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    asked = []

    def until_the_second(candidates, task, samples, *_, **__):
        asked.append(([str(spec) for _, spec in candidates], samples[0].labels["length"]))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return tuple(
            [
                long_context.runner.ScoredAnswer(i, "", 0, {"accuracy": 0.5})
                for i in range(len(samples))
            ]
            for _ in candidates
        )

    monkeypatch.setattr(long_context.shared_prompts, "run_together", until_the_second)
    command = [
        "--tasks=passkey",
        "--lengths",
        "300",
        "320",
        "--count=2",
        "--caches=int4",
        f"--json={tmp_path / 'a.json'}",
    ]
    with pytest.raises(KeyboardInterrupt):
        long_context.main(command)
    assert not (tmp_path / "a.json").exists()
    with pytest.raises(SystemExit):
        long_context.main([*command, "--seed=1"])
    assert "holds rows of another run (seed)" in capsys.readouterr().err
    long_context.main(command)
    choice, both = ["dense"], ["dense", "int4"]
    assert asked == [(choice, 300), (both, 300), (both, 300), (choice, 320), (both, 320)]
    assert len(LongContextReport.read(tmp_path / "a.json").cells) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--tasks=multikey_1", "--caches=int4"],
            "multikey_1 hides needles in a text: give one (--text FILE)",
        ),
        (
            ["--tasks=passkey", "--caches=kvquant:bits=2"],
            "kvquant:bits=2 is calibrated: give --calibration-text",
        ),
        (["--tasks=passkey", "--lengths=9000", "--caches=int4"], "and the model was trained for"),
        (["--tasks=passkey", "--lengths=300", "--chat", "--caches=int4"], "no chat template"),
        (
            ["--tasks=passkey", "--count=0", "--caches=int4"],
            "--count, --choosing and --batch must be at least 1",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_is(options, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        long_context.main([*options, f"--json={tmp_path / 'none.json'}"])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

"""The self-test of a kernel on Mosaic GPU covers appending, blocks of tables among them, and
notices numbers that differ. Interpreted on both sides."""

from collections.abc import Callable

import numpy as np
import pytest

from pallas_kernels import self_test
from pallas_kernels.launch import Launch
from pallas_kernels.readers.base import Reader
from pallas_kernels.readers.codebook import CodebookReader
from pallas_kernels.readers.dense import DenseReader
from pallas_kernels.readers.eigen_keys import EigenKeys
from pallas_kernels.readers.polar import PolarReader
from pallas_kernels.readers.rotary import RotatedReader
from pallas_kernels.readers.runs import RunsKeys, RunsValues
from pallas_kernels.tiles.layout import SPAN, plane_layout
from tests.pallas_kernels.lowering import needs_mosaic
from tests.pallas_kernels.run_sides import run_layouts

MOSAIC = Launch(interpret=True, route="mosaic")


TABLES = CodebookReader(plane_layout(4, 64, SPAN), "tokens", 64)


@pytest.mark.exhaustive
@needs_mosaic
@pytest.mark.parametrize("keys", [TABLES, RotatedReader(TABLES)], ids=["", "before_rope"])
def test_tables_are_appended_as_by_the_other_route(keys: Reader):
    format = self_test.Format(keys, TABLES, 2, "mosaic")
    outputs, expected = (
        self_test._outputs(format, launch, None) for launch in (MOSAIC, self_test.INTERPRETED)
    )
    assert self_test._compare(outputs, expected) is None
    arrays = [name for name in expected if name.startswith("appended")]
    assert len(arrays) == 2 * 5, "of each side: sink, ring, words, scales and zero points"
    for name in arrays:
        wrong = dict(outputs) | {name: outputs[name] + np.float32(1)}
        assert self_test._compare(wrong, expected), f"{name} would pass"


def polar_keys() -> self_test.Format:
    keys = PolarReader(plane_layout(8, 32, SPAN), 4, 128)
    return self_test.Format(keys, DenseReader(64, "bfloat16"), 2, "mosaic")


def runs_of_channels() -> self_test.Format:
    """Return keys before RoPE, as their windows are."""
    layouts = tuple(run_layouts("54332110", 64))
    return self_test.Format(RunsKeys(layouts, 64), RunsValues(layouts, 64), 2, "mosaic")


@pytest.mark.exhaustive
@needs_mosaic
@pytest.mark.parametrize("format_of", [polar_keys, runs_of_channels])
def test_a_format_and_the_windows_beside_it_are_tested(format_of: Callable[[], self_test.Format]):
    outputs, expected = (
        self_test._outputs(format_of(), launch, None) for launch in (MOSAIC, self_test.INTERPRETED)
    )
    assert self_test._compare(outputs, expected) is None
    assert {"attention", "attention over windows"} <= set(outputs) & set(expected)
    for name in ("attention", "attention over windows"):
        wrong = dict(outputs) | {name: 1.03 * outputs[name]}
        assert self_test._compare(wrong, expected), f"{name} would pass"


@pytest.mark.exhaustive
@needs_mosaic
def test_what_mosaic_alone_reads_is_compared_with_its_own_array_operations(
    monkeypatch: pytest.MonkeyPatch,
):
    from pallas_kernels.mosaic import eigen_keys  # needs JAX 0.11

    layouts = tuple(run_layouts("54332110", 64))
    format = self_test.Format(EigenKeys(layouts, 64), RunsValues(layouts, 64), 2, "mosaic")
    assert self_test.difference(format, MOSAIC) is None
    load_table = eigen_keys.load_table
    monkeypatch.setattr(eigen_keys, "load_table", lambda *args: 1.05 * load_table(*args))
    outputs = self_test._outputs(format, MOSAIC, None)
    monkeypatch.undo()
    expected = self_test._outputs(format, MOSAIC, None)
    assert str(self_test._compare(outputs, expected)).startswith("attention differs")

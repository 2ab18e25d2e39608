"""A prompt on a GPU launches few kernels, in an empty cache and behind older tokens."""

import pytest

from benchmarks.machine_code.prompts import measure


@pytest.mark.parametrize(("older", "maximum", "by_xla"), [(0, 30, 700), (28672, 130, 80000)])
def test_a_layer_of_a_prompt_launches_few_kernels(older: int, maximum: int, by_xla: int):
    count = measure("kivi:bits=4", 4096, older, "cudnn")
    assert count.launches <= maximum
    assert measure("kivi:bits=4", 4096, older, "xla").launches > by_xla, "nothing would be counted"

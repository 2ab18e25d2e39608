"""The name of this machine's processor."""

import platform

import pytest

from kvq_tools import processor

TWO = """\
processor\t: 0
cpu family\t: {}
model\t\t: 1
model name\t: AMD EPYC
flags\t\t: fpu avx2

processor\t: 1
cpu family\t: 7
model\t\t: 2
model name\t: another
"""


@pytest.mark.parametrize("family", [25, 26])
def test_family_and_model_tell_processors_of_one_name_apart(tmp_path, monkeypatch, family):
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    processor.CPUINFO.write_text(TWO.format(family))
    assert processor.processor_name() == f"AMD EPYC, family {family} model 1"


@pytest.mark.parametrize("lines", [None, "processor\t: 0\nCPU part\t: 0xd40\n"])
def test_a_system_that_does_not_say_has_the_platforms_name(tmp_path, monkeypatch, lines):
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    if lines is not None:
        processor.CPUINFO.write_text(lines)
    assert processor.processor_name() == platform.processor()

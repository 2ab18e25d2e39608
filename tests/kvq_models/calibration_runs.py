"""A small calibration, for the tests of its making and of its file."""

from typing import Any

import numpy as np
import pytest

from kvq_models import calibrate
from tests.kvq_models.checkpoints import model, random_tokens

LENGTH = 20
SPEC = "kvquant:bits=2,outliers=0.1,block=8"
KEYS_ONLY = "k=kvquant:bits=3,outliers=0.1+v=kivi:bits=2+cache:sink=1,recent=0,block=32"
TEXT = np.asarray(random_tokens((1, 200)))[0]


def run(work, spec=SPEC, *, llama=None, text=TEXT, **options):
    return calibrate(
        llama or model(),
        text,
        spec,
        **({"samples": 3, "length": LENGTH, "work": work, "text": "t.txt"} | options),
    )


def one_line(
    message: str,
    function: Any,
    *arguments: Any,
    error: type[Exception] = ValueError,
    **options: Any,
) -> None:
    with pytest.raises(error) as caught:
        function(*arguments, **options)
    assert message in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)

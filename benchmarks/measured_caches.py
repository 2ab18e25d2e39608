"""Make kvq_tools/planning/measured.json: the KL of the protocol's caches after a prompt, which
`kvq memory --budget` shows beside sizes.

`python -m benchmarks.results_page` writes it.
"""

from __future__ import annotations

import json
import pathlib
import re

import kvq_jax as kvq
from benchmarks import llama_8b
from benchmarks.protocol import front_page, made_plans
from benchmarks.protocol.front_page import LENGTH
from benchmarks.protocol.report import ProtocolReport
from kvq_tools.evaluation.protocol import windowed
from kvq_tools.planning import measured

FILE = pathlib.Path(measured.__file__).with_name("measured.json")
MODELS = {"smollm2": "SmolLM2-135M"}
DIGITS = 3  # of a KL


def read() -> ProtocolReport:
    """Read the report of the model whose KL is shown."""
    return ProtocolReport.read(front_page.FILE)


def named(cache: str, report: ProtocolReport) -> str:
    """Return the text of a cache with the protocol's windows, without the options that it has
    anyway: what a method learned has no place in it."""
    spec = kvq.parse(cache)
    equal = windowed(spec, llama_8b.llama_config(), report.sizes(LENGTH))
    windows = [f"{name}={getattr(equal, name)}" for name in ("sink", "recent", "block")]
    both_sides = "+" in cache
    text = f"{cache}+cache:{','.join(windows)}" if both_sides else _joined(cache, windows)
    for window in windows:
        shorter = re.sub(rf",{window}\b", "", text)
        text = shorter if kvq.parse(shorter) == equal else text
    return text


def _joined(cache: str, options: list[str]) -> str:
    return f"{cache}{',' if ':' in cache else ':'}{','.join(options)}"


def contents(report: ProtocolReport) -> str:
    """Render the file: each cache that was measured after a prompt, in the order of the rows, with
    its KL on each text of another domain than the calibration's."""
    fields = {
        "model": MODELS[report.model],
        "texts": [text.name for text in report.outside],
        "windows": report.windows,
        "prompt": LENGTH,
        "scored": report.scored,
    }
    caches = [
        {
            "cache": named(row.cache, report),
            "kl": [
                float(f"{row.measured.kl(report.domains[text.domain]).value:.{DIGITS}g}")
                for text in report.outside
            ],
        }
        for row in report.quantized(LENGTH, "prompt")
        if made_plans.MARK not in row.cache  # widths for another model's layers
    ]
    lines = ",\n".join(f"    {json.dumps(cache)}" for cache in caches)
    head = json.dumps(fields, indent=2).removesuffix("\n}")
    return f'{head},\n  "caches": [\n{lines}\n  ]\n}}\n'

"""Make kvq_tools/planning/measured.json: the KL of caches with equal windows on two texts, which
`kvq memory --budget` shows beside sizes.

`python -m benchmarks.results_page` writes it.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Sequence

import kvq_jax as kvq
from benchmarks.quality.comparison import PLAIN
from benchmarks.quality.report import QualityReport
from benchmarks.report_file import RESULTS
from kvq_tools.planning import measured

FILE = pathlib.Path(measured.__file__).with_name("measured.json")
MODELS = {"smollm2": "SmolLM2-135M"}
DIGITS = 3  # of a KL
REPORTS = "quality_waterfill_smollm2", "quality_waterfill_novel_smollm2"


def read() -> list[QualityReport]:
    """Read the reports of both texts; WikiText-2's is the first."""
    return [QualityReport.read(RESULTS / f"{name}.json") for name in REPORTS]


def short(cache: str) -> str:
    """Return the text of a spec without the windows that it has anyway."""
    for window in re.findall(r"[,:](?:sink|recent|block)=\d+", cache):
        shorter = cache.replace(window, "", 1) if window[0] == "," else cache
        cache = shorter if kvq.parse(shorter) == kvq.parse(cache) else cache
    return cache


def contents(reports: Sequence[QualityReport]) -> str:
    """Render the file: each cache that all reports measured as it is, in their order.

    Raises ValueError if the reports differ in their model or their windows.
    """
    settings = {(report.model, report.windows, report.window, report.prompt) for report in reports}
    if len(settings) != 1:
        raise ValueError(f"reports of one file were measured differently: {settings}")
    ((model, windows, window, prompt),) = settings
    by_report = [
        {
            short(row.cache): float(f"{row.kl:.{DIGITS}g}")
            for row in report.rows
            if row.variant == PLAIN and not row.fake and not row.other_text
        }
        for report in reports
    ]
    fields = {
        "model": MODELS[model.partition(",")[0]],
        "texts": [report.text.name for report in reports],
        "windows": windows,
        "prompt": prompt,
        "scored": window - prompt - 1,
    }
    caches = [
        {"cache": cache, "kl": [kl[cache] for kl in by_report]}
        for cache in by_report[0]
        if all(cache in kl for kl in by_report)
    ]
    lines = ",\n".join(f"    {json.dumps(cache)}" for cache in caches)
    head = json.dumps(fields, indent=2).removesuffix("\n}")
    return f'{head},\n  "caches": [\n{lines}\n  ]\n}}\n'

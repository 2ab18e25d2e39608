"""Write the files of a report: report.json, one PNG for each picture, and the page. Each appears
whole or not at all."""

from __future__ import annotations

from pathlib import Path

from kvq_jax.files import whole
from kvq_models.calibration.progress import Progress, silent
from kvq_tools.report import page
from kvq_tools.report.schema import CacheReport, dump

JSON, PAGE = "report.json", "index.html"


def write_numbers(report: CacheReport, out: Path) -> Path:
    """Write report.json, from which all other files can be made again."""
    target = out / JSON
    whole.write(target, dump(report))
    return target


def write_page(
    report: CacheReport, out: Path, progress: Progress | None = None
) -> tuple[Path, ...]:
    """Write the page and the PNGs into an existing directory, over files of the same names. Return
    their paths, the page first."""
    shown, written = page.sections(report), [out / PAGE]
    pictures = [picture for section in shown for picture in section.pictures]
    for picture in (progress or silent)(pictures, "drawing pictures"):
        written.append(out / f"{picture.name}.png")
        whole.write(written[-1], picture.light)
    whole.write(written[0], page.html(report, shown))
    return tuple(written)

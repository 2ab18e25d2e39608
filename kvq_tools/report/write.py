"""Write the files of a report: report.json, one PNG for each picture, and the page."""

from __future__ import annotations

from pathlib import Path

from kvq_models.calibration.progress import Progress
from kvq_tools.report import page
from kvq_tools.report.schema import Report, dump

JSON, PAGE = "report.json", "index.html"


def write_numbers(report: Report, out: Path) -> Path:
    """Write report.json, from which the rest can be made again."""
    target = out / JSON
    target.write_text(dump(report), encoding="utf-8")
    return target


def write_page(report: Report, out: Path, progress: Progress | None = None) -> tuple[Path, ...]:
    """Write the page and the PNGs into a directory that exists, over files of the same names; the page is the first of the result."""
    shown, written = page.sections(report), [out / PAGE]
    pictures = [picture for section in shown for picture in section.pictures]
    for picture in (progress or (lambda items, _: items))(pictures, "drawing pictures"):
        written.append(out / f"{picture.name}.png")
        written[-1].write_bytes(picture.light)
    written[0].write_text(page.html(report, shown), encoding="utf-8")
    return tuple(written)

"""The files of a report: report.json, one PNG for each picture, and the page."""

from __future__ import annotations

from pathlib import Path

from kvq_models.calibration.progress import Progress
from kvq_tools.report import page
from kvq_tools.report.schema import Report, dump

JSON, PAGE = "report.json", "index.html"


def write_numbers(report: Report, out: Path) -> Path:
    """report.json, from which the rest can be made."""
    target = out / JSON
    target.write_text(dump(report), encoding="utf-8")
    return target


def write_page(report: Report, out: Path, progress: Progress | None = None) -> tuple[Path, ...]:
    """The page, then the PNGs. The directory must exist; files of the same names are replaced."""
    target = out / PAGE
    target.write_text(page.html(report), encoding="utf-8")
    written = [target]
    pictures = [picture for section in page.sections(report) for picture in section.pictures]
    for picture in (progress or (lambda items, _: items))(pictures, "drawing pictures"):
        target = out / f"{picture.name}.png"
        target.write_bytes(picture.png)
        written.append(target)
    return tuple(written)

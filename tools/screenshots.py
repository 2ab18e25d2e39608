"""Take the pictures of docs/screenshots: commands in a real terminal, a report in a real browser.

    python -m tools.screenshots docs/screenshots                      the commands
    python -m tools.screenshots pictures --page report/index.html     a page of `kvq report`

The terminal is xterm on a virtual screen, the browser is Chromium without a window. On Debian both
come with `apt-get install chromium fonts-dejavu imagemagick xterm xvfb`. Commands run as they are,
with this environment's kvq.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PASSAGE = "kvq_tools/cli/passage.txt"
COMMANDS = {
    "eval": (
        f"kvq eval embedded --text {PASSAGE} --window 512 --prompt 256 --cache kivi:bits=4 --cache"
        " kivi:bits=2 --cache innerq:bits=2"
    ),
    "memory": (
        "kvq memory embedded --context 2048 --cache kivi:bits=4 --cache innerq:bits=2 --cache squat"
    ),
}
COLUMNS = (60, 80)
ROWS = 80  # of a terminal; what is empty below the output is cut off
WIDTHS = (1400, 420)  # of a browser's window, in pixels
HEIGHT = 2000
PROGRAMS = {"terminal": ("Xvfb", "xterm", "import", "convert"), "report": ("chromium", "convert")}
COLORS = 64  # of a file: a picture of text has few
MAX_SECONDS = 600  # of one command


def terminal(command: str, columns: int, picture: Path) -> None:
    """Run a command in a terminal and photograph its window once the command has ended.
    RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        status = Path(folder) / "status"
        script = f"printf '$ %s\\n' {shlex.quote(command)}; {command} 2>/dev/null; "
        script += f"echo $? > {status}.new; mv {status}.new {status}; sleep {MAX_SECONDS}"
        display, number = os.pipe()
        with subprocess.Popen(
            ["Xvfb", "-displayfd", str(number), "-screen", "0", "1400x1900x24"], pass_fds=[number]
        ) as screen:
            os.close(number)
            with os.fdopen(display) as answer:
                where = f":{answer.readline().strip()}"
            if where == ":":
                raise RuntimeError("Xvfb did not start")
            look = [
                "-fa",
                "DejaVu Sans Mono",
                "-fs",
                "11",
                "-bg",
                "white",
                "-fg",
                "#1c2330",
                "-b",
                "12",
                "+sb",
            ]
            size = ["-geometry", f"{columns}x{ROWS}+0+0"]
            path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
            with subprocess.Popen(
                ["xterm", *look, *size, "-e", "sh", "-c", script],
                cwd=ROOT,
                env=os.environ | path | {"DISPLAY": where},
            ) as xterm:
                try:
                    code = _answer(status)
                    time.sleep(1)  # the terminal draws what it was sent last
                    subprocess.run(
                        ["import", "-display", where, "-window", "root", picture], check=True
                    )
                finally:
                    xterm.kill()
                    screen.terminate()
    if code:
        raise RuntimeError(f"{command!r} ended with status {code}")
    _small(
        picture,
        [
            "-bordercolor",
            "black",
            "-trim",
            "+repage",
            "-bordercolor",
            "white",
            "-trim",
            "+repage",
            "-border",
            "12",
        ],
    )


def _answer(status: Path) -> int:
    for _ in range(MAX_SECONDS * 5):
        if status.exists():
            return int(status.read_text())
        time.sleep(0.2)
    raise RuntimeError(f"no end after {MAX_SECONDS} s")


def report(page: Path, width: int, dark: bool, picture: Path) -> None:
    """Photograph the upper part of a page, as a reader with a light or a dark theme sees it."""
    theme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    with tempfile.TemporaryDirectory() as profile:
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
            theme,
        ]
        shot = [
            f"--window-size={width},{HEIGHT}",
            f"--screenshot={picture}",
            page.resolve().as_uri(),
        ]
        subprocess.run(
            ["chromium", *options, *shot],
            check=True,
            stderr=subprocess.DEVNULL,
            timeout=MAX_SECONDS,
        )
    _small(picture, [])


def _small(picture: Path, options: list[str]) -> None:
    subprocess.run(
        [
            "convert",
            picture,
            *options,
            "+dither",
            "-colors",
            str(COLORS),
            "-strip",
            f"PNG8:{picture}",
        ],
        check=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.screenshots", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument("--page", type=Path, help="the page of a report, in place of commands")
    options = parser.parse_args()
    kind = "terminal" if options.page is None else "report"
    missing = sorted(program for program in PROGRAMS[kind] if shutil.which(program) is None)
    if missing:
        parser.error(f"not installed: {', '.join(missing)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.page is None:
        for name, command in COMMANDS.items():
            for columns in COLUMNS:
                terminal(command, columns, options.folder / f"{name}_{columns}.png")
    else:
        for width in WIDTHS:
            for theme in ("light", "dark"):
                report(
                    options.page,
                    width,
                    theme == "dark",
                    options.folder / f"report_{width}_{theme}.png",
                )


if __name__ == "__main__":
    main()

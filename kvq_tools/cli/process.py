"""`kvq` as the whole of a process: what the console script runs."""

from __future__ import annotations

import sys
from typing import NoReturn

from kvq_tools.cli import interruption


def run() -> NoReturn:
    """Run the command and exit with its code; Ctrl-C ends it within a second, imports included."""
    interruption.watch()
    try:
        from kvq_tools.cli.main import main  # imported late: Ctrl-C is watched for already

        code = main()
    except (Exception, KeyboardInterrupt):
        if not interruption.was_pressed():
            raise
        # an import or native code was interrupted, and may have made another exception of it
        print(interruption.line(), file=sys.stderr)
        code = interruption.STATUS
    if code == interruption.STATUS:
        interruption.leave()
    interruption.done()
    sys.exit(code)

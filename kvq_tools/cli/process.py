"""Run `kvq` as a whole process: the console script's entry point."""

from __future__ import annotations

import gc
import sys
from typing import NoReturn

from kvq_tools.cli import interruption

# new objects, then collections of them: Python's 700 takes a fifth of a start with its many traces
COLLECTED_AFTER = 200_000, 2, 2


def run() -> NoReturn:
    """Run the command and exit with its code. Ctrl-C ends it within a second, even during
    imports."""
    interruption.watch()
    gc.set_threshold(*COLLECTED_AFTER)
    try:
        from kvq_tools.cli.main import main  # imported late, so that Ctrl-C works by now

        code = main()
    except ModuleNotFoundError as error:
        if (error.name or "kvq_tools").startswith("kvq_"):
            raise
        print(f"kvq needs {error.name}: pip install 'kvq-jax[tools]'", file=sys.stderr)
        code = 1
    except (Exception, KeyboardInterrupt):
        if not interruption.was_pressed():
            raise
        # an import or native code was interrupted and may have raised another exception instead
        print(f"kvq: {interruption.line()}", file=sys.stderr)
        code = interruption.STATUS
    if code == interruption.STATUS:
        interruption.leave()
    interruption.done()
    gc.freeze()  # Python would look for garbage in all of JAX: 0.2 s
    sys.exit(code)

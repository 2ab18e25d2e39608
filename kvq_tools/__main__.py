"""Run `kvq` as `python -m kvq_tools`."""

import sys

from kvq_tools.cli.main import main

sys.exit(main())

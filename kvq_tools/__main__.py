"""Run `kvq` as `python -m kvq_tools`."""

from kvq_tools.cli.process import run

run()

"""The settings and fixtures of the project's tests. In one run with files of tests/, give those
first."""

import sys

pytest_plugins = [] if "tests.conftest" in sys.modules else ["tests.conftest"]

"""The settings and fixtures of the project's tests."""

import sys

pytest_plugins = [] if "tests.conftest" in sys.modules else ["tests.conftest"]

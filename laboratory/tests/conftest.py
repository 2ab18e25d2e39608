"""The settings and fixtures of the project's tests. Run these tests by themselves."""

pytest_plugins = ["tests.conftest"]

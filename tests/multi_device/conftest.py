"""These tests need several devices, which a process must ask for before JAX starts:
tests/test_multi_device.py runs them in one of its own.

XLA_FLAGS=--xla_force_host_platform_device_count=8 pytest tests/multi_device
"""

import os

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    collect_ignore_glob = ["test_*.py"]

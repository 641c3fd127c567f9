"""Tests of integrations whose packages are heavy: they run with `make test-integrations`, which installs them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Ray gives way to everybody by default, and kills its workers when somebody else fills the machine's memory.
os.environ.update({"RAY_worker_niceness": "0", "RAY_memory_monitor_refresh_ms": "0"})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with a reason, where nobody asked for them: Ray alone starts half a dozen processes."""
    if os.environ.get("HEADRANK_TEST_INTEGRATIONS") != "1":
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs heavy packages, and runs with 'make test-integrations'"))

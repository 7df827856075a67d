"""Real vLLM engines on one depot: `prefill` and `decode`, started once for all tests of this directory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from engines import Running, start_engine

from pdrelay.depot.arena import Arena
from pdrelay.depot.hub import Hub
from pdrelay.depot.server import DepotServer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(240))

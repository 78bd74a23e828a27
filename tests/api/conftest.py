"""Servers for tests of the API; see serving.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ramet import LLM
from ramet.testing import check_idle
from tests.api.serving import Serve, Serving, serving


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Servers that are stopped at the end, when nothing may be left in their engines."""
    running: list[Serving] = []

    def start(llm: LLM | None = None, *, keys: tuple[str, ...] = (), **settings: Any) -> Serving:
        running.append(serving(llm, keys, settings))
        return running[-1]

    yield start
    for one in running:
        one.stop()
        check_idle(one.llm)


@pytest.fixture(scope="module")
def shared() -> Iterator[Serving]:
    """One server for tests that leave nothing behind."""
    one = serving(None, (), {})
    yield one
    one.stop()
    check_idle(one.llm)

"""A verb that has to wait: a generator that says which runs it waits for. Who drives it steps the engine."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TypeAlias, TypeVar

from ramet.engine.runs import Run

T = TypeVar("T")
# Yields the runs that must have finished before it goes on; closed early, it leaves nothing behind.
Operation: TypeAlias = Generator[Iterable[Run], None, T]

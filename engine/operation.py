"""A verb that has to wait: a generator that says which runs it waits for. Who drives it steps the engine."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeAlias, TypeVar

from ramet.engine.runs import Run

T = TypeVar("T")
# Yields the runs that must have finished before it goes on; closed early, it leaves nothing behind.
Operation: TypeAlias = Generator[Iterable[Run], None, T]


def together(operations: Sequence[Operation[T]], undo: Callable[[T], object]) -> Operation[list[T]]:
    """Several verbs in one batch, done when all are; if one fails, the others are closed or undone."""
    results: dict[int, T] = {}
    waiting: dict[int, Iterable[Run]] = {}

    def advance(index: int) -> None:
        waiting.pop(index, None)
        try:
            waiting[index] = next(operations[index])
        except StopIteration as stop:
            results[index] = stop.value

    try:
        for index in range(len(operations)):
            advance(index)
        while waiting:
            yield [run for runs in waiting.values() for run in runs]
            for index in list(waiting):
                advance(index)
    except BaseException:
        for result in results.values():
            undo(result)
        raise
    finally:
        for operation in operations:
            operation.close()
    return [results[index] for index in range(len(operations))]

"""What the examples have in common: many problems at once, what they took, and a table at the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ramet import AsyncLLM

P = TypeVar("P")
AT_ONCE = 4  # problems; their branches run in the same batches


@dataclass(frozen=True)
class Outcome:
    """What became of one problem."""

    solved: bool
    num_flat_tokens: int  # that a client without branches would have computed


@dataclass(frozen=True)
class Tally:
    """What one way of solving came to on all problems."""

    name: str
    num_problems: int
    num_solved: int
    num_tokens: int  # that went through the model
    num_flat_tokens: int
    seconds: float


async def tally(
    llm: AsyncLLM,
    name: str,
    problems: Sequence[P],
    solve: Callable[[P], Awaitable[Outcome]],
    console: Console,
) -> Tally:
    """Solve every problem, several at once."""
    gate = asyncio.Semaphore(AT_ONCE)
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    before, start = await llm.stats(), time.perf_counter()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(name, total=len(problems))

        async def one(problem: P) -> Outcome:
            async with gate:
                outcome = await solve(problem)
            progress.advance(bar)
            return outcome

        outcomes = await asyncio.gather(*(one(problem) for problem in problems))
    after = await llm.stats()
    return Tally(
        name,
        len(problems),
        sum(one.solved for one in outcomes),
        after.num_computed_tokens - before.num_computed_tokens,
        sum(one.num_flat_tokens for one in outcomes),
        time.perf_counter() - start,
    )


def show(title: str, tallies: Iterable[Tally], console: Console) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in ("solved", "tokens computed", "without branches", "time"):
        table.add_column(column, justify="right")
    for one in tallies:
        table.add_row(
            one.name,
            f"{one.num_solved} of {one.num_problems}",
            f"{one.num_tokens:,}",
            f"{one.num_flat_tokens:,}",
            f"{one.seconds:.0f} s",
        )
    console.print(table)

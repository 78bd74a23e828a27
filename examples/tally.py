"""What the examples have in common: many problems at once, what they took, and a table at the end."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ramet import AsyncLLM

P = TypeVar("P")
W = TypeVar("W")
AT_ONCE = 8  # problems; their branches run in the same batches


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


def command(doc: str | None) -> argparse.ArgumentParser:
    """A command line whose help begins with the example's own text."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def options(
    doc: str | None, *, problems: int = 50, first: int = 0, why: str = "of the first problem"
) -> argparse.ArgumentParser:
    """The same, with the problems that are to be solved: see `seeds_of`."""
    parser = command(doc)
    add = parser.add_argument
    add("--problems", type=count, default=problems, metavar="N", help="how many (%(default)s)")
    add("--first", type=int, default=first, metavar="SEED", help=f"{why} (%(default)s)")
    return parser


async def many_samples(
    doc: str | None, run: Callable[[Sequence[int], int, Console, AsyncLLM], Awaitable[object]]
) -> None:
    """The command of an example that draws many samples of each problem."""
    parser = options(doc)
    parser.add_argument(
        "--samples", type=count, default=16, metavar="N", help="of each problem (%(default)s)"
    )
    arguments = parser.parse_args()
    async with AsyncLLM("smollm2", num_blocks=2048) as llm:
        await run(seeds_of(arguments), arguments.samples, Console(), llm)


def count(text: str) -> int:
    """A number of an option."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError("must be a whole number above 0")
    return int(text)


def seeds_of(arguments: argparse.Namespace) -> range:
    """One for each problem."""
    return range(arguments.first, arguments.first + arguments.problems)


async def compare(
    llm: AsyncLLM,
    title: str,
    ways: Mapping[str, W],
    problems: Sequence[P],
    solve: Callable[[W, P], Awaitable[Outcome]],
    console: Console,
) -> list[Tally]:
    """Solve every problem in each way, and show what that came to."""
    tallies = []
    for name, way in ways.items():

        def so(problem: P, way: W = way) -> Awaitable[Outcome]:
            return solve(way, problem)

        tallies.append(await tally(llm, name, problems, so, console))
    show(title, tallies, console)
    return tallies


async def tally(
    llm: AsyncLLM,
    name: str,
    problems: Sequence[P],
    solve: Callable[[P], Awaitable[Outcome]],
    console: Console,
    at_once: int = AT_ONCE,
) -> Tally:
    """Solve every problem, several at once. Nothing is left from the way before."""
    await llm.reset_prefix_cache()
    gate = asyncio.Semaphore(at_once)
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
    table.add_column("", no_wrap=True)
    for column in ("solved", "tokens computed", "without branches", "time"):
        table.add_column(column, justify="right")
    for one in tallies:
        table.add_row(
            one.name,
            f"{one.num_solved} of {one.num_problems}",
            f"{one.num_tokens:,}",
            f"{one.num_flat_tokens:,}",
            f"{one.seconds:.1f} s",
        )
    console.print(table)

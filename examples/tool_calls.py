"""Many tool calls at once: while one branch waits for its program, all others go on.

    python -m examples.tool_calls --problems 24

Every branch asks Python for a product that the model could not work out, and tells the result. The programs
take half a second each, in processes of their own with limits of time and memory; one of them never ends, and
one takes all the memory there is.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from typing import NamedTuple

from rich.console import Console

from examples.tally import Outcome, Tally, show
from examples.tools import python
from ramet import AsyncBranch, AsyncLLM

PROMPT = """\
>>> print(213 * 47)
10011
The program printed 10011.

>>> print(58 * 391)
22678
The program printed 22678.

"""
_RUNAWAYS = ("while True: pass", "print(len([0] * 10**10))")


class Problem(NamedTuple):
    expression: str
    code: str
    answer: str | None  # None: the program is to be stopped


def deal(num_problems: int, tool_seconds: float) -> list[Problem]:
    stream = random.Random("tool calls")
    pairs = [(stream.randint(101, 999), stream.randint(11, 99)) for _ in range(num_problems)]
    wait = f"import time; time.sleep({tool_seconds}); "
    problems = [Problem(f"print({a} * {b})", f"{wait}print({a} * {b})", str(a * b)) for a, b in pairs]
    for index, code in enumerate(_RUNAWAYS[: num_problems // 4]):
        problems[3 * index + 1] = Problem(code, code, None)
    return problems


async def answer(root: AsyncBranch, problem: Problem, limit: float) -> Outcome:
    """Fork, write the call, wait for the tool, append what it says, and let the model tell it."""
    async with (await root.fork())[0] as branch:
        await branch.extend(f">>> {problem.expression}\n")
        said = await python(problem.code, seconds=limit)
        await branch.extend(f"{said}\nThe program")
        told = await branch.generate(max_tokens=12, temperature=0.0, stop=[".", "\n"])
        right = said.startswith("error") if problem.answer is None else problem.answer in told.text
        return Outcome(right, len(branch))


async def run(num_problems: int, tool_seconds: float, console: Console, llm: AsyncLLM) -> list[Tally]:
    problems = deal(num_problems, tool_seconds)
    tallies = []
    for name, at_once in (("one call after the other", 1), ("all at once", num_problems)):
        gate = asyncio.Semaphore(at_once)

        async def one(root: AsyncBranch, problem: Problem, gate: asyncio.Semaphore = gate) -> Outcome:
            async with gate:
                return await answer(root, problem, 2.0 + tool_seconds)

        before, start = await llm.stats(), time.perf_counter()
        async with await llm.branch(PROMPT) as root:
            with console.status(name):
                outcomes = await asyncio.gather(*(one(root, problem) for problem in problems))
        computed = (await llm.stats()).num_computed_tokens - before.num_computed_tokens
        tallies.append(
            Tally(
                name,
                num_problems,
                sum(outcome.solved for outcome in outcomes),
                computed,
                sum(outcome.num_flat_tokens for outcome in outcomes),
                time.perf_counter() - start,
            )
        )
    show(f"{num_problems} tool calls of {tool_seconds:g} s", tallies, console)
    return tallies


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=0.5, help="that each tool takes")
    arguments = parser.parse_args()
    async with AsyncLLM("smollm2", num_blocks=2048) as llm:
        await run(arguments.problems, arguments.seconds, Console(), llm)


if __name__ == "__main__":
    asyncio.run(main())

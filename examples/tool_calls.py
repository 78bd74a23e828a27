"""Many tool calls at once: while one branch waits for its program, all others go on.

    python -m examples.tool_calls --problems 24

Every branch asks Python for a product that the model could not work out, and tells the result. The programs
take half a second each, in processes of their own with limits of time and memory; one of them never ends, and
one takes all the memory there is.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console

from examples.tally import Outcome, Tally, options, seeds_of, show, tally
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


def deal(seeds: Sequence[int], tool_seconds: float) -> list[Problem]:
    """A product for each seed, but for two programs that are to be stopped."""
    problems = []
    for seed in seeds:
        stream = random.Random(f"tool call {seed}")
        a, b = stream.randint(101, 999), stream.randint(11, 99)
        wait = f"import time; time.sleep({tool_seconds}); "
        problems.append(Problem(f"print({a} * {b})", f"{wait}print({a} * {b})", str(a * b)))
    for index, code in enumerate(_RUNAWAYS[: len(seeds) // 4]):
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


async def run(seeds: Sequence[int], tool_seconds: float, console: Console, llm: AsyncLLM) -> list[Tally]:
    problems = deal(seeds, tool_seconds)
    tallies = []
    for name, at_once in (("one after the other", 1), ("all at once", len(problems))):
        async with await llm.branch(PROMPT) as root:

            async def solve(problem: Problem, root: AsyncBranch = root) -> Outcome:
                return await answer(root, problem, 2.0 + tool_seconds)

            tallies.append(await tally(llm, name, problems, solve, console, at_once))
    show(f"{len(problems)} tool calls of {tool_seconds:g} s", tallies, console)
    return tallies


async def main() -> None:
    parser = options(__doc__, problems=24)
    parser.add_argument(
        "--seconds", type=float, default=0.5, metavar="S", help="that each tool takes (%(default)s)"
    )
    arguments = parser.parse_args()
    async with AsyncLLM("smollm2", num_blocks=2048) as llm:
        await run(seeds_of(arguments), arguments.seconds, Console(), llm)


if __name__ == "__main__":
    asyncio.run(main())

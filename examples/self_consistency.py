"""Self-consistency on sums: sample many chains of thought and take the answer that most of them come to.

python -m examples.self_consistency --problems 50
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from examples.sums import SAMPLING, Problem, answer, deal
from examples.tally import Outcome, Tally, show, tally
from ramet import AsyncLLM, search


async def vote(llm: AsyncLLM, problem: Problem, n: int, seed: int) -> Outcome:
    settings: dict[str, Any] = {**SAMPLING, "seed": seed}
    async with await llm.branch(problem.text) as root:
        found = await search.self_consistency(root, n, answer, **settings)
        return Outcome(answer(found.text) == sum(problem.numbers), found.tree.num_flat_tokens)


async def run(seeds: Sequence[int], n: int, console: Console, llm: AsyncLLM) -> list[Tally]:
    problems = [(seed, deal(seed)) for seed in seeds]
    tallies = []
    for name, k in (("one chain of thought", 1), (f"what most of {n} say", n)):

        async def solve(one: tuple[int, Problem], k: int = k) -> Outcome:
            return await vote(llm, one[1], k, 1000 * one[0])

        tallies.append(await tally(llm, name, problems, solve, console))
    show(f"{len(problems)} sums of three numbers", tallies, console)
    return tallies


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", type=int, default=50)
    parser.add_argument("--samples", type=int, default=16)
    arguments = parser.parse_args()
    async with AsyncLLM("smollm2", num_blocks=2048) as llm:
        await run(range(arguments.problems), arguments.samples, Console(), llm)


if __name__ == "__main__":
    asyncio.run(main())

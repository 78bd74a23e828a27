"""Parallel sampling: many samples of one prompt, which is computed once.

    python -m examples.parallel_sampling --problems 50

How often is one sample of a chain of thought right, and how often is at least one of 16? Each child has
settings of its own: here they grow more daring.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from rich.console import Console

from examples.sums import SAMPLING, Problem, check, deal
from examples.tally import Outcome, Tally, show, tally
from ramet import AsyncLLM, SamplingParams


async def sample(llm: AsyncLLM, problem: Problem, n: int, seed: int) -> Outcome:
    async with await llm.branch(problem.text) as root:
        hot = [0.2 + 0.8 * index / n for index in range(n)]
        params = [
            SamplingParams(**{**SAMPLING, "temperature": temperature, "seed": seed + index})
            for index, temperature in enumerate(hot)
        ]
        children = await root.expand(params=params)
        said = [child.output for child in children if child.output is not None]
        # Each of n requests would have computed the prompt.
        num_flat = sum(len(root) + len(choice.token_ids) for choice in said)
        return Outcome(any(check(choice.text, problem) for choice in said), num_flat)


async def run(seeds: Sequence[int], n: int, console: Console, llm: AsyncLLM) -> list[Tally]:
    problems = [(seed, deal(seed)) for seed in seeds]
    tallies = []
    for name, k in (("one sample", 1), (f"any of {n} samples", n)):

        async def solve(one: tuple[int, Problem], k: int = k) -> Outcome:
            return await sample(llm, one[1], k, 1000 * one[0])

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

"""Parallel sampling: many samples of one prompt, which is computed once.

    python -m examples.parallel_sampling --problems 50

How often is one sample of a chain of thought right, and how often is at least one of 16? Each child has
settings of its own: here they grow more daring.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rich.console import Console

from examples.sums import SAMPLING, check, deal
from examples.tally import Outcome, Tally, compare, many_samples
from ramet import AsyncLLM, SamplingParams


async def sample(llm: AsyncLLM, seed: int, n: int) -> Outcome:
    problem = deal(seed)
    async with await llm.branch(problem.text) as root:
        params = [
            SamplingParams(**{**SAMPLING, "temperature": 0.2 + 0.8 * index / n, "seed": 1000 * seed + index})
            for index in range(n)
        ]
        children = await root.expand(params=params)
        said = [child.output for child in children if child.output is not None]
        # Each of n requests would have computed the prompt.
        num_flat = sum(len(root) + len(choice.token_ids) for choice in said)
        return Outcome(any(check(choice.text, problem) for choice in said), num_flat)


async def run(seeds: Sequence[int], n: int, console: Console, llm: AsyncLLM) -> list[Tally]:
    return await compare(
        llm,
        f"{len(seeds)} sums of three numbers",
        {"one sample": 1, f"any of {n} samples": n},
        seeds,
        lambda k, seed: sample(llm, seed, k),
        console,
    )


async def main() -> None:
    await many_samples(__doc__, run)


if __name__ == "__main__":
    asyncio.run(main())

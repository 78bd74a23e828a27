"""Self-consistency on sums: sample many chains of thought and take the answer that most of them come to.

    python -m examples.self_consistency --problems 50

The chains share the prompt; the answer is read off the last line of each, and nothing else is asked of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rich.console import Console

from examples.sums import SAMPLING, answer, check, deal
from examples.tally import Outcome, Tally, compare, many_samples
from ramet import AsyncLLM, search


async def vote(llm: AsyncLLM, seed: int, n: int) -> Outcome:
    problem = deal(seed)
    async with await llm.branch(problem.text) as root:
        found = await search.self_consistency(root, n, answer, **SAMPLING, seed=1000 * seed)
        return Outcome(check(found.text, problem), found.tree.num_flat_tokens)


async def run(seeds: Sequence[int], n: int, console: Console, llm: AsyncLLM) -> list[Tally]:
    return await compare(
        llm,
        f"{len(seeds)} sums of three numbers",
        {"one chain": 1, f"majority of {n}": n},
        seeds,
        lambda k, seed: vote(llm, seed, k),
        console,
    )


async def main() -> None:
    await many_samples(__doc__, run)


if __name__ == "__main__":
    asyncio.run(main())

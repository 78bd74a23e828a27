"""Beam search on sums: the likeliest whole chain of thought, instead of the likeliest token at a time.

    python -m examples.beam_search --problems 50

Beams are branches: they share the prompt and whatever they have in common, and part by copy-on-write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rich.console import Console

from examples.sums import SAMPLING, check, deal
from examples.tally import Outcome, Tally, compare, count, options, seeds_of
from ramet import AsyncLLM


async def likeliest(llm: AsyncLLM, seed: int, width: int) -> Outcome:
    problem = deal(seed)
    async with await llm.branch(problem.text) as root:
        limits = {"max_tokens": SAMPLING["max_tokens"], "stop": SAMPLING["stop"]}
        best = (await root.beam_search(num_beams=width, num_return_sequences=1, **limits))[0]
        assert best.output is not None, "a beam has an output"
        # A greedy chain would have been one request. Of more beams, each would have been one for the next
        # token at each step, with all before it.
        num_steps = len(best.output.token_ids)
        num_flat = width * sum(len(root) + step for step in range(num_steps))
        if width == 1:
            num_flat = len(root) + num_steps
        return Outcome(check(best.output.text, problem), num_flat)


async def run(seeds: Sequence[int], widths: Sequence[int], console: Console, llm: AsyncLLM) -> list[Tally]:
    return await compare(
        llm,
        f"{len(seeds)} sums of three numbers",
        {f"{width} beams" if width > 1 else "greedy": width for width in widths},
        seeds,
        lambda width, seed: likeliest(llm, seed, width),
        console,
    )


async def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--widths", type=count, nargs="+", default=[1, 4, 16], metavar="N", help="beams (1 4 16)"
    )
    arguments = parser.parse_args()
    async with AsyncLLM("smollm2", num_blocks=2048) as llm:
        await run(seeds_of(arguments), arguments.widths, Console(), llm)


if __name__ == "__main__":
    asyncio.run(main())

"""Tree of thought on the Game of 24: make 24 of four numbers, each used once.

    python -m examples.game_of_24 --problems 50

The model is too small to write a solution, but it knows that 24 is 4 * 6 and that 8 * 3 is 24. So every
legal move is a candidate and the model's log-probabilities say how promising what it leaves is; the best few
states of each level become branches. The checker is asked once, about the one answer that a search ends with.
Beside it: the likeliest of many sampled solutions, for as many tokens, and the same search by dice.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rich.console import Console

from examples.tally import Outcome, Tally, show, tally
from ramet import AsyncBranch, AsyncLLM, search
from ramet.api.puzzle import TARGET, Move, Table, check, deal, moves, table_of, values
from ramet.api.tree_of_thought import FACTORS, PROMPT

Cards: TypeAlias = tuple[int, ...]
Rate: TypeAlias = Callable[[Any, list[Move]], Awaitable[list[float]]]


@dataclass(frozen=True)
class State:
    """What a node stands for: the numbers that are left, and how promising the model holds them."""

    table: Table
    rating: float = 0.0


class Ratings:
    """The model's opinion of moves, as log-probabilities. The true results of open sums are never shown.

    Three numbers left: how readily the model writes each as a factor of 24; the mean. Two left: how likely 24
    is after each sum of the two; the best. One left: how likely 24 is after the sum that made it.
    """

    def __init__(self, llm: AsyncLLM, factors: AsyncBranch) -> None:
        assert llm.tokenizer is not None, "the embedded model has one"
        self._encode = llm.tokenizer.copy().encode
        self._factors = factors
        self._known: dict[int, float] = {}
        self._tail = self._ids(f" {TARGET}\n")

    async def __call__(self, node: Any, candidates: list[Move]) -> list[float]:
        if len(node.data.table) == 2:
            return await self._chances(node, [move.equation for move in candidates])
        if len(node.data.table) == 4:
            return [await self._factor(node, move) for move in candidates]
        sums = [(i, last.equation) for i, move in enumerate(candidates) for last in moves(move.left)]
        chances = await self._chances(node, [f"{candidates[i].text}\n{equation}" for i, equation in sums])
        return [
            max(chance for (j, _), chance in zip(sums, chances, strict=True) if j == i)
            for i in range(len(candidates))
        ]

    async def _factor(self, node: Any, move: Move) -> float:
        for number in set(values(move.left)) - self._known.keys():
            ids = self._ids(f" {number} *")
            (score,) = await self._factors.score([ids])
            node.tree.count(len(ids), self._factors.position + len(ids))
            self._known[number] = score.logprob
        return sum(self._known[number] for number in values(move.left)) / len(move.left)

    async def _chances(self, node: Any, texts: list[str]) -> list[float]:
        scores = await node.score([self._ids(text) + self._tail for text in texts])
        return [sum(score.token_logprobs[-len(self._tail) :]) for score in scores]

    def _ids(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False)


async def think(llm: AsyncLLM, cards: Cards, rate: Rate, width: int) -> Outcome:
    """Tree of thought, breadth first."""
    seen: set[tuple[int, ...]] = set()

    async def steps(node: Any) -> list[Any]:
        if node.data is None:
            node.data = State(table_of(cards))
        # The same numbers on two branches are one thought: the better rated parent has it.
        found = [
            move for move in moves(node.data.table) if values(move.left) not in seen or len(move.left) == 1
        ]
        seen.update(values(move.left) for move in found)
        ratings = await rate(node, found) if found else []
        best = sorted(range(len(found)), key=lambda index: -ratings[index])[:width]
        children = await node.add([found[index].text + "\n" for index in best])
        for child, index in zip(children, best, strict=True):
            child.data = State(found[index].left, ratings[index])
        return list(children)

    async with await llm.branch(PROMPT + " ".join(map(str, cards)) + "\n") as root:
        found = await search.tree_of_thought(
            root, steps, lambda node: node.data.rating, width=width, depth=len(cards) - 1
        )
        table = found.best.data.table
        solved = len(table) == 1 and check(table[0].expression, cards)
        return Outcome(solved, found.tree.num_flat_tokens)


async def sample(llm: AsyncLLM, cards: Cards, budget: int, seed: int) -> Outcome:
    """The likeliest of as many sampled solutions as the budget allows."""
    async with await llm.branch(PROMPT + " ".join(map(str, cards)) + "\n") as root:
        num_tokens = num_flat = 0
        best: Any = None
        while num_tokens < budget:
            found = await search.best_of(
                root, 16, max_tokens=40, stop=["\n\n"], temperature=0.7, seed=seed + num_tokens
            )
            await found.branch.prune()
            num_tokens += found.tree.num_tokens
            num_flat += found.tree.num_flat_tokens
            best = max(best or found.best, found.best, key=lambda node: node.value)
        return Outcome(solution_holds(best.text, cards), num_flat)


def solution_holds(text: str, cards: Cards) -> bool:
    """Whether lines like "8 - 2 = 6" use up the cards and end with 24. Exact."""
    left = sorted(cards)
    for line in text.strip().split("\n"):
        words = line.split()
        if len(words) != 5 or words[3] != "=" or not all(words[i].isdecimal() for i in (0, 2, 4)):
            return False
        a, b, result = int(words[0]), int(words[2]), int(words[4])
        right = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}.get(words[1])
        if right != result:
            return False
        for number in (a, b):
            if number not in left:
                return False
            left.remove(number)
        left.append(result)
    return left == [TARGET]


async def run(seeds: Sequence[int], width: int, console: Console, llm: AsyncLLM) -> list[Tally]:
    problems = [(seed, deal(seed)) for seed in seeds]

    async def dice(node: Any, candidates: list[Move]) -> list[float]:
        stream = random.Random(node.transcript)
        return [stream.random() for _ in candidates]

    async with await llm.branch(FACTORS) as factors:
        rate = Ratings(llm, factors)
        thought = await tally(
            llm, "tree of thought", problems, lambda one: think(llm, one[1], rate, width), console
        )
    budget = thought.num_tokens // len(problems)
    sampled = await tally(
        llm, "best of n samples", problems, lambda one: sample(llm, one[1], budget, one[0]), console
    )
    diced = await tally(
        llm, "tree of thought by dice", problems, lambda one: think(llm, one[1], dice, width), console
    )
    show(f"The Game of 24, {len(problems)} hands, width {width}", [thought, sampled, diced], console)
    return [thought, sampled, diced]


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", type=int, default=50)
    parser.add_argument("--first", type=int, default=1000, help="seed; prompts were chosen on 0 to 99")
    parser.add_argument("--width", type=int, default=6)
    arguments = parser.parse_args()
    async with AsyncLLM("smollm2", num_blocks=2048) as llm:
        seeds = range(arguments.first, arguments.first + arguments.problems)
        await run(seeds, arguments.width, Console(), llm)


if __name__ == "__main__":
    asyncio.run(main())

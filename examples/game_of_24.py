"""Tree of thought on the Game of 24: make 24 of four numbers, each used once.

    python -m examples.game_of_24 --problems 50

The model is too small to write a solution, but it knows that 24 is 4 * 6 and that 8 * 3 is 24. So every
legal move becomes a branch, and the model's log-probabilities say how promising what it leaves is; the best
few of each level stay. The checker is asked once, about the one answer that a search ends with.

Two other ways have as many tokens to spend: the likeliest of many sampled solutions, and the same search by
dice, where the model is asked all the same and a random number is taken for what it says.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rich.console import Console

from examples.tally import Outcome, Tally, count, options, seeds_of, show, tally
from ramet import AsyncBranch, AsyncLLM, search
from ramet.api.puzzle import TARGET, Table, check, deal, moves, table_of, values
from ramet.api.tree_of_thought import FACTORS, PROMPT

Cards: TypeAlias = tuple[int, ...]
Value: TypeAlias = Callable[[Any], Awaitable[float]]
SAMPLE_TOKENS = 40  # a solution has some 26
MOST_SAMPLES = 64  # at once


@dataclass
class State:
    """What a node stands for: the numbers that are left, and how likely 24 is after each sum of two."""

    table: Table
    chances: dict[str, float] = field(default_factory=dict)


class Ratings:
    """The model's opinion of a node, as log-probabilities. The true results of open sums are never shown.

    Three numbers left: how readily the model writes each as a factor of 24; the mean. Two left: how likely 24
    is after each sum of the two; the best. One left: how likely 24 was after the sum that made it.
    """

    def __init__(self, llm: AsyncLLM, factors: AsyncBranch) -> None:
        assert llm.tokenizer is not None, "the embedded model has one"
        self._encode = llm.tokenizer.copy().encode
        self._factors = factors
        self._known: dict[int, float] = {}
        self._turn = asyncio.Lock()
        self._tail = self._ids(f" {TARGET}\n")

    async def __call__(self, node: Any) -> float:
        table: Table = node.data.table
        if len(table) == 3:
            return sum([await self._factor(number) for number in values(table)]) / 3
        if len(table) == 2:
            equations = [move.equation for move in moves(table)]
            scores = await node.score([self._ids(equation) + self._tail for equation in equations])
            chances: list[float] = [sum(score.token_logprobs[-len(self._tail) :]) for score in scores]
            node.data.chances = dict(zip(equations, chances, strict=True))
            return max(chances)
        last: float = node.parent.data.chances[node.text.removesuffix(f" {table[0].value}\n")]
        return last

    async def _factor(self, number: int) -> float:
        async with self._turn:
            if number not in self._known:
                (score,) = await self._factors.score([self._ids(f" {number} *")])
                self._known[number] = score.logprob
            return self._known[number]

    def _ids(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False)


def by_dice(rate: Ratings) -> Value:
    """Random values, for as many tokens."""

    async def value(node: Any) -> float:
        await rate(node)
        return random.Random(node.transcript).random()

    return value


async def think(llm: AsyncLLM, cards: Cards, value: Value, width: int) -> Outcome:
    """Tree of thought, breadth first."""
    seen: set[tuple[int, ...]] = set()

    async def steps(node: Any) -> list[Any]:
        table = node.data.table if node.data else table_of(cards)
        # The same numbers on two branches are one thought: the better rated parent has it.
        found = [move for move in moves(table) if len(move.left) == 1 or values(move.left) not in seen]
        seen.update(values(move.left) for move in found)
        children = await node.add([move.text + "\n" for move in found])
        for child, move in zip(children, found, strict=True):
            child.data = State(move.left)
        return list(children)

    async with await llm.branch(prompt_of(cards)) as root:
        found = await search.tree_of_thought(root, steps, value, width=width, depth=len(cards) - 1)
        table = found.best.data.table
        solved = len(table) == 1 and check(table[0].expression, cards)
        return Outcome(solved, found.tree.num_flat_tokens)


async def sample(llm: AsyncLLM, cards: Cards, budget: int, seed: int) -> Outcome:
    """The likeliest of as many sampled solutions as the budget allows."""
    async with await llm.branch(prompt_of(cards)) as root, search.Tree(root) as tree:
        while (left := budget - tree.num_tokens) > 0:
            n = min(MOST_SAMPLES, 1 + left // SAMPLE_TOKENS)
            await tree.root.sample(n, max_tokens=SAMPLE_TOKENS, stop=["\n\n"], temperature=0.7, seed=seed)
        best = max(tree.root.children, key=lambda node: node.logprob)
        await tree.found(best)
        return Outcome(solution_holds(best.text, cards), tree.num_flat_tokens)


def prompt_of(cards: Cards) -> str:
    return PROMPT + " ".join(map(str, cards)) + "\n"


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
    hands = {seed: deal(seed) for seed in seeds}
    async with await llm.branch(FACTORS) as factors:
        rate = Ratings(llm, factors)
        thought = await tally(
            llm, "tree of thought", seeds, lambda seed: think(llm, hands[seed], rate, width), console
        )
        budget = thought.num_tokens // len(seeds)
        sampled = await tally(
            llm, "best of n samples", seeds, lambda seed: sample(llm, hands[seed], budget, seed), console
        )
        dice = by_dice(rate)
        diced = await tally(
            llm, "search by dice", seeds, lambda seed: think(llm, hands[seed], dice, width), console
        )
    tallies = [thought, sampled, diced]
    show(f"The Game of 24, {len(seeds)} hands, width {width}", tallies, console)
    return tallies


async def main() -> None:
    parser = options(__doc__, first=2000, why="of the first hand; prompts were chosen on seeds 0 to 99")
    parser.add_argument(
        "--width", type=count, default=3, metavar="N", help="states that a level keeps (%(default)s)"
    )
    arguments = parser.parse_args()
    async with AsyncLLM("smollm2", num_blocks=2048) as llm:
        await run(seeds_of(arguments), arguments.width, Console(), llm)


if __name__ == "__main__":
    asyncio.run(main())

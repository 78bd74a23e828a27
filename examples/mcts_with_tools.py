"""Monte Carlo tree search with a tool on word problems of several steps.

    python -m examples.mcts_with_tools --problems 50 --tool calculator

The model decides which numbers to work out next, and the tool works them out: each step is one of all that
are possible, scored by the model, and the tool's result is appended to its branch while others go on. A state
is worth how likely the model holds its steps; whether the answer is right is only asked at the end. Two other
ways have the same tokens to spend: the likeliest of many sampled solutions, with the same tool, and the same
search with values by dice.
"""

from __future__ import annotations

import asyncio
import io
import math
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.text import Text
from rich.tree import Tree as Picture

from examples import tools
from examples.tally import Outcome, Tally, count, options, seeds_of, show, tally
from examples.word_problems import PROMPT, Problem, deal, left_after, steps
from ramet import AsyncLLM, search

Tool: TypeAlias = Callable[[str], Awaitable[str]]
TOOLS: dict[str, Tool] = {
    "calculator": tools.calculator,
    "python": lambda expression: tools.python(f"a = {expression}\nprint(int(a) if a == int(a) else a)"),
}
WIDTH = 4  # children of a state
AT_ONCE = 4  # samples


@dataclass(frozen=True)
class State:
    """What a node stands for: the numbers not used yet, and the log-probability of its steps."""

    numbers: list[int]
    logprob: float = 0.0


def likelihood(node: Any) -> float:
    """How sure the model was of the steps up to here: the geometric mean of their chances."""
    return math.exp(node.data.logprob / node.depth)


async def think(llm: AsyncLLM, problem: Problem, tool: Tool, value: Any, budget: int) -> search.Found[Any]:
    """Monte Carlo tree search over the steps that can be taken."""

    async def grow(node: Any) -> list[Any]:
        state = node.data or State(problem.numbers)
        candidates = steps(state.numbers)
        ranked = sorted(
            zip(candidates, await node.score(candidates), strict=True), key=lambda one: -one[1].logprob
        )
        distinct: dict[tuple[str, ...], tuple[str, Any]] = {}
        for text, score in ranked:  # 4 * 6 and 6 * 4 are one step: the likelier of the two stands for both
            distinct.setdefault(tuple(sorted(text.split())), (text, score))
        best = list(distinct.values())[:WIDTH]
        children = await node.add(
            [text for text, _ in best], [score.logprob / len(score.token_ids) for _, score in best]
        )
        for child, (_, score) in zip(children, best, strict=True):
            child.data = State(state.numbers, state.logprob + score.logprob)
        return list(children)

    async def work_out(node: Any) -> str:
        result = await tool(node.text.removesuffix("="))
        node.data = replace(node.data, numbers=left_after(node.data.numbers, node.text, int(result)))
        return f" {result}\n"

    async with await llm.branch(f"{PROMPT}{problem.question}\n") as root:
        return await search.mcts(
            root,
            grow,
            value,
            budget=budget,
            depth=len(problem.numbers) - 1,
            select=search.puct(0.5),
            tool=work_out,
            done=lambda node: len(node.data.numbers) == 1,
        )


def outcome_of(found: search.Found[Any], problem: Problem) -> Outcome:
    return Outcome(found.best.data.numbers == [problem.answer], found.tree.num_flat_tokens)


def draw(found: search.Found[Any], problem: Problem, path: Path) -> None:
    """A picture of the tree: each state with its visits and its mean value, the best path in green."""
    console = Console(record=True, width=100, file=io.StringIO())
    top = Text.assemble((problem.question, "bold"), f"  {found.tree.root.visits} visits")
    picture = Picture(top, guide_style="bright_black")

    def hang(node: Any, below: Picture) -> None:
        for child in sorted(node.children, key=lambda child: -child.visits):
            style = "bold green" if child in found.best.path else ""
            label = Text(child.text.strip(), style=style)
            label.append(f"  {child.visits} x {child.mean:.3f}", "cyan")
            hang(child, below.add(label))

    hang(found.tree.root, picture)
    console.print(picture)
    console.save_svg(str(path), title="python -m examples.mcts_with_tools --draw")


async def sample(llm: AsyncLLM, problem: Problem, tool: Tool, budget: int, seed: int) -> Outcome:
    """The likeliest of as many sampled solutions as the budget allows; the tool works out their sums, too."""

    settings: dict[str, Any] = {
        "max_tokens": 24,
        "temperature": 0.7,
        "seed": seed,
        "stop": ["=", "\n\n"],
        "include_stop_str_in_output": True,
    }

    async def finish(node: Any) -> Any:
        while node.text.endswith("=") and node.depth < 6:
            result = await tool(node.text.strip().split("\n")[-1].removesuffix("="))
            await node.append(f" {result}\n")
            (node,) = await node.sample(1, **settings)
        return node

    async with await llm.branch(f"{PROMPT}{problem.question}\n") as root, search.Tree(root) as tree:
        ends: list[Any] = []
        while tree.num_tokens < budget:
            starts = await tree.root.sample(AT_ONCE, **settings)
            ends += await asyncio.gather(*(finish(node) for node in starts))
        best = max(ends, key=lambda node: sum(step.logprob for step in node.path) / node.depth)
        said = re.search(r"^A: (\d+)$", best.transcript, re.MULTILINE)
        await tree.found(best)
        return Outcome(said is not None and int(said[1]) == problem.answer, tree.num_flat_tokens)


async def run(seeds: Sequence[int], tool: str, budget: int, console: Console, llm: AsyncLLM) -> list[Tally]:
    problems = [(seed, deal(seed)) for seed in seeds]
    call = TOOLS[tool]

    def dice(node: Any) -> float:
        return random.Random(node.transcript).random()

    async def solve(name: str, way: Callable[[tuple[int, Problem]], Awaitable[Outcome]]) -> Tally:
        return await tally(llm, name, problems, way, console)

    async def search_for(problem: Problem, value: Any) -> Outcome:
        return outcome_of(await think(llm, problem, call, value, budget), problem)

    thought = await solve("MCTS", lambda one: search_for(one[1], likelihood))
    same = thought.num_tokens // len(problems)
    sampled = await solve("best of n samples", lambda one: sample(llm, one[1], call, same, one[0]))
    diced = await solve("MCTS by dice", lambda one: search_for(one[1], dice))
    tallies = [thought, sampled, diced]
    show(f"{len(problems)} word problems with a tool, the {tool}", tallies, console)
    return tallies


async def main() -> None:
    parser = options(__doc__, first=1000, why="of the first problem; prompts were chosen on seeds 0 to 99")
    parser.add_argument("--tool", choices=sorted(TOOLS), default="calculator", help="which (%(default)s)")
    parser.add_argument(
        "--budget", type=count, default=400, metavar="N", help="tokens of a search (%(default)s)"
    )
    parser.add_argument("--draw", type=Path, metavar="SVG", help="only search one tree, and draw it here")
    arguments = parser.parse_args()
    async with AsyncLLM("smollm2", num_blocks=2048) as llm:
        if arguments.draw is not None:
            problem = deal(1)
            found = await think(llm, problem, TOOLS[arguments.tool], likelihood, arguments.budget)
            draw(found, problem, arguments.draw)
            return
        await run(seeds_of(arguments), arguments.tool, arguments.budget, Console(), llm)


if __name__ == "__main__":
    asyncio.run(main())

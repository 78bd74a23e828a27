"""ARPO's rule for where to branch: after a tool's answer that left the model less sure than it was at first.

    python -m examples.arpo_split

A rollout's first turn sets its entropy; the more the turn before a tool call exceeds that, the likelier the
rollout goes on twice after the tool's answer (arXiv:2507.19849; RUC-NLPIR/ARPO). Its code ships ten
log-probabilities a token for an estimate and copies the whole sequence; here entropies are exact and a split
is a fork.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.console import Console

from examples import tools
from examples.tally import Tally, command, show
from ramet import LLM, Branch, SamplingParams

NUM_TOKENS = 20  # of a turn, whose entropies are summed
WEIGHT = 0.5  # of the rise in entropy
THRESHOLD = 0.5  # the chance of a split while entropy stays as it is
PROMPT = (
    "Question: What is 12 times 7, plus 5?\nLet me see: <calc>12*7</calc> is 84, and <calc>84+5</calc> is 89."
    "\n\nQuestion: What is 30 minus 4, times 2?\nLet me see: <calc>30-4</calc> is 26, and <calc>26*2</calc>"
    " is 52.\n\nQuestion: What is 15 plus 27, times 3?\nLet me see:"
)


@dataclass(eq=False)
class Rollout:
    """One rollout; all positions are those of its branch."""

    branch: Branch
    num_calls: int = 0  # those of the rollout that it was split from included
    turns: list[tuple[int, int]] = field(default_factory=list)  # where each of its own began and ended
    first_entropy: float | None = None  # of its first turn; 1 is one token about which nothing is known
    tries: list[tuple[int, float, bool]] = field(default_factory=list)  # to split: position, draw, whether


class Limits(NamedTuple):
    num_first: int  # rollouts from the prompt on
    num_rollouts: int  # with those that were split off
    num_calls: int  # of one rollout


def roll_out(
    root: Branch,
    params: SamplingParams,
    tool: Callable[[str], str | list[int]],
    end_of_call: str | int,
    limits: Limits,
    draw: Callable[[], float],
) -> list[Rollout]:
    """Rollouts of a prompt, some of which split; pruned with the root.

    A turn that ends by `end_of_call`, one of the stops, is answered by the tool. A seed in `params` would
    have all forks draw alike.
    """
    active = [Rollout(branch) for branch in root.fork(limits.num_first)]
    rollouts = list(active)
    while active:
        begins = [len(rollout.branch) for rollout in active]
        choices = root.llm.step([rollout.branch for rollout in active], params)
        turns, active = list(zip(active, begins, choices, strict=True)), []
        for rollout, begin, choice in turns:
            rollout.turns.append((begin, len(rollout.branch)))
            entropy = sum((choice.entropies or [])[:NUM_TOKENS]) / math.log(root.llm.engine.vocab_size)
            if rollout.first_entropy is None:
                rollout.first_entropy = entropy
            if choice.stop_reason != end_of_call or rollout.num_calls == limits.num_calls:
                continue
            rollout.branch.extend(tool(choice.text))
            rollout.num_calls += 1
            active.append(rollout)
            if len(rollouts) < limits.num_rollouts:
                drawn = draw()
                split = drawn - WEIGHT * (entropy - rollout.first_entropy) <= THRESHOLD
                rollout.tries.append((len(rollout.branch), drawn, split))
                if split:
                    active.append(Rollout(rollout.branch.fork()[0], rollout.num_calls))
                    rollouts.append(active[-1])
    return rollouts


def calculator(said: str) -> str:
    return f" is {asyncio.run(tools.calculator(said.rpartition('<calc>')[2]))}"


def main() -> None:
    command(__doc__).parse_args()
    llm, tallies, stops = LLM("smollm2"), [], ("</calc>", "\n")
    params = SamplingParams(max_tokens=32, temperature=0.7, stop=stops, return_entropy=True)
    for name, num_first in (("8 from the prompt", 8), ("4 that split", 4)):
        print(f"\n{name}")
        llm.reset_prefix_cache()
        before, start = llm.stats().num_computed_tokens, time.perf_counter()
        limits = Limits(num_first, num_rollouts=8, num_calls=4)
        with llm.branch(PROMPT) as root:
            rollouts = roll_out(root, params, calculator, stops[0], limits, random.Random(0).random)
            said = [rollout.branch.text[len(PROMPT) :].strip() for rollout in rollouts]
        for text, rollout in zip(said, rollouts, strict=True):
            print(f"  {text}", *(f"[split after token {at}]" for at, _, split in rollout.tries if split))
        num_right = sum(text.endswith(" 126.") for text in said)
        num_tokens = llm.stats().num_computed_tokens - before
        num_flat = sum(end for rollout in rollouts for _, end in rollout.turns)  # each turn a request
        tallies.append(Tally(name, len(said), num_right, num_tokens, num_flat, time.perf_counter() - start))
    show("Rollouts of one question with a calculator", tallies, Console())


if __name__ == "__main__":
    main()

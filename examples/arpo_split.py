"""ARPO's rule for where to branch: after a tool's answer that left the model less sure than it was at first.

    python -m examples.arpo_split

A rollout's first turn sets its entropy; the more the turn before a tool call exceeds that, the likelier the
rollout goes on twice after the tool's answer (arXiv:2507.19849; RUC-NLPIR/ARPO). Its code ships ten
log-probabilities a token for an estimate and copies the whole sequence; here entropies are exact and a split
is a fork.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from ramet import LLM, Branch, Choice, SamplingParams

NUM_TOKENS = 20  # of a turn, whose entropies are summed
WEIGHT = 0.5  # of the rise in entropy
THRESHOLD = 0.5  # the chance of a split while entropy stays as it is
END_OF_CALL = "</calc>"
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
    turns: list[int] = field(default_factory=list)  # where each turn of its own began
    first_entropy: float | None = None
    tries: list[tuple[int, float, bool]] = field(default_factory=list)  # to split: position, draw, whether


def entropy_of(choice: Choice, vocab_size: int) -> float:
    """Of the first tokens of a turn together; 1 is one token about which nothing is known."""
    assert choice.entropies is not None, "they were asked for"
    return sum(choice.entropies[:NUM_TOKENS]) / math.log(vocab_size)


def roll_out(
    root: Branch,
    params: SamplingParams,
    tool: Callable[[Choice], str | list[int]],
    *,
    end_of_call: str | int = END_OF_CALL,
    num_first: int,
    num_rollouts: int,
    num_calls: int,
    draw: Callable[[], float] = random.random,
) -> list[Rollout]:
    """`num_first` rollouts of a prompt, which split into up to `num_rollouts`; pruned with the root.

    A turn that ends by `end_of_call`, one of the stops, is answered by the tool, up to `num_calls` times.
    """
    llm = root.llm
    rollouts = [Rollout(branch) for branch in root.fork(num_first)]
    active = list(rollouts)
    while active:
        for rollout in active:
            rollout.turns.append(len(rollout.branch))
        choices = llm.step([rollout.branch for rollout in active], params)
        going_on = []
        for rollout, choice in zip(active, choices, strict=True):
            entropy = entropy_of(choice, llm.engine.vocab_size)
            if rollout.first_entropy is None:
                rollout.first_entropy = entropy
            if choice.stop_reason != end_of_call or rollout.num_calls == num_calls:
                continue
            rollout.branch.extend(tool(choice))
            rollout.num_calls += 1
            going_on.append(rollout)
            if len(rollouts) < num_rollouts:
                drawn = draw()
                split = drawn - WEIGHT * (entropy - rollout.first_entropy) <= THRESHOLD
                rollout.tries.append((len(rollout.branch), drawn, split))
                if split:
                    rollouts.append(Rollout(rollout.branch.fork()[0], rollout.num_calls))
                    going_on.append(rollouts[-1])
        active = going_on
    return rollouts


def calculator(choice: Choice) -> str:
    """What a turn's call is answered with."""
    found = re.search(r"<calc>\s*(\d+)\s*([-+*])\s*(\d+)\s*$", choice.text)
    if found is None:
        return " is not a sum."
    left, right = int(found[1]), int(found[3])
    return f" is {({'-': left - right, '+': left + right, '*': left * right})[found[2]]}"


def main() -> None:
    """Print the rollouts of one question, and where they were split."""
    llm = LLM("smollm2")
    stops = (END_OF_CALL, "\n")
    params = SamplingParams(max_tokens=32, temperature=1.0, stop=stops, return_entropy=True)
    with llm.branch(PROMPT) as root:
        rollouts = roll_out(root, params, calculator, num_first=3, num_rollouts=8, num_calls=4)
        for rollout in rollouts:
            print(rollout.branch.text[len(root.text) :].strip())
            for position, _, split in rollout.tries:
                print(f"    after token {position}: {'split' if split else 'not split'}")
        again = sum(begin for rollout in rollouts for begin in rollout.turns)
    print(f"{llm.stats().num_computed_tokens} tokens computed; the turns began with {again} in all")


if __name__ == "__main__":
    main()

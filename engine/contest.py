"""Best-of: several generations of which only the best are wanted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ramet.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ramet.engine.runs import Generation
    from ramet.engine.sequence import Sequence


class Contest:
    """Keeps the best complete generations, and says who is out: with a log-probability below 0 a token, what
    a generation can still reach is known."""

    def __init__(self, params: SamplingParams) -> None:
        self.num_wanted = params.n
        self.by_mean = params.best_by == "mean"
        self._best: list[tuple[Generation, Sequence]] = []  # complete, best first
        self._out: set[Generation] = set()

    def losers(self, generation: Generation, sequence: Sequence) -> list[Sequence]:
        """A generation has one token more: whoever cannot be among the best any more, itself or another."""
        out: list[tuple[Generation, Sequence]] = []
        if generation.finished:
            entered = sorted([*self._best, (generation, sequence)], key=lambda one: self._rank(one[0]))
            self._best, out = entered[: self.num_wanted], entered[self.num_wanted :]
        elif len(self._best) == self.num_wanted and self._bound(generation) < self._score(self._best[-1][0]):
            out = [(generation, sequence)]
        self._out.update(loser for loser, _ in out)
        return [loser for _, loser in out]

    def winners(self, generations: Iterable[Generation]) -> list[Generation]:
        """The best of all, best first; their choices are numbered in this order from now on."""
        best = sorted(set(generations) - self._out, key=self._rank)[: self.num_wanted]
        for index, generation in enumerate(best):
            generation.choice.index = index
        return best

    def _rank(self, generation: Generation) -> tuple[float, int]:
        return -self._score(generation), generation.choice.index

    def _score(self, generation: Generation) -> float:
        choice = generation.choice
        return choice.mean_logprob if self.by_mean else choice.cumulative_logprob

    def _bound(self, generation: Generation) -> float:
        """The score if all tokens that may still come were certain."""
        total = generation.choice.cumulative_logprob
        return total / generation.allowance if self.by_mean else total

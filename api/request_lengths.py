"""Request lengths for the memory benchmark: lognormal, seeded, with the means of the PagedAttention paper.

The paper replays ShareGPT and Alpaca; their traces are not shipped here. A lognormal of sigma 1 with the same
means has their long right tail. All lengths are in tokens.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

SIGMA = 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """One request: `num_prompt` tokens in, `num_output` tokens out (each at least 1)."""

    index: int
    num_prompt: int
    num_output: int
    capped: bool  # whether it was cut to the longest length the model allows

    @property
    def num_kv(self) -> int:
        """Slots at its end: the last sampled token is never fed back, so it has no key and value."""
        return self.num_prompt + self.num_output - 1


@dataclass(frozen=True, slots=True)
class LengthModel:
    """Independent lognormal prompt and output lengths, cut to `max_model_len` in all.

    The scale is set so that the mean *before* the cut is the paper's. A draw is rounded, at least 1; a prompt
    that leaves no room for one output token is cut to leave it, then the output is cut to what is left.
    """

    name: str
    mean_prompt: float
    mean_output: float
    max_model_len: int = 2048

    def draw(self, rng: random.Random, index: int) -> Request:
        wanted_prompt = _lognormal(rng, self.mean_prompt)
        wanted_output = _lognormal(rng, self.mean_output)
        prompt = min(wanted_prompt, self.max_model_len - 1)
        output = min(wanted_output, self.max_model_len - prompt)
        return Request(index, prompt, output, capped=(prompt, output) != (wanted_prompt, wanted_output))

    def requests(self, seed: int) -> Iterator[Request]:
        """The trace of this seed, without end: the same for every allocator that replays it."""
        rng = random.Random(f"{self.name}:{seed}")
        return (self.draw(rng, index) for index in count())


def _lognormal(rng: random.Random, mean: float) -> int:
    """A draw whose mean is `mean`: the mean of a lognormal is exp(mu + sigma^2 / 2)."""
    mu = math.log(mean) - SIGMA**2 / 2
    return max(1, round(rng.lognormvariate(mu, SIGMA)))


SHAREGPT = LengthModel("sharegpt", mean_prompt=161.31, mean_output=337.99)
ALPACA = LengthModel("alpaca", mean_prompt=19.31, mean_output=58.45)

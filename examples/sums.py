"""Sums of three numbers, dealt by a seed, with chains of thought that the embedded model can follow."""

from __future__ import annotations

import random
import re
from typing import NamedTuple

PROMPT = """\
Q: 23 + 45 + 12
23 + 45 = 68
68 + 12 = 80
A: 80

Q: 17 + 34 + 25
17 + 34 = 51
51 + 25 = 76
A: 76

Q: 41 + 19 + 36
41 + 19 = 60
60 + 36 = 96
A: 96

Q: """
SAMPLING = {"max_tokens": 48, "temperature": 0.8, "stop": ["\n\n"]}


class Problem(NamedTuple):
    numbers: tuple[int, int, int]

    @property
    def text(self) -> str:
        return PROMPT + " + ".join(map(str, self.numbers)) + "\n"


def deal(seed: int) -> Problem:
    stream = random.Random(f"sum {seed}")
    return Problem((stream.randint(11, 49), stream.randint(11, 49), stream.randint(11, 49)))


def answer(text: str) -> int | None:
    """What a chain of thought comes to."""
    found = re.search(r"^A: (\d+)$", text, re.MULTILINE)
    return None if found is None else int(found[1])


def check(text: str, problem: Problem) -> bool:
    return answer(text) == sum(problem.numbers)

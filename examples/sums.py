"""Sums of three numbers, dealt by a seed, with chains of thought that the embedded model can follow."""

from __future__ import annotations

import random
import re
from typing import Any, NamedTuple

PROMPT = """\
Q: 23 + 5 + 4
23 + 5 = 28
28 + 4 = 32
A: 32

Q: 17 + 6 + 8
17 + 6 = 23
23 + 8 = 31
A: 31

Q: 58 + 3 + 7
58 + 3 = 61
61 + 7 = 68
A: 68

Q: 41 + 9 + 6
41 + 9 = 50
50 + 6 = 56
A: 56

Q: """
SAMPLING: dict[str, Any] = {"max_tokens": 32, "temperature": 0.7, "stop": ["\n\n"]}


class Problem(NamedTuple):
    numbers: tuple[int, int, int]

    @property
    def text(self) -> str:
        return PROMPT + " + ".join(map(str, self.numbers)) + "\n"


def deal(seed: int) -> Problem:
    stream = random.Random(f"sum {seed}")
    return Problem((stream.randint(11, 69), stream.randint(2, 9), stream.randint(2, 9)))


def answer(text: str) -> int | None:
    """What a chain of thought comes to."""
    found = re.search(r"^A: (\d+)$", text, re.MULTILINE)
    return None if found is None else int(found[1])


def check(text: str, problem: Problem) -> bool:
    return answer(text) == sum(problem.numbers)

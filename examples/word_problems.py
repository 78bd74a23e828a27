"""Word problems of two steps, dealt by a seed, and what can be done with the numbers in them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import NamedTuple

PROMPT = """\
Q: Kim buys 4 boxes of 6 pens and loses 5 of them. How many pens are left?
4 * 6 = 24
24 - 5 = 19
A: 19

Q: Joe has 12 cards and gets 8 more. They are shared by 5 friends. How many cards does each friend get?
12 + 8 = 20
20 / 5 = 4
A: 4

Q: Lea has 30 eggs and gives 12 away. The rest are put into 6 equal bags. How many eggs are in each bag?
30 - 12 = 18
18 / 6 = 3
A: 3

Q: Pat has 7 shells and buys 3 boxes of 5 shells. How many shells are there now?
3 * 5 = 15
7 + 15 = 22
A: 22

Q: Amy has 17 stamps, gives 9 away and then finds 6 more. How many stamps are there now?
17 - 9 = 8
8 + 6 = 14
A: 14

Q: """
_NAMES = ("Sam", "Ann", "Leo", "Mia", "Tom", "Eva", "Ben", "Zoe", "Max", "Ivy")
_THINGS = ("pens", "cards", "apples", "coins", "books", "eggs", "shells", "stamps")


class Problem(NamedTuple):
    question: str
    answer: int

    @property
    def numbers(self) -> list[int]:
        """Those in the question, in order."""
        return [int(number) for number in re.findall(r"\d+", self.question)]


def deal(seed: int) -> Problem:
    """One of four kinds; every step of the solution is a whole number above zero."""
    stream = random.Random(f"word problem {seed}")
    who, things = stream.choice(_NAMES), stream.choice(_THINGS)
    a, b, c = stream.randint(3, 9), stream.randint(3, 9), stream.randint(2, 20)
    return stream.choice(_KINDS)(who, things, a, b, c)


def _lost(who: str, things: str, a: int, b: int, c: int) -> Problem:
    c = min(c, a * b - 1)
    return Problem(
        f"{who} buys {a} boxes of {b} {things} and loses {c} of them. How many {things} are left?", a * b - c
    )


def _found(who: str, things: str, a: int, b: int, c: int) -> Problem:
    return Problem(
        f"{who} has {a * b} {things}, gives {a} away and then finds {c} more. "
        f"How many {things} are there now?",
        a * b - a + c,
    )


def _bagged(who: str, things: str, a: int, b: int, c: int) -> Problem:
    return Problem(
        f"{who} has {a * b + c} {things} and gives {c} away. The rest are put into {a} equal bags. "
        f"How many {things} are in each bag?",
        b,
    )


def _shared(who: str, things: str, a: int, b: int, c: int) -> Problem:
    c = min(c, a * b - 1)
    return Problem(
        f"{who} has {c} {things} and gets {a * b - c} more. They are shared by {a} friends. "
        f"How many {things} does each friend get?",
        b,
    )


_KINDS: Sequence[Callable[[str, str, int, int, int], Problem]] = (_lost, _found, _bagged, _shared)


def steps(numbers: Sequence[int]) -> list[str]:
    """Everything that can be worked out next: "4 * 6 =". Results stay whole and above zero."""
    found = []
    for a, b in permutations(numbers, 2):
        found += [f"{a} + {b} =", f"{a} * {b} ="]
        if a > b:
            found.append(f"{a} - {b} =")
        if b > 1 and a % b == 0:
            found.append(f"{a} / {b} =")
    return list(dict.fromkeys(found))


def left_after(numbers: Sequence[int], step: str, result: int) -> list[int]:
    """The numbers that were not used by a step, and its result."""
    a, _, b, _ = step.split()
    left = list(numbers)
    left.remove(int(a))
    left.remove(int(b))
    return [*left, result]

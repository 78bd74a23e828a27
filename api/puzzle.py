"""The Game of 24: four numbers, each used once, and + - * / must give 24.

It deals puzzles, names the legal steps, and checks answers with exact arithmetic. It never ranks anything.
"""

from __future__ import annotations

import ast
import random
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from itertools import combinations
from typing import NamedTuple

TARGET = 24
_NUM_CARDS = 4
_HIGHEST_CARD = 9


class Term(NamedTuple):
    """A number on the table, and how it was made of the cards."""

    value: int
    expression: str


Table = tuple[Term, ...]  # what is left to be combined, by value


class Move(NamedTuple):
    """Two terms become one."""

    equation: str  # "8 - 5 ="
    result: int
    left: Table

    @property
    def text(self) -> str:
        return f"{self.equation} {self.result}"


def deal(seed: int) -> tuple[int, ...]:
    """Four cards from 1 to 9 that can make 24: the first such hand of the seed's own random stream."""
    stream = random.Random(f"ramet demo {seed}")
    while True:
        cards = tuple(sorted(stream.randint(1, _HIGHEST_CARD) for _ in range(_NUM_CARDS)))
        if can_make(cards):
            return cards


def table_of(cards: tuple[int, ...]) -> Table:
    return tuple(Term(card, str(card)) for card in cards)


def values(table: Table) -> tuple[int, ...]:
    return tuple(term.value for term in table)


def moves(table: Table) -> list[Move]:
    """Every legal move, one for each set of numbers it can leave. Results stay whole and positive."""
    found: dict[tuple[int, ...], Move] = {}
    for first, second in combinations(range(len(table)), 2):
        a, b = sorted((table[first], table[second]), reverse=True)
        rest = [table[i] for i in range(len(table)) if i not in (first, second)]
        for sign, result in _results(a.value, b.value):
            term = Term(result, f"({a.expression} {sign} {b.expression})")
            left = tuple(sorted([*rest, term]))
            found.setdefault(values(left), Move(f"{a.value} {sign} {b.value} =", result, left))
    return list(found.values())


def _results(a: int, b: int) -> Iterator[tuple[str, int]]:
    """What a >= b > 0 can make."""
    yield "+", a + b
    yield "*", a * b
    if a > b:
        yield "-", a - b
    if b > 1 and a % b == 0:
        yield "/", a // b


@cache
def can_make(numbers: tuple[int, ...]) -> bool:
    """Whether any way leads to 24: for dealing a hand. A solver that asks this has not solved anything."""
    if len(numbers) == 1:
        return numbers[0] == TARGET
    return any(can_make(values(move.left)) for move in moves(table_of(numbers)))


def check(expression: str, cards: tuple[int, ...]) -> bool:
    """Whether an expression uses each card once, and nothing but + - * /, and is exactly 24.

    It reads the text and shares nothing with the moves above, so that a bug there is no answer here.
    """
    used: Counter[int] = Counter()
    try:
        value = _evaluate(ast.parse(expression, mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return False
    return value == TARGET and used == Counter(cards)


def _evaluate(node: ast.expr, used: Counter[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used[node.value] += 1
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp):
        raise ValueError("only numbers and + - * / are allowed")
    a, b = _evaluate(node.left, used), _evaluate(node.right, used)
    match node.op:
        case ast.Add():
            return a + b
        case ast.Sub():
            return a - b
        case ast.Mult():
            return a * b
        case ast.Div():
            return a / b
    raise ValueError("only numbers and + - * / are allowed")

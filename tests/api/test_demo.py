"""The demo: the puzzle against brute force, the search against a fake opinion, and one real hand."""

from __future__ import annotations

import io
import itertools
import operator
from fractions import Fraction
from pathlib import Path

import pytest
from rich.console import Console

from ramet import LLM
from ramet.api import demo
from ramet.api.puzzle import can_make, check, deal, moves, table_of, values
from ramet.api.tree_of_thought import Search
from ramet.testing import check_idle

SIGNS = (operator.add, operator.sub, operator.mul)


def brute_force(numbers: tuple[Fraction, ...]) -> set[Fraction]:
    """Every value that the numbers can make, in any order, with fractions and negative numbers on the way."""
    if len(numbers) == 1:
        return {numbers[0]}
    found: set[Fraction] = set()
    for i, j in itertools.permutations(range(len(numbers)), 2):
        rest = tuple(numbers[k] for k in range(len(numbers)) if k not in (i, j))
        made = {sign(numbers[i], numbers[j]) for sign in SIGNS}
        if numbers[j]:
            made.add(numbers[i] / numbers[j])
        for value in made:
            found |= brute_force((value, *rest))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_a_hand_can_be_solved(seed: int) -> None:
    cards = deal(seed)
    assert cards == deal(seed) and len(cards) == 4 and all(1 <= card <= 9 for card in cards)
    assert 24 in brute_force(tuple(map(Fraction, cards)))


def test_seeds_deal_different_hands() -> None:
    assert len({deal(seed) for seed in range(50)}) > 40


def test_a_hand_that_brute_force_cannot_solve_is_never_dealt() -> None:
    hopeless = [
        cards
        for cards in itertools.combinations_with_replacement(range(1, 5), 4)
        if 24 not in brute_force(tuple(map(Fraction, cards)))
    ]
    assert hopeless and not any(map(can_make, hopeless))


@pytest.mark.parametrize("seed", range(4))
def test_moves_and_the_checker_agree_with_brute_force(seed: int) -> None:
    """All lines of play: an expression is worth what its moves say, and the checker accepts 24 only."""
    cards = deal(seed)
    numbers = tuple(map(Fraction, cards))
    possible = brute_force(numbers)
    level = [table_of(cards)]
    for _ in cards[1:]:
        level = [move.left for table in level for move in moves(table)]
    assert {Fraction(table[0].value) for table in level} <= possible
    for table in level:
        assert eval(table[0].expression.replace("/", "//")) == table[0].value
        assert check(table[0].expression, cards) == (table[0].value == 24)


@pytest.mark.parametrize(
    ("expression", "right"),
    [
        ("8 / (3 - 8 / 3)", True),
        ("(8 * 3) / (8 - 3) * 5", False),  # uses a five
        ("8 * 3", False),  # leaves cards over
        ("8 * 3 * 8 / 8 * 3 / 3", False),  # uses cards twice
        ("8 * 3 + 8 - 3", False),  # is 29
        ("8 / (3 - 3) * 8", False),
        ("8 ** 3 * 8 * 3", False),
        ("24.0 + 8 - 8 * 3 / 3", False),
        ("-8 * -3 + 8 - 3", False),
        ("__import__('os')", False),
        ("8 8 3 3", False),
        ("", False),
        ("True * 8 * 3", False),
    ],
)
def test_the_checker_takes_nothing_else(expression: str, right: bool) -> None:
    assert check(expression, (3, 3, 8, 8)) is right


def test_moves_leave_each_set_of_numbers_once() -> None:
    left = [values(move.left) for move in moves(table_of((2, 2, 4, 4)))]
    assert len(left) == len(set(left)) and all(len(numbers) == 3 for numbers in left)


def output_of(llm: LLM, *, terminal: bool = False, seed: int = 2, width: int = 2, dice: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=118, height=50, force_terminal=terminal)
    result = demo.run(llm, console, seed=seed, width=width, dice=dice)
    check_idle(llm)
    assert (result.search.answer is None) == result.search.missed
    return out.getvalue()


@pytest.mark.model
def test_dice_hold_nothing_in_the_end_and_a_miss_is_called_one(smollm2: LLM) -> None:
    texts = [output_of(smollm2, seed=seed, width=1, dice=True) for seed in range(3)]
    assert any("a miss: no move that was kept at the end gives 24" in text for text in texts)
    assert all(("checked" in text) or ("a miss" in text) for text in texts)


@pytest.mark.model
def test_the_model_solves_the_hand_of_seed_2(smollm2: LLM, tmp_path: Path) -> None:
    out = io.StringIO()
    picture = tmp_path / "demo.svg"
    console = Console(file=out, width=118)
    search, gauges = demo.run(smollm2, console, seed=2, width=4, save_svg=picture)
    check_idle(smollm2)
    assert search.answer is not None and check(search.answer.expression, search.cards)
    assert "checked" in out.getvalue() and "</svg>" in picture.read_text()
    assert search.num_made == 1 + 3 * 4
    assert gauges.peak_sharing > 3 and gauges.peak_blocks > 0
    assert gauges.final is not None and gauges.final.pages.num_in_use == 0


@pytest.mark.model
def test_the_animated_view_draws_the_same_end(smollm2: LLM) -> None:
    text = output_of(smollm2, terminal=True, dice=True)
    assert "pages" in text and "summary" in text and "\x1b[" in text


@pytest.mark.model
def test_an_interrupted_search_leaves_nothing(smollm2: LLM) -> None:
    search = Search(smollm2, deal(0), 4, dice=0)

    def interrupt() -> None:
        if search.num_made > 3:
            raise KeyboardInterrupt

    search.on_change = interrupt
    with pytest.raises(KeyboardInterrupt):
        search.run()
    check_idle(smollm2)

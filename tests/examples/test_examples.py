"""The examples with small budgets, on the embedded model; and what they deal and check."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from inspect import iscoroutinefunction
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from examples import (
    arpo_split,
    beam_search,
    game_of_24,
    mcts_with_tools,
    parallel_sampling,
    self_consistency,
    sums,
    tool_calls,
    treerl_split,
)
from examples.tally import Tally, options, seeds_of
from examples.tools import calculator
from examples.word_problems import deal, left_after, steps
from ramet import LLM, AsyncLLM
from ramet.testing import check_idle

EXAMPLES = [
    arpo_split,
    beam_search,
    game_of_24,
    mcts_with_tools,
    parallel_sampling,
    self_consistency,
    tool_calls,
    treerl_split,
]


@pytest.fixture(scope="module")
def model() -> LLM:
    """The embedded model as the examples load it, in the type that is fast here."""
    return LLM("smollm2", num_blocks=512)


def play(llm: LLM, work: Any) -> tuple[list[Tally], str]:
    """Run an example; the engine must hold nothing afterwards."""
    out = io.StringIO()

    async def main() -> Any:
        async with AsyncLLM(llm) as engine:
            return await work(Console(file=out, width=120), engine)

    tallies = asyncio.run(main())
    check_idle(llm)
    return tallies, out.getvalue()


@pytest.mark.model
def test_tree_of_thought_beats_samples_and_dice(model: LLM) -> None:
    """One hand, a narrow beam."""
    (thought, sampled, diced), text = play(model, lambda out, llm: game_of_24.run([3], 3, out, llm))
    assert (thought.num_solved, sampled.num_solved, diced.num_solved) == (1, 0, 0)
    assert 5 * thought.num_tokens < thought.num_flat_tokens
    assert "1 of 1" in text
    for other in (sampled, diced):  # as many tokens, but for a last sample's, or for moves of other numbers
        assert other.num_tokens == pytest.approx(thought.num_tokens, rel=0.3)


@pytest.mark.model
def test_mcts_with_a_calculator_beats_dice(model: LLM) -> None:
    (thought, _, diced), _ = play(
        model, lambda out, llm: mcts_with_tools.run([1], "calculator", 200, out, llm)
    )
    assert thought.num_solved == 1 > diced.num_solved
    assert 5 * thought.num_tokens < thought.num_flat_tokens


@pytest.mark.model
def test_beams_are_branches(model: LLM) -> None:
    """A greedy chain computes the prompt and its own tokens; without branches more beams cost more by far."""
    (greedy, wide), text = play(model, lambda out, llm: beam_search.run(range(2), [1, 4], out, llm))
    assert greedy.num_flat_tokens < wide.num_flat_tokens
    assert 10 * wide.num_tokens < wide.num_flat_tokens
    assert "4 beams" in text


@pytest.mark.model
def test_a_tree_that_python_worked_out_can_be_drawn(model: LLM, tmp_path: Path) -> None:
    problem = deal(1)

    async def draw(out: Console, llm: AsyncLLM) -> Any:
        found = await mcts_with_tools.think(
            llm, problem, mcts_with_tools.TOOLS["python"], mcts_with_tools.likelihood, 100
        )
        mcts_with_tools.draw(found, problem, tmp_path / "tree.svg")
        return found

    play(model, draw)
    assert "visits" in (tmp_path / "tree.svg").read_text()


@pytest.mark.model
def test_samples_and_votes(model: LLM) -> None:
    (one, many), _ = play(model, lambda out, llm: parallel_sampling.run([0], 4, out, llm))
    assert one.num_solved <= many.num_solved
    assert many.num_tokens < many.num_flat_tokens
    (_, vote), text = play(model, lambda out, llm: self_consistency.run([0], 4, out, llm))
    assert vote.num_problems == 1 and "majority of 4" in text


@pytest.mark.model
def test_tools_run_while_others_decode(model: LLM) -> None:
    (alone, at_once), _ = play(model, lambda out, llm: tool_calls.run(range(4), 0.3, out, llm))
    assert at_once.num_solved >= alone.num_solved >= 3
    assert at_once.seconds < alone.seconds


@pytest.mark.model
@pytest.mark.parametrize("example", [arpo_split, treerl_split])
def test_split_rules_show_what_they_computed(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [example.__name__])
    example.main()
    *_, last, _ = (line for line in capsys.readouterr().out.splitlines() if line)
    solved, computed, flat, _ = (cell.strip() for cell in last.strip("│ ").split("│")[1:])
    assert " of " in solved
    assert 3 * int(computed.replace(",", "")) < int(flat.replace(",", ""))


@pytest.mark.parametrize("example", EXAMPLES)
def test_help_teaches(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what the example does and how it is run, and loads no model."""
    monkeypatch.setattr("sys.argv", ["example", "--help"])
    with pytest.raises(SystemExit) as ended:
        asyncio.run(example.main()) if iscoroutinefunction(example.main) else example.main()
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert f"python -m {example.__name__}" in said and (example.__doc__ or "?") in said


def test_a_count_of_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options("What it does.").parse_args(["--problems", "0"])
    assert "--problems: must be a whole number above 0" in capsys.readouterr().err
    assert seeds_of(options("What it does.").parse_args(["--problems", "3", "--first", "5"])) == range(5, 8)


@pytest.mark.parametrize("seed", range(20))
def test_word_problems_can_be_solved_by_steps(seed: int) -> None:
    """Some way through all steps that are offered leads to the answer."""
    problem = deal(seed)

    def ends(numbers: list[int]) -> Iterator[int]:
        if len(numbers) == 1:
            yield numbers[0]
        for step in steps(numbers):
            yield from ends(left_after(numbers, step, int(asyncio.run(calculator(step.removesuffix("="))))))

    assert problem.answer in set(ends(problem.numbers))


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("8 / 2 = 4\n8 - 4 = 4\n6 * 4 = 24\n", True),
        ("8 / 2 = 4\n8 - 4 = 4\n6 * 4 = 24\nA lot", False),
        ("6 * 4 = 24\n", False),
        ("8 / 2 = 4\n8 - 4 = 5\n6 * 4 = 24\n", False),
        ("6 * 8 = 48\n48 / 2 = 24\n", False),
        ("", False),
    ],
)
def test_solutions_are_checked_line_by_line(text: str, holds: bool) -> None:
    assert game_of_24.solution_holds(text, (2, 6, 8, 8)) is holds


def test_answers_are_read_off_the_last_line() -> None:
    assert sums.answer("23 + 45 = 68\n68 + 12 = 80\nA: 80") == 80
    assert sums.answer("A: about 80") is None and sums.answer("A: 8\n9") == 8
    assert sums.check("A: 60", sums.Problem((10, 20, 30)))

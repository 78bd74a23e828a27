"""`ramet bench beams`: how the time of a step of beam search grows with the width.

A step is one row of the model for each beam, the choice of the best continuations of all, and forks. None of
it is to grow faster than the rows do.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from rich.table import Table

from ramet.api.bench import Report
from ramet.engine.beam_search import BeamSearch
from ramet.engine.branch import Branch
from ramet.engine.engine import Engine
from ramet.engine.llm import LLM

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_PROMPT_LENGTH = 512
_NUM_TOKENS = 9


@dataclass(frozen=True)
class Cost:
    """A step of one search, its first one left out."""

    step_s: float  # the median
    search_s: float  # the part of it that is not the model's: candidates, forks, releases
    copies: float  # of blocks


def run(
    llm: LLM | None = None, widths: Sequence[int] = WIDTHS, prompt_length: int = _PROMPT_LENGTH
) -> Report:
    """Measure with the embedded model, or an engine that is given."""
    llm = LLM("smollm2", num_blocks=2048) if llm is None else llm
    prompt = random.Random(1).choices(range(llm.engine.vocab_size), k=prompt_length)
    root = llm.branch(prompt)
    costs = {}
    for width in widths:
        costs[width] = cost = measure(llm, root, width)
        print(f"bench beams: width {width}: {1e3 * cost.step_s:.1f} ms", file=sys.stderr, flush=True)
    root.prune()
    return report_of(costs)


def measure(llm: LLM, root: Branch, width: int) -> Cost:
    ends: list[float] = []
    copies: list[int] = []

    def hear(_: object) -> None:
        ends.append(time.perf_counter())
        copies.append(llm.engine.cache.num_copies)

    with _searching() as searched:
        beams = root.beam_search(num_beams=width, max_tokens=_NUM_TOKENS, ignore_eos=True, on_progress=hear)
    for beam in beams:
        beam.prune()
    steps = [after - before for before, after in pairwise(ends)]
    # In the first step all beams leave the prompt's open block.
    return Cost(median(steps), median(searched[1:]), (copies[-1] - copies[1]) / (len(steps) - 1))


@contextmanager
def _searching() -> Iterator[list[float]]:
    """Times each step of a search, but for the model's part."""
    seconds: list[float] = []
    go_on = BeamSearch.go_on

    def timed(search: BeamSearch, engine: Engine) -> None:
        start = time.perf_counter()
        go_on(search, engine)
        seconds.append(time.perf_counter() - start)

    BeamSearch.go_on = timed  # type: ignore[method-assign,assignment]
    try:
        yield seconds
    finally:
        BeamSearch.go_on = go_on  # type: ignore[method-assign]


def report_of(costs: dict[int, Cost]) -> Report:
    report = Report("beams")
    table = Table(title="A step of beam search", title_justify="left")
    for column in ("width", "step, ms", "a row, ms", "of it the search's, ms", "copies"):
        table.add_column(column, justify="right")
    for width, cost in costs.items():
        report.metrics[f"step_ms_{width}"] = 1e3 * cost.step_s
        report.metrics[f"search_ms_{width}"] = 1e3 * cost.search_s
        report.metrics[f"copies_a_step_{width}"] = cost.copies
        step, search = 1e3 * cost.step_s, 1e3 * cost.search_s
        table.add_row(str(width), f"{step:.1f}", f"{step / width:.2f}", f"{search:.1f}", f"{cost.copies:.1f}")
    report.tables = [table]
    # A row of the widest search costs no more than one of a search a quarter as wide.
    *_, wide, _, widest = sorted(costs)
    a_row = {width: cost.step_s / width for width, cost in costs.items()}
    report.metrics["row_time_at_full_over_quarter_width"] = a_row[widest] / a_row[wide]
    report.metrics["search_share_at_full_width"] = costs[widest].search_s / costs[widest].step_s
    report.target("row_time_at_full_over_quarter_width", "<=", 1.25)
    report.target("search_share_at_full_width", "<=", 0.25)
    return report

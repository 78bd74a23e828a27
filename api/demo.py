"""`ramet demo`: the model plays the Game of 24 by a tree of thought; you see the tree and the pages.

With a width of 6 the model's ratings end with a checked answer for every seed from 0 to 9, in bfloat16 and in
float32; dice in their place find one or two of the ten, and `--dice` lets them try.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from rich.console import Console, Group
from rich.live import Live
from torch import Tensor

from ramet.api.puzzle import TARGET, deal
from ramet.api.tree_of_thought import Search
from ramet.api.tree_view import Gauges, picture, plain_line, summary
from ramet.engine.llm import LLM
from ramet.engine.model_runner import ModelRunner, Runner
from ramet.engine.step import Step
from ramet.radix.prefix_cache import Copy

WIDTH = 6
NUM_BLOCKS = 128  # few enough that the bar of blocks shows something
_FRAME_S = 0.1
_PLAIN_S = 2.0
_SVG_COLUMNS = 118


class Result(NamedTuple):
    """What a finished demo has to show."""

    search: Search
    gauges: Gauges


def run(
    llm: LLM,
    console: Console,
    *,
    seed: int = 0,
    width: int = WIDTH,
    dice: bool = False,
    plain: bool = False,
    save_svg: Path | None = None,
) -> Result:
    """Play one hand and show it; everything that it held is released when this returns."""
    cards = deal(seed)
    console.print(f"The hand of seed {seed}: {' '.join(map(str, cards))}. Make {TARGET}.", highlight=False)
    gauges = _gauges(llm)
    search = Search(llm, cards, width, dice=seed if dice else None)
    show: _Show = _Plain(console) if plain or not console.is_terminal else _Animated(console)
    show.search, show.gauges = search, gauges

    def look(num_writing: int = 0, *, force: bool = False) -> None:
        gauges.update(llm.stats(), len(llm.engine.sequences), num_writing)
        show.frame(force=force)

    search.on_change = lambda: look(force=True)
    with _watched(llm, look), show:
        search.run()
    gauges.final = llm.stats()
    console.print(summary(search, gauges))
    if save_svg is not None:
        _save_svg(search, gauges, save_svg)
        console.print(f"The picture is in {save_svg}.", highlight=False)
    return Result(search, gauges)


def _gauges(llm: LLM) -> Gauges:
    runner = llm.engine.runner
    bytes_per_block = runner.pool.bytes_per_block if isinstance(runner, ModelRunner) else 0
    stats = llm.stats()
    return Gauges(bytes_per_block // llm.config.block_size, llm.config.max_model_len, stats, stats)


# -- looking at the pages in the middle of a step ----------------------------------------------------------


class _Look:
    """A runner that calls `look` before each forward, when every block that the step needs is taken.

    After the step would be too late: the forks that score a text are gone by then.
    """

    def __init__(self, inner: Runner, look: _LookFunction) -> None:
        self._inner = inner
        self._look = look

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        self._inner.copy_blocks(copies)

    def forward(self, step: Step) -> Tensor:
        self._look(sum(row.num_written for row in step.rows))
        return self._inner.forward(step)


class _LookFunction(Protocol):
    def __call__(self, num_writing: int = 0, *, force: bool = False) -> None: ...


@contextmanager
def _watched(llm: LLM, look: _LookFunction) -> Iterator[None]:
    runner = llm.engine.runner
    llm.engine.runner = _Look(runner, look)
    try:
        yield
    finally:
        llm.engine.runner = runner


# -- showing -----------------------------------------------------------------------------------------------


class _Show:
    """Where frames go. They are drawn by the engine's own thread, so none sees half a change."""

    search: Search
    gauges: Gauges

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown_at = 0.0

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: object, *exc: object) -> None:
        """Nothing to end."""

    def frame(self, *, force: bool) -> None:
        raise NotImplementedError

    def _due(self, seconds: float, force: bool) -> bool:
        now = time.perf_counter()
        if not force and now - self._shown_at < seconds:
            return False
        self._shown_at = now
        return True


class _Animated(_Show):
    """The tree in place, redrawn as it grows."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> None:
        self._live.start()

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is None:
            self._live.update(picture(self.search, self.gauges), refresh=True)
        self._live.stop()

    def frame(self, *, force: bool) -> None:
        if self._due(_FRAME_S, force):
            view = picture(self.search, self.gauges, height=self._console.height)
            self._live.update(view, refresh=True)


class _Plain(_Show):
    """A line now and then, and the tree at the end: for pipes and logs."""

    _said = ""

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is None:
            self._console.print(picture(self.search, self.gauges))

    def frame(self, *, force: bool) -> None:
        if self.search.status != self._said and self._due(_PLAIN_S, force):
            self._said = self.search.status
            self._console.print(plain_line(self.search, self.gauges), markup=False, highlight=False)


def _save_svg(search: Search, gauges: Gauges, path: Path) -> None:
    recorder = Console(record=True, width=_SVG_COLUMNS, file=io.StringIO(), force_terminal=True)
    recorder.print(Group(picture(search, gauges), summary(search, gauges)))
    recorder.save_svg(str(path), title="ramet demo")

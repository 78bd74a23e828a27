"""How a search looks: its tree, the blocks by state, what sharing saves. It draws, and decides nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from ramet.api.puzzle import TARGET, values
from ramet.api.tree_of_thought import Search, State, Thought
from ramet.engine.engine import Stats

_STYLE: dict[State, str] = {"kept": "bold cyan", "pruned": "dim", "solved": "bold green", "wrong": "red"}
_MARK: dict[State, str] = {"kept": "●", "pruned": "✂", "solved": "✔", "wrong": "✗"}
_LEGEND = (
    "● kept  ✂ pruned  ✔ checked  ✗ wrong   "
    "fit: how well the numbers suit 24, to the model   24?: its chance of 24"
)
_BAR_WIDTH = 40
_TALL = 44  # lines of a window that has room for everything
_FACTOR_FLOOR = -6.0  # a mean log-probability of a factor that gives an empty bar
_MIB = 1 << 20


@dataclass
class Gauges:
    """What the pages hold and held at most, beside what contiguous memory would have had to hold."""

    bytes_per_token: int
    max_model_len: int
    first: Stats  # before anything was computed
    stats: Stats  # now
    final: Stats | None = None  # after everything was released
    num_branches: int = 0
    unshared_tokens: int = 0  # what the branches would hold if nothing were shared
    sharing_ratio: float = 1.0
    peak_branches: int = 0
    peak_blocks: int = 0
    peak_unshared_tokens: int = 0
    peak_sharing: float = 1.0

    def update(self, stats: Stats, num_branches: int, num_writing: int = 0) -> None:
        """Look again. `num_writing` tokens are just being written: `stats` has their blocks, not yet them."""
        pages = stats.pages
        self.stats, self.num_branches = stats, num_branches
        self.unshared_tokens = pages.logical_tokens + num_writing
        self.sharing_ratio = self.unshared_tokens / max(1, pages.physical_tokens + num_writing)
        self.peak_branches = max(self.peak_branches, num_branches)
        self.peak_blocks = max(self.peak_blocks, pages.num_in_use)
        self.peak_unshared_tokens = max(self.peak_unshared_tokens, self.unshared_tokens)
        self.peak_sharing = max(self.peak_sharing, self.sharing_ratio)

    def mib(self, num_tokens: int) -> str:
        size = num_tokens * self.bytes_per_token / _MIB
        return f"{size:,.0f} MiB" if size >= 10 else f"{size:.1f} MiB"


def picture(search: Search, gauges: Gauges, height: int | None = None) -> RenderableType:
    """The whole view; in a window of few lines, without the moves that were not kept."""
    cards = " ".join(map(str, search.cards))
    title = f"[bold]ramet demo[/]  make {TARGET} from [bold yellow]{cards}[/]"
    tree = _tree(search, height is None or height >= _TALL) if search.root is not None else Text("")
    frame = Panel(
        Group(tree, Text(_LEGEND, style="dim")),
        title=title,
        title_align="left",
        border_style="green",
        subtitle=_status(search),
        subtitle_align="left",
    )
    return Group(frame, Panel(_pages(gauges), title="pages", title_align="left", border_style="blue"))


def _status(search: Search) -> Text:
    style = "bold green" if search.answer else "bold red" if search.missed else "italic"
    return Text(search.status, style=style)


# -- the tree ----------------------------------------------------------------------------------------------


def _tree(search: Search, with_dropped: bool) -> Tree:
    root = search.root
    assert root is not None, "there is a tree once the examples are read"
    label = Text.assemble(
        ("the prompt", "bold"),
        f"  {root.length} tokens in {len(root.blocks)} blocks, read once",
    )
    tree = Tree(label, guide_style="dim green")
    _add_children(tree, root, with_dropped)
    return tree


def _add_children(tree: Tree, thought: Thought, with_dropped: bool) -> None:
    for child in thought.children:
        _add_children(tree.add(_label(child)), child, with_dropped)
    if thought.dropped and with_dropped:
        tree.add(_dropped(thought))


def _label(thought: Thought) -> Text:
    assert thought.move is not None and thought.parent is not None, "only the root was not made by a move"
    style = _STYLE[thought.state]
    label = Text(no_wrap=True, overflow="ellipsis")
    label.append_text(Text.assemble((f"{_MARK[thought.state]} {thought.move.text:<12}", style), "  "))
    label.append_text(_meter(thought))
    if len(thought.table) > 1:
        label.append(f"  left {' '.join(map(str, values(thought.table))):<9}", "yellow")
    label.append(f"  +{thought.length - thought.parent.length} tokens", "dim")
    if own := thought.own_blocks:
        label.append(f" in {' '.join(f'#{block}' for block in own)}", "magenta")
    if thought.state == "solved":
        label.append(f"  {thought.expression[1:-1]} = {TARGET}, checked", "bold green")
    return label


def _meter(thought: Thought) -> Text:
    """The score as a bar and a number: a chance of the target, or the mean log-probability of the factors."""
    if len(thought.table) > 2:
        return _bar(1 - thought.score / _FACTOR_FLOOR, f"{math.exp(thought.score):6.1%} fit ")
    chance = math.exp(thought.score)
    return _bar(chance, f"{chance:6.1%} {TARGET}? ")


def _bar(part: float, text: str, width: int = 8) -> Text:
    full = round(max(0.0, min(1.0, part)) * width)
    return Text.assemble(("━" * full, "green"), ("━" * (width - full), "bright_black"), f" {text}")


def _dropped(thought: Thought, most: int = 4) -> Text:
    names = [move.text for _, move in thought.dropped[:most]]
    more = len(thought.dropped) - len(names)
    text = f"· {len(thought.dropped)} not kept: {', '.join(names)}{', …' if more else ''}"
    return Text(text, style="bright_black", no_wrap=True, overflow="ellipsis")


# -- the pages ---------------------------------------------------------------------------------------------


def _pages(gauges: Gauges) -> Table:
    pages = gauges.stats.pages
    table = Table.grid(padding=(0, 2))
    table.add_row("blocks", Text.assemble(_blocks_bar(gauges), "  ", _blocks_legend(gauges)))
    held = pages.num_in_use * pages.block_size
    now = Text.assemble(
        f"{gauges.num_branches} branches of {gauges.unshared_tokens:,} tokens in {held:,} slots, ",
        (gauges.mib(held), "bold green"),
        (f"; shared {gauges.sharing_ratio:.1f} times", "bold green"),
    )
    table.add_row("now", now)
    table.add_row("contiguous", _contiguous(gauges))
    return table


def _contiguous(gauges: Gauges) -> Text:
    """What the same branches would take if each had its own place: the longest it may get, or as it is."""
    reserved = gauges.num_branches * gauges.max_model_len
    return Text.assemble(
        f"{reserved:,} slots reserved ahead, ",
        (gauges.mib(reserved), "bold red"),
        f"; {gauges.unshared_tokens:,} at exact lengths, ",
        (gauges.mib(gauges.unshared_tokens), "red"),
    )


def _blocks_bar(gauges: Gauges) -> Text:
    pages = gauges.stats.pages
    used = math.ceil(pages.num_in_use * _BAR_WIDTH / pages.num_blocks)
    idle = min(_BAR_WIDTH - used, math.ceil(pages.num_cached_idle * _BAR_WIDTH / pages.num_blocks))
    rest = _BAR_WIDTH - used - idle
    return Text.assemble(("█" * used, "cyan"), ("█" * idle, "yellow"), ("░" * rest, "bright_black"))


def _blocks_legend(gauges: Gauges) -> Text:
    pages = gauges.stats.pages
    return Text.assemble(
        (f"{pages.num_in_use} in use", "cyan"),
        (f"  {pages.num_cached_idle} cached idle", "yellow"),
        (f"  {pages.num_free} free", "bright_black"),
        f"  of {pages.num_blocks}",
    )


# -- plain lines and the end -------------------------------------------------------------------------------


def plain_line(search: Search, gauges: Gauges) -> str:
    """One line for a pipe or a log."""
    pages = gauges.stats.pages
    return (
        f"{search.status} | blocks {pages.num_in_use} in use, {pages.num_cached_idle} cached idle, "
        f"{pages.num_free} free | {gauges.num_branches} branches, shared x{gauges.sharing_ratio:.1f}"
    )


def summary(search: Search, gauges: Gauges) -> Table:
    """What came of it."""
    table = Table(title="summary", title_justify="left", show_header=False, border_style="green")
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in _facts(search, gauges):
        table.add_row(name, value)
    return table


def _facts(search: Search, gauges: Gauges) -> Iterator[tuple[str, RenderableType]]:
    final = gauges.final or gauges.stats
    pages = final.pages
    num_computed = final.num_computed_tokens - gauges.first.num_computed_tokens
    resend = search.scorer.resend_tokens if search.scorer is not None else 0
    reserved = gauges.mib(gauges.peak_branches * gauges.max_model_len)
    yield "answer", _verdict(search)
    pruned = f"{search.num_pruned} pruned on the way, which freed {search.num_blocks_freed} blocks"
    yield "branches", f"{search.num_made} made, {pruned}; at the end {pages.num_in_use} are in use"
    if search.scorer is not None and resend:
        yield "texts scored", f"{search.scorer.num_candidates} by the model, each on a fork"
        yield "tokens computed", f"{num_computed:,}; with every text sent whole {resend:,}"
    held = gauges.mib(gauges.peak_blocks * pages.block_size)
    most = f"{gauges.peak_branches} branches in {gauges.peak_blocks} blocks, {held}"
    yield "at most at once", f"{most}; shared {gauges.peak_sharing:.1f} times"
    exact = gauges.mib(gauges.peak_unshared_tokens)
    yield "contiguous", f"{reserved} for the same reserved ahead, {exact} at exact lengths"
    num_copies = pages.num_copies - gauges.first.pages.num_copies
    yield "block copies", f"{num_copies}, each on the first write to a shared block"
    first = "" if search.first_score_s is None else f", the first score after {search.first_score_s:.1f} s"
    yield "time", f"{search.seconds:.1f} s{first}"


def _verdict(search: Search) -> Text:
    if search.answer is None:
        return Text("a miss: no move that was kept at the end gives 24", style="bold red")
    who = "the dice" if search.by_dice else "the model"
    shown = f"{search.answer.expression[1:-1]} = {TARGET}"
    return Text(f"{shown}, checked; choice {search.place} of {who}", style="bold green")

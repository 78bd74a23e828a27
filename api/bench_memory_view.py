"""How the memory benchmark is shown: tables for a terminal, one picture for a file. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Metrics = Mapping[str, float]


class Way(NamedTuple):
    """One way to give out memory, and where its numbers are among the metrics."""

    name: str  # in a table
    label: str  # in the picture
    shares: str  # {} is the part: used, reservation, ...
    resident: str
    paper_resident: str = ""  # requests, in the paper's measurement; empty if it has none


WAYS = (
    Way(
        "contiguous, longest length",
        "contiguous\n2,048 each",
        "{}_contiguous_max_sharegpt",
        "resident_contiguous_max",
        "7.00",
    ),
    Way(
        "contiguous, length known, buddy",
        "contiguous\nexact, buddy",
        "{}_contiguous_exact_buddy_sharegpt",
        "resident_contiguous_exact_buddy",
        "13.62",
    ),
    Way(
        "contiguous, length known, first fit",
        "contiguous\nexact, first fit",
        "{}_contiguous_exact_first_fit_sharegpt",
        "resident_contiguous_exact_first_fit",
    ),
    Way("paged, blocks of 16", "paged\nB = 16", "{}_paged_sharegpt_16", "resident_paged_16", "30.42"),
    Way("paged, blocks of 32", "paged\nB = 32", "{}_paged_sharegpt_32", "resident_paged_32"),
)


class Part(NamedTuple):
    """One part of the pool."""

    key: str
    title: str  # in the picture
    color: str


PARTS = (
    Part("used", "tokens", "#2a7f78"),
    Part("reservation", "reserved, used later", "#f2cf6b"),
    Part("internal", "internal fragmentation", "#ee9b4e"),
    Part("external", "external fragmentation", "#d1495b"),
    Part("free", "free for any request", "#d5dae1"),
)
MEASURED, PAPER, INK, FAINT = "#2a7f78", "#a9b4c2", "#22303c", "#8893a0"


def tables(metrics: Metrics, block_sizes: Sequence[int], paper_saving: Mapping[int, float]) -> list[Table]:
    return [
        _ways_table(metrics),
        _refusal_table(metrics),
        _sharing_table(metrics, paper_saving),
        _sizes_table(metrics, block_sizes),
    ]


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _ways_table(metrics: Metrics) -> Table:
    title = "Where the slots are, % of the pool, averaged over time (ShareGPT lengths, saturated)"
    headings = ("tokens", "reserved", "internal", "external", "free", "resident", "paper")
    table = _table(title, "allocation", *headings)
    for way in WAYS:
        shares = [f"{100 * metrics[way.shares.format(part.key)]:.1f}" for part in PARTS]
        table.add_row(way.name, *shares, f"{metrics[way.resident]:.2f}", way.paper_resident)
    return table


def _refusal_table(metrics: Metrics) -> Table:
    table = _table("A request refused although its size is free (first fit, lengths known)", "", "slots")
    table.add_row("asked for", f"{metrics['refused_size_slots']:,.0f}")
    table.add_row("free in total", f"{metrics['refused_free_slots']:,.0f}")
    table.add_row("largest hole", f"{metrics['refused_largest_hole_slots']:,.0f}")
    admits = "admitted" if metrics["refused_paged_admits"] else "refused"
    table.add_row("the same trace, paged, all at full length", admits)
    waits = metrics["refused_by_fragmentation_exact_first_fit"]
    table.add_row("time in which the head of the queue waits so", f"{100 * waits:.0f} %")
    return table


def _sharing_table(metrics: Metrics, paper_saving: Mapping[int, float]) -> Table:
    table = _table("Blocks saved by sharing the prompt (Alpaca lengths)", "samples", "measured %", "paper %")
    for n, paper in paper_saving.items():
        table.add_row(f"{n}", f"{metrics[f'parallel_saving_n{n}_percent']:.2f}", f"{paper:.2f}")
    return table


def _sizes_table(metrics: Metrics, block_sizes: Sequence[int]) -> Table:
    headings = ("waste %", "slots a sequence", "(B - 1) / 2", "table entries", "table bytes", "resident")
    table = _table("Block sizes, ShareGPT lengths (averages of the resident sequences)", "B", *headings)
    for size in block_sizes:
        table.add_row(
            f"{size}",
            f"{100 * metrics[f'waste_paged_sharegpt_{size}']:.2f}",
            f"{metrics[f'waste_slots_per_sequence_{size}']:.2f}",
            f"{(size - 1) / 2:.1f}",
            f"{metrics[f'table_entries_per_sequence_{size}']:.1f}",
            f"{metrics[f'table_bytes_per_sequence_{size}']:.0f}",
            f"{metrics[f'resident_paged_{size}']:.1f}",
        )
    return table


def plot_report(
    metrics: Metrics, path: Path, block_sizes: Sequence[int], paper_saving: Mapping[int, float]
) -> None:
    """Write the picture as a PNG. Needs matplotlib, which is imported only here."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 9.2), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.15, wspace=0.04, hspace=0.06)
    ((shares, resident), (sharing, sizes)) = figure.subplots(2, 2, width_ratios=(1.25, 1))
    title = "KV memory: contiguous ranges against pages"
    figure.suptitle(title, fontsize=17, weight="bold", color=INK)
    _plot_shares(shares, metrics)
    _plot_resident(resident, metrics)
    _plot_sharing(sharing, metrics, paper_saving)
    _plot_sizes(sizes, metrics, block_sizes)
    figure.savefig(path, format="png")


def _style(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, weight="bold", color=INK, pad=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=10, length=0)
    axes.set_axisbelow(True)


def _inside(axes: Axes, x: float, y: float, text: str, color: str) -> None:
    """A number in the middle of a bar."""
    axes.text(x, y, text, ha="center", va="center", color=color, fontsize=10.5)


def _plot_shares(axes: Axes, metrics: Metrics) -> None:
    """Stacked bars: the pool, part by part."""
    _style(axes, "Where the slots are (ShareGPT lengths, % of the pool)")
    labels, bottom = [way.label for way in WAYS], [0.0] * len(WAYS)
    for part in PARTS:
        heights = [100 * metrics[way.shares.format(part.key)] for way in WAYS]
        axes.bar(labels, heights, 0.66, bottom=bottom, color=part.color, label=part.title)
        for x, (height, low) in enumerate(zip(heights, bottom, strict=True)):
            if height >= 4:
                color = "white" if part.key in ("used", "external") else INK
                _inside(axes, x, low + height / 2, f"{height:.0f}", color)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_ylim(0, 100)
    axes.set_yticks([0, 25, 50, 75, 100])
    axes.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.13), frameon=False, fontsize=9.5)


def _plot_resident(axes: Axes, metrics: Metrics) -> None:
    """Bars: how many requests the same pool holds, with the paper's numbers as marks."""
    _style(axes, "Requests resident in the same memory (15,728 slots)")
    heights = [metrics[way.resident] for way in WAYS]
    colors = [MEASURED if way.name.startswith("paged") else "#ee9b4e" for way in WAYS]
    axes.bar([way.label for way in WAYS], heights, 0.66, color=colors)
    for x, height in enumerate(heights):
        _inside(axes, x, height / 2, f"{height:.1f}", "white" if colors[x] == MEASURED else INK)
    marked = [x for x, way in enumerate(WAYS) if way.paper_resident]
    paper = [float(WAYS[x].paper_resident) for x in marked]
    axes.scatter(marked, paper, marker="D", s=42, color=INK, zorder=3, label="PagedAttention paper")
    axes.set_ylim(0, max(heights) * 1.18)
    axes.grid(axis="y", color="#e8ebef")
    axes.tick_params(axis="x", labelsize=9)
    axes.legend(loc="upper left", frameon=False, fontsize=9.5)


def _plot_sharing(axes: Axes, metrics: Metrics, paper_saving: Mapping[int, float]) -> None:
    """Bars in pairs: measured beside the paper."""
    _style(axes, "Blocks saved by sharing the prompt (Alpaca lengths, %)")
    width = 0.36
    rows = (
        ("measured", MEASURED, -width / 2, [metrics[f"parallel_saving_n{n}_percent"] for n in paper_saving]),
        ("PagedAttention paper", PAPER, width / 2, list(paper_saving.values())),
    )
    for label, color, shift, heights in rows:
        places = [x + shift for x in range(len(heights))]
        bars = axes.bar(places, heights, width * 0.94, color=color, label=label)
        axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=10, color=INK)
    axes.set_xticks(range(len(paper_saving)), [f"{n} samples" for n in paper_saving])
    axes.set_ylim(0, max(max(heights) for *_, heights in rows) * 1.25)
    axes.grid(axis="y", color="#e8ebef")
    axes.legend(loc="upper left", frameon=False, fontsize=9.5)


def _plot_sizes(axes: Axes, metrics: Metrics, block_sizes: Sequence[int]) -> None:
    """Two curves over the block size: memory wasted, and the length of a block table."""
    _style(axes, "Block size: waste against the block table")
    waste = [100 * metrics[f"waste_paged_sharegpt_{size}"] for size in block_sizes]
    entries = [metrics[f"table_entries_per_sequence_{size}"] for size in block_sizes]
    places = range(len(block_sizes))
    axes.axvspan(block_sizes.index(16) - 0.3, block_sizes.index(32) + 0.3, color="#eef4f3", zorder=0)
    axes.plot(places, waste, "o-", color="#d1495b", lw=2.2)
    axes.axhline(4, color=FAINT, lw=1, ls=(0, (4, 3)))
    axes.text(0, 4.4, "4 %", color=FAINT, fontsize=9)
    axes.set_ylabel("waste, % of allocated slots", color="#d1495b", fontsize=10)
    axes.set_xticks(places, [f"{size}" for size in block_sizes])
    axes.set_xlabel("block size, slots (16 and 32 shaded)", fontsize=10, color=INK)
    axes.set_ylim(bottom=0)
    right = axes.twinx()
    right.plot(places, entries, "s-", color="#3d6fa8", lw=2.2)
    right.set_yscale("log")
    right.set_ylabel("block table entries a sequence (log)", color="#3d6fa8", fontsize=10)
    right.spines[["top", "left", "bottom"]].set_visible(False)
    right.spines["right"].set_color(FAINT)
    right.minorticks_off()
    decades = [n for n in (1, 3, 10, 30, 100, 300, 1000) if min(entries) <= n <= max(entries)]
    right.set_yticks(decades, [f"{n}" for n in decades])
    right.tick_params(colors=INK, labelsize=10, length=0)

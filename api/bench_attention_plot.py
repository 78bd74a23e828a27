"""The picture of `ramet bench attention --device cuda --plot FILE`: microseconds a layer, and the peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ramet.api.bench_memory_view import FAINT, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {"ramet": "#1b6e53", "flashinfer cascade": "#e08b3a", "fa3 cascade": "#7a6fb0"}
COLORS |= {"flashinfer decode": "#f0c9a0", "fa3": "#c9c4e0"}


def plot_report(
    metrics: Mapping[str, float], path: Path, unshared: Sequence[str], trees: Sequence[str]
) -> None:
    """Write the picture as a PNG. Needs matplotlib, which is imported only here."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8.5), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", h_pad=0.15)
    above, below = figure.subplots(2, 1)
    title = "Decode attention over pages: time of a layer over the ideal (unique bytes, or flops)"
    figure.suptitle(title, fontsize=15, weight="bold", color=INK)
    _bars(above, "Trees: shared pages read once", metrics, trees)
    _bars(below, "Nothing shared", metrics, unshared)
    figure.savefig(path, format="png")


def _bars(axes: Axes, title: str, metrics: Mapping[str, float], cases: Sequence[str]) -> None:
    """One group a case, one bar an engine: how many times the ideal it takes, with the microseconds above."""
    engines = [one for one in COLORS if any(f"{case}{_of(one)}_us" in metrics for case in cases)]
    width = 0.85 / len(engines)
    for index, engine in enumerate(engines):
        for at, case in enumerate(cases):
            us = metrics.get(f"{case}{_of(engine)}_us")
            if us is None:
                continue
            ideal = metrics[f"{case}_us"] * metrics[f"{case}_share"]
            x = at + (index - (len(engines) - 1) / 2) * width
            axes.bar(x, us / ideal, width * 0.92, color=COLORS[engine], label=engine if at == 0 else None)
            axes.text(x, us / ideal, f"{us:.0f}", ha="center", va="bottom", fontsize=8, color=INK)
    axes.axhline(1, color=INK, linewidth=1)
    axes.set_title(title, loc="left", fontsize=12, weight="bold", color=INK)
    axes.set_xticks(range(len(cases)), cases, fontsize=11)
    axes.set_ylabel("times the ideal; microseconds above", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, length=0)
    axes.legend(frameon=False, ncols=len(engines), loc="upper left")


def _of(engine: str) -> str:
    return "" if engine == "ramet" else f"_{engine}"

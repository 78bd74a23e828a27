"""The tables of `ramet bench cpu`: the sizes, the times, and what was left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.table import Table

from ramet.api.cpu_sizes import SIZES, make

Runs = Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]  # by workload and engine


def tables(
    runs: Runs,
    skipped: Mapping[tuple[str, str], str],
    metrics: Mapping[str, float],
    engines: Sequence[str],
    tiny: bool,
) -> list[Table]:
    return [sizes(tiny), _times(runs, engines), _left_out(skipped), _numbers(metrics)]


def sizes(tiny: bool = False) -> Table:
    """What is run, and the least that an engine has to compute for it."""
    table = _table(
        "Workloads", ("", "what"), ("calls", "prompt tokens", "new ones", "output tokens", "ideal hits")
    )
    for name in SIZES:
        workload = make(name, 1, tiny=tiny)
        t = workload.totals()
        numbers = (t.calls, t.prompt_tokens, t.new_prompt_tokens, t.output_tokens)
        table.add_row(name, workload.title, *(f"{n:,}" for n in numbers), f"{t.ideal_hit_rate:.0%}")
    return table


def _times(runs: Runs, engines: Sequence[str]) -> Table:
    title = "Seconds in all; tokens a second; seconds to the first token; prompt tokens computed"
    table = _table(title, ("", "engine"), ("s", "tokens/s", "TTFT", "prompt tokens"))
    order = {engine: index for index, engine in enumerate(engines)}
    last = None
    for (workload, engine), found in sorted(runs.items(), key=lambda one: (one[0][0], order[one[0][1]])):
        wall = median(run["wall"] for run in found)
        first = [run["ttft"] for run in found if run["ttft"] is not None]
        computed = found[0]["prompt_tokens"]
        table.add_row(
            "" if workload == last else workload,
            engine,
            f"{wall:.2f}",
            f"{found[0]['output_tokens'] / wall:.1f}",
            f"{median(first):.2f}" if first else "",
            "" if computed is None else f"{computed:,}",
        )
        last = workload
    return table


def _left_out(skipped: Mapping[tuple[str, str], str]) -> Table:
    table = _table("Left out", ("engine", "workloads", "why"), ())
    reasons: dict[tuple[str, str], list[str]] = {}
    for (workload, engine), reason in skipped.items():
        reasons.setdefault((engine, reason), []).append(workload)
    for (engine, reason), workloads in reasons.items():
        table.add_row(engine, ", ".join(workloads), reason)
    return table


def _numbers(metrics: Mapping[str, float]) -> Table:
    table = _table("Ratios of times, and one row's step", ("",), ("measured",))
    for name, value in metrics.items():
        if "_over_" in name or name.endswith("_ms"):
            table.add_row(name, f"{value:.2f}")
    return table


def _table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in texts:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    return table

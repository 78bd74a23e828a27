"""What every benchmark returns and how it is shown: metrics, targets, one JSON object or one table.

A benchmark measures and reports. It never fails because a number is bad: whoever reads the targets decides.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

Kind = Literal["must", "goal"]
Op = Literal["<=", ">=", "<", ">"]


@dataclass(frozen=True)
class Target:
    """One number that was asked for, beside the number that was measured."""

    name: str
    value: float
    op: Op
    bound: float
    kind: Kind = "must"

    @property
    def met(self) -> bool:
        return {
            "<=": self.value <= self.bound,
            ">=": self.value >= self.bound,
            "<": self.value < self.bound,
            ">": self.value > self.bound,
        }[self.op]


@dataclass
class Report:
    """The result of one benchmark."""

    bench: str
    metrics: dict[str, float] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)  # for people; not part of the JSON

    def target(self, name: str, op: Op, bound: float, kind: Kind = "must") -> None:
        """Hold the metric `name` against a bound."""
        self.targets.append(Target(name, self.metrics[name], op, bound, kind))

    def to_json(self) -> dict[str, Any]:
        return {
            "bench": self.bench,
            "metrics": self.metrics,
            "targets": [
                {"name": t.name, "value": t.value, "op": t.op, "bound": t.bound, "kind": t.kind, "met": t.met}
                for t in self.targets
            ],
            "versions": versions(),
            "machine": machine(),
        }


def show(report: Report, *, as_json: bool, console: Console) -> None:
    """Print a report: one JSON object, last on stdout, or tables for people."""
    if as_json:
        print(json.dumps(report.to_json()))
        return
    for table in report.tables:
        console.print(table)
    console.print(_targets_table(report.targets))


def _targets_table(targets: Sequence[Target]) -> Table:
    table = Table(title="Targets", title_justify="left")
    for column in ("target", "measured", "asked", "kind", "met"):
        table.add_column(column, justify="left" if column in ("target", "kind", "met") else "right")
    for t in targets:
        met = "[green]yes[/]" if t.met else "[red]no[/]"
        table.add_row(t.name, f"{t.value:.4g}", f"{t.op} {t.bound:g}", t.kind, met)
    return table


def versions() -> dict[str, str]:
    """The versions of what was measured, as installed."""
    found = {"python": platform.python_version()}
    ours = ("ramet", "torch", "triton", "transformers", "numpy", "sortedcontainers")
    for package in (*ours, "flashinfer-python", "vllm"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str | int]:
    """The processor that the numbers belong to."""
    return {"system": platform.platform(), "cpu": _cpu_name(), "cores": os.cpu_count() or 0}


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()

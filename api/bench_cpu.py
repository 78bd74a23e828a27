"""`ramet bench cpu`: the workloads W1 to W9 on the embedded model, beside transformers and llama.cpp.

Every engine lives in its own process with two threads. They take turns on each workload, so that a
neighbour's load hits all of them; times are wall clock from the first request to the last token, prefill
included.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ramet.api.bench import Report
from ramet.api.bench_cpu_view import tables
from ramet.api.cpu_process import EngineProcess
from ramet.api.cpu_sizes import PROBES, SIZES

ENGINES = ("ramet", "generate bf16", "generate fp32", "generate_batch", "llama.cpp")
THREADS = 2
_TIME_S = 14 * 60.0  # of the 15 minutes, one is for what is running when it is over
_LOAD_S, _JOB_S = 180.0, 150.0
#: Turns of each; the ones that a target is about take several.
_TURNS = {"W2": 3, "W3": 3, "W4": 3, "prefill": 5, "one_row": 3}


@dataclass
class Measured:
    """Runs of each engine on each workload, and why there are none."""

    runs: dict[tuple[str, str], list[dict[str, Any]]] = field(default_factory=dict)  # by workload, engine
    skipped: dict[tuple[str, str], str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # of ramet's process

    def middle(self, workload: str, engine: str, what: str = "wall") -> float | None:
        values = [run[what] for run in self.runs.get((workload, engine), []) if run[what] is not None]
        return median(values) if values else None


def run(
    *, engines: Sequence[str] = ENGINES, workloads: Sequence[str] | None = None, tiny: bool = False
) -> Report:
    """Measure and report. `tiny` is for tests: the same shapes, a few tokens each."""
    names = [*PROBES, *SIZES] if workloads is None else list(workloads)
    measured = measure(engines, names, tiny)
    report = Report("cpu", metrics=metrics_of(measured))
    _set_targets(report)
    report.tables = tables(measured.runs, measured.skipped, report.metrics, engines, tiny)
    return report


def measure(engines: Sequence[str], workloads: Sequence[str], tiny: bool) -> Measured:
    start = time.monotonic()
    measured = Measured()
    processes = []
    try:
        for name in engines:  # one after the other: loading is not to be hurried by hunger
            _say(f"loading {name}")
            processes.append(EngineProcess(name, THREADS))
            processes[-1].wait_ready(_LOAD_S)
            if processes[-1].skipped:
                _say(f"{name} is left out: {processes[-1].skipped}")
        measured.facts = next((p.facts for p in processes if p.name == "ramet"), {})
        for process in processes:
            process.run("W1", 0, True, _JOB_S)  # the first steps of any engine are slow
        for name in workloads:
            for turn in range(1 if tiny else _TURNS.get(name, 1)):
                for process in processes:
                    left = start + _TIME_S - time.monotonic()
                    _take_turn(process, name, turn, tiny, min(_JOB_S, left), measured)
    finally:
        for process in processes:
            process.close()
    return measured


def _take_turn(
    process: EngineProcess, workload: str, turn: int, tiny: bool, timeout: float, measured: Measured
) -> None:
    key = (workload, process.name)
    if key in measured.skipped:
        return
    if timeout <= 0:
        measured.skipped.setdefault(key, "the time was over")
        return
    found = process.run(workload, 1 + turn, tiny, timeout)
    if "skipped" in found:
        measured.skipped[key] = found["skipped"]
        return
    measured.runs.setdefault(key, []).append(found)
    _say(f"{workload} {process.name}: {found['wall']:.2f} s")


def metrics_of(measured: Measured) -> dict[str, float]:
    """Seconds and tokens of every run, and the ratios that the targets are about."""
    metrics: dict[str, float] = {}
    for workload, engine in measured.runs:
        key = f"{workload}_{engine.replace(' ', '_').replace('.', '')}"
        for what in ("wall", "ttft", "prompt_tokens"):
            value = measured.middle(workload, engine, what)
            if value is not None:
                metrics[f"{key}_{what}"] = value
        wall, tokens = metrics[f"{key}_wall"], measured.runs[workload, engine][0]["output_tokens"]
        metrics[f"{key}_tokens_per_s"] = tokens / wall
    generate = [engine for engine in ENGINES if engine.startswith("generate ")]
    _put_ratio(metrics, "parallel_16_over_generate", measured, "W2", generate)
    _put_ratio(metrics, "parallel_16_over_generate_batch", measured, "W2", ["generate_batch"])
    _put_ratio(metrics, "parallel_16_over_llamacpp", measured, "W2", ["llama.cpp"])
    _put_ratio(metrics, "tree_of_thought_over_llamacpp", measured, "W3", ["llama.cpp"])
    _put_ratio(metrics, "mcts_over_llamacpp", measured, "W4", ["llama.cpp"])
    _put_ratio(metrics, "prefill_over_transformers", measured, "prefill", generate)
    _put_step(metrics, measured)
    return metrics


def _put_ratio(
    metrics: dict[str, float], name: str, measured: Measured, workload: str, others: Sequence[str]
) -> None:
    """How much faster ramet is than the best of `others`: the median over turns, taken pair by pair."""
    mine = measured.runs.get((workload, "ramet"), [])
    theirs = [measured.runs[workload, engine] for engine in others if (workload, engine) in measured.runs]
    if not mine or not theirs:
        return
    best = [min(turn[i]["wall"] for turn in theirs if i < len(turn)) for i in range(min(map(len, theirs)))]
    metrics[name] = median(other / own["wall"] for other, own in zip(best, mine, strict=False))


def _put_step(metrics: dict[str, float], measured: Measured) -> None:
    """The step of one row, beside the time to read the weights once, measured in the same process."""
    runs = measured.runs.get(("one_row", "ramet"), [])
    steps = [(r["wall"] - r["ttft"]) / (r["output_tokens"] - 1) for r in runs if r["output_tokens"] > 1]
    if steps and "stream_s" in measured.facts:
        metrics["one_row_step_ms"] = min(steps) * 1e3
        metrics["stream_weights_ms"] = measured.facts["stream_s"] * 1e3
        metrics["step_over_weights"] = min(steps) / measured.facts["stream_s"]


def _set_targets(report: Report) -> None:
    """Only for what was measured: an engine that is absent leaves its targets out."""
    wanted: list[tuple[str, float, float | None]] = [
        ("parallel_16_over_llamacpp", 1.5, 2.5),
        ("parallel_16_over_generate", 4.0, None),
        ("tree_of_thought_over_llamacpp", 1.5, 2.5),
        ("mcts_over_llamacpp", 1.5, 2.5),
        ("prefill_over_transformers", 0.9, None),
    ]
    for name, must, goal in wanted:
        if name in report.metrics:
            report.target(name, ">=", must)
            if goal is not None:
                report.target(name, ">=", goal, "goal")
    if "step_over_weights" in report.metrics:
        report.target("step_over_weights", "<=", 2.2)
        report.target("step_over_weights", "<=", 1.6, "goal")


def _say(line: str) -> None:
    print(f"bench cpu: {line}", file=sys.stderr, flush=True)

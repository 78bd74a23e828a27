"""`ramet bench throughput`: what paging is worth in tokens a second, at the same latency.

The same requests on the same engine and the same small pool, admitted in four ways. For each way the request
rate is searched at which the mean latency for each output token is the same; there, the throughputs compare.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass, field
from statistics import fmean

from rich.table import Table

from ramet.api.bench import Report
from ramet.api.throughput_sim import MAX_LEN, Served, Step, serve, timed, trace
from ramet.engine.admission import Reserve
from ramet.engine.llm import LLM

RESERVES: tuple[Reserve, ...] = ("max", "pow2", "exact", "paged")
# As for OPT-66B in the paper (PagedAttention, table 1), 4 requests of the longest length fit: 9.7K slots for
# 2,048 tokens each, all of it over 8. With OPT-13B's 15.7K, paged admission meets the limit of two cores'
# arithmetic before that of memory.
NUM_BLOCKS, BLOCK_SIZE = 76, 16
_STRIDE = 1.6  # between rates while all of them are on one side of the latency
_SLOWER = 4.0  # the latency at which all are compared, over that of requests that come one by one


@dataclass(frozen=True)
class Settings:
    num_requests: int = 320  # enough that a rate that is too high shows in the latency
    reserves: tuple[Reserve, ...] = RESERVES
    num_searched: int = 4  # rates that are tried for each way, after its capacity is known
    time_s: float = 13 * 60.0


@dataclass
class Measured:
    target: float = 0.0  # seconds for each output token
    mean_output: float = 0.0  # tokens of a request
    alone: float = 0.0
    capacity: dict[Reserve, float] = field(default_factory=dict)  # requests a second, all offered at once
    served: dict[Reserve, list[Served]] = field(default_factory=dict)

    def at_target(self, reserve: Reserve) -> float:
        """Requests a second at the target latency, between the nearest two measured rates."""
        below, above = self.sides(reserve)
        if not below or not above:
            return (below[-1] if below else above[0]).rate
        low, high = below[-1], next((one for one in above if one.rate > below[-1].rate), above[-1])
        span = math.log(high.latency) - math.log(low.latency)
        part = (math.log(self.target) - math.log(low.latency)) / span
        return low.rate + part * (high.rate - low.rate)

    def sides(self, reserve: Reserve) -> tuple[list[Served], list[Served]]:
        """The runs that were as fast as asked, and those that were slower, each by rate."""
        runs = sorted(self.served[reserve], key=lambda one: one.rate)
        fast = [one for one in runs if one.latency <= self.target]
        return fast, [one for one in runs if one.latency > self.target]

    def next_rate(self, reserve: Reserve) -> float:
        """Bisection on the logarithm of the rate, once the target lies between two runs."""
        below, above = self.sides(reserve)
        if not below and not above:
            return self.capacity[reserve]
        if not below or not above:
            return below[-1].rate * _STRIDE if below else above[0].rate / _STRIDE
        return math.sqrt(below[-1].rate * above[0].rate)


def run(settings: Settings | None = None) -> Report:
    """Measure on the embedded model and report."""
    llm = LLM("smollm2", num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=MAX_LEN)
    return report_of(measure(llm, timed(llm), settings or Settings()))


def measure(llm: LLM, step: Step, settings: Settings) -> Measured:
    """`step` runs the engine's step and says how long it took: tests give a model of the cost instead."""
    start = time.monotonic()
    measured = Measured()
    arrivals = trace(settings.num_requests, 1, llm.engine.vocab_size)
    measured.mean_output = fmean(arrival.num_output for arrival in arrivals)
    serve(llm, arrivals[:3], "paged", 1.0, step)  # the first steps are slow
    measured.alone = serve(llm, arrivals[:8], "paged", 1e-6, step).latency
    measured.target = _SLOWER * measured.alone
    _say(f"one by one {measured.alone * 1e3:.0f} ms a token; compared at {measured.target * 1e3:.0f} ms")
    longest = 0.0
    for reserve in settings.reserves:
        at_once = serve(llm, arrivals[: settings.num_requests // 3], reserve, 1e9, step)
        measured.capacity[reserve] = at_once.tokens_per_s / measured.mean_output
        measured.served[reserve] = []
    for turn in range(settings.num_searched):  # in turns, so that a neighbour's load hits all ways
        for reserve in settings.reserves:
            before = time.monotonic()
            if turn and before + longest > start + settings.time_s:
                return measured
            rate = measured.next_rate(reserve)
            found = serve(llm, arrivals, reserve, rate, step)
            measured.served[reserve].append(found)
            longest = max(longest, time.monotonic() - before)
            _say(f"{reserve}: {rate:.2f} requests/s, {found.latency * 1e3:.0f} ms a token")
    return measured


def report_of(measured: Measured) -> Report:
    report = Report("throughput")
    report.metrics["alone_ms_per_token"] = measured.alone * 1e3
    report.metrics["compared_at_ms_per_token"] = measured.target * 1e3
    table = Table(title=f"At {measured.target * 1e3:.0f} ms for each output token", title_justify="left")
    table.add_column("reserved")
    for column in ("requests/s", "tokens/s", "running", "preemptions"):
        table.add_column(column, justify="right")
    for reserve in measured.served:
        rate = measured.at_target(reserve)
        tokens = rate * measured.mean_output  # at a latency that does not grow, as much leaves as comes
        report.metrics[f"{reserve}_requests_per_s"] = rate
        report.metrics[f"{reserve}_tokens_per_s"] = tokens
        report.metrics[f"{reserve}_bracketed"] = float(all(measured.sides(reserve)))
        nearest = min(measured.served[reserve], key=lambda one: abs(one.rate - rate))
        report.metrics[f"{reserve}_mean_running"] = nearest.mean_running
        numbers = (f"{rate:.2f}", f"{tokens:.1f}", f"{nearest.mean_running:.1f}")
        table.add_row(reserve, *numbers, str(nearest.num_preemptions))
    for reserve in [one for one in measured.served if one != "paged"]:
        ratio = report.metrics["paged_tokens_per_s"] / report.metrics[f"{reserve}_tokens_per_s"]
        report.metrics[f"paged_over_{reserve}"] = ratio
    report.tables.append(table)
    report.target("paged_over_max", ">=", 2.0)
    return report


def _say(line: str) -> None:
    print(f"bench throughput: {line}", file=sys.stderr, flush=True)

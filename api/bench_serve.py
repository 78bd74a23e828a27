"""`ramet bench serve`: what HTTP costs, beside the same work through `LLM` in process.

The server is a process of its own, this one is the load; the model has the same number of threads in both,
and they take turns. Requests are streamed, and so timed as a client sees them.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Any

import httpx2
from rich.table import Table

from ramet.api.bench import Report
from ramet.api.client_calls import EventReader
from ramet.api.cpu_sizes import make
from ramet.api.serve_process import serving
from ramet.api.workloads import Call, Request, Samples, Workload, resolve
from ramet.engine.llm import LLM
from ramet.engine.sampling_params import SamplingParams

WORKLOADS = ("W1", "W3", "W4", "W6")
IDLE_BRANCHES = 1000
_SMALL_REQUESTS = 60
_IDLE_TURNS, _IDLE_REQUESTS = 6, 3
_FORKS_AT_ONCE = 125


@dataclass
class Timed:
    """One streamed request, in seconds."""

    first: float = 0.0  # until the first token
    between: list[float] = field(default_factory=list)  # for each later token
    samples: Samples = field(default_factory=list)


def run() -> Report:
    """Measure with the embedded model."""
    report = Report("serve")
    llm = LLM("smollm2", num_blocks=1024)
    with serving("smollm2", "--num-blocks", "1024") as url:
        asyncio.run(measure(report, url, llm, make))
    report.target("overhead_ms_per_request", "<=", 2.0)
    report.target("throughput_over_in_process", ">=", 0.85)
    report.target("idle_branches_step_ratio", "<=", 1.05)
    return report


async def measure(report: Report, url: str, llm: LLM, workload: Callable[[str, int], Workload]) -> None:
    """Fill the report: overhead, throughput, latencies under load, and what idle branches cost."""
    async with httpx2.AsyncClient(base_url=url, timeout=600) as http:
        await _overhead(report, http, llm)
        table = Table(title="The same work over HTTP and in process", title_justify="left")
        for column in ("workload", "in process, tokens/s", "HTTP, tokens/s", "HTTP / in process"):
            table.add_column(column, justify="right")
        ratios = []
        for name in WORKLOADS:
            inside = _in_process(workload(name, 1), llm)
            outside = await _over_http(workload(name, 1), http)
            ratios.append(outside / inside)
            report.metrics[f"{name}_in_process_tokens_per_s"] = inside
            report.metrics[f"{name}_http_tokens_per_s"] = outside
            table.add_row(name, f"{inside:.1f}", f"{outside:.1f}", f"{outside / inside:.2f}")
        report.tables.append(table)
        report.metrics["throughput_over_in_process"] = statistics.geometric_mean(ratios)
        await _open_loop(report, http, [call for seed in range(2, 5) for call in workload("W1", seed)])
        await _idle_branches(report, http)


async def _overhead(report: Report, http: httpx2.AsyncClient, llm: LLM) -> None:
    """The same small request alone, by turns; medians, so that a pause of the machine does not count.

    Over a bare connection: what a client library takes for itself comes beside it, for the one used here.
    """
    prompt = [1] * 16
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    data, headers = json.dumps(body), {"content-type": "application/json"}
    bare = HTTPConnection(http.base_url.host, http.base_url.port)
    inside, outside, library = [], [], []
    for _ in range(_SMALL_REQUESTS):
        start = time.perf_counter()
        llm.generate(prompt, max_tokens=1, temperature=0)
        inside.append(time.perf_counter() - start)
        start = time.perf_counter()
        bare.request("POST", "/v1/completions", data, headers)
        assert "choices" in json.loads(bare.getresponse().read())
        outside.append(time.perf_counter() - start)
        start = time.perf_counter()
        (await http.post("/v1/completions", json=body)).raise_for_status()
        library.append(time.perf_counter() - start)
    bare.close()
    alone, over_http, with_library = (1000 * statistics.median(many) for many in (inside, outside, library))
    report.metrics["small_request_in_process_ms"] = alone
    report.metrics["small_request_http_ms"] = over_http
    report.metrics["overhead_ms_per_request"] = over_http - alone
    report.metrics["overhead_with_httpx_ms_per_request"] = with_library - alone


def _in_process(workload: Workload, llm: LLM) -> float:
    """Tokens a second of a workload, round by round."""

    def engine(requests: list[Request]) -> list[Samples]:
        params = [SamplingParams(**_settings(one.call)) for one in requests]
        outputs = llm.generate([one.prompt for one in requests], params)
        return [[choice.token_ids for choice in output.choices] for output in outputs]

    outputs: dict[int, Samples] = {}
    start = time.perf_counter()
    for calls in workload.rounds:
        requests = [resolve(call, outputs) for call in calls]
        outputs.update(zip((call.uid for call in calls), engine(requests), strict=True))
    return _num_tokens(outputs) / (time.perf_counter() - start)


async def _over_http(workload: Workload, http: httpx2.AsyncClient) -> float:
    outputs: dict[int, Samples] = {}
    start = time.perf_counter()
    for calls in workload.rounds:
        timed = await asyncio.gather(*(_stream(http, resolve(call, outputs)) for call in calls))
        outputs.update({call.uid: one.samples for call, one in zip(calls, timed, strict=True)})
    return _num_tokens(outputs) / (time.perf_counter() - start)


def _settings(call: Call) -> dict[str, Any]:
    return {
        "n": call.n,
        "max_tokens": call.max_tokens,
        "temperature": call.temperature,
        "seed": call.uid,
        "ignore_eos": True,
    }


def _num_tokens(outputs: dict[int, Samples]) -> int:
    return sum(len(tokens) for samples in outputs.values() for tokens in samples)


async def _stream(http: httpx2.AsyncClient, request: Request) -> Timed:
    """One request as a client makes it."""
    body = {"prompt": request.prompt, "stream": True, "return_token_ids": True, **_settings(request.call)}
    timed = Timed(samples=[[] for _ in range(request.call.n)])
    last = start = time.perf_counter()
    reader = EventReader()
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            event = reader.feed(line)
            if event is None:
                continue
            now = time.perf_counter()
            for choice in event["choices"]:
                new = choice["token_ids"]
                timed.samples[choice["index"]] += new
                if not timed.first:
                    timed.first = now - start
                elif choice["index"] == 0 and new:
                    timed.between += [(now - last) / len(new)] * len(new)
                if choice["index"] == 0:
                    last = now
    return timed


async def _open_loop(report: Report, http: httpx2.AsyncClient, calls: Sequence[Call]) -> None:
    """Requests that come by chance, at 70 % of what was reached, whether or not others are done."""
    rate = 0.7 * report.metrics["W1_http_tokens_per_s"] / statistics.mean(call.max_tokens for call in calls)
    rng = random.Random(0)

    async def later(delay: float, call: Call) -> Timed:
        await asyncio.sleep(delay)
        return await _stream(http, resolve(call, {}))

    at = 0.0
    arrivals: list[Awaitable[Timed]] = []
    for call in calls:
        at += rng.expovariate(rate)
        arrivals.append(later(at, call))
    timed = await asyncio.gather(*arrivals)
    table = Table(title=f"Open loop, {rate:.2f} requests a second", title_justify="left")
    for column in ("", "p50, ms", "p99, ms"):
        table.add_column(column, justify="right")
    for name, values in (
        ("ttft", [one.first for one in timed]),
        ("itl", [value for one in timed for value in one.between]),
    ):
        p50, p99 = (1000 * value for value in _percentiles(values))
        report.metrics[f"open_loop_{name}_p50_ms"], report.metrics[f"open_loop_{name}_p99_ms"] = p50, p99
        table.add_row(name, f"{p50:.1f}", f"{p99:.1f}")
    report.tables.append(table)


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


async def _idle_branches(report: Report, http: httpx2.AsyncClient) -> None:
    """The time of a step beside no branch and beside a thousand, by turns; medians."""
    body = {"prompt": [2] * 16, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    seconds: dict[int, list[float]] = {0: [], IDLE_BRANCHES: []}
    for turn in range(2 * _IDLE_TURNS):
        count = IDLE_BRANCHES * (turn % 2)
        async with _idle(http, count):
            for _ in range(_IDLE_REQUESTS):
                start = time.perf_counter()
                (await http.post("/v1/completions", json=body)).raise_for_status()
                seconds[count].append(time.perf_counter() - start)
    with_idle, without = statistics.median(seconds[IDLE_BRANCHES]), statistics.median(seconds[0])
    report.metrics["idle_branches_step_ratio"] = with_idle / without


@asynccontextmanager
async def _idle(http: httpx2.AsyncClient, count: int) -> AsyncIterator[None]:
    """So many forks of a branch, for a while."""
    root = (await http.post("/v1/branches", json={"token_ids": [1] * 33})).raise_for_status().json()
    for done in range(0, count, _FORKS_AT_ONCE):
        n = min(_FORKS_AT_ONCE, count - done)
        (await http.post(f"/v1/branches/{root['id']}/fork", json={"n": n})).raise_for_status()
    yield
    (await http.delete(f"/v1/trees/{root['tree_id']}")).raise_for_status()

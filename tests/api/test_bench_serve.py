"""`ramet bench serve` on a scripted model: every number is there, and means what it says."""

from __future__ import annotations

import asyncio

import httpx2
import pytest

from ramet.api import bench_serve
from ramet.api.bench import Report
from ramet.api.workloads import Workload, build
from tests.api.serving import Serve, make_llm


def tiny(name: str, seed: int) -> Workload:
    return build(name, seed=seed, vocab_size=250, tiny=True)


def test_every_number_is_there(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_serve, "IDLE_BRANCHES", 20)
    monkeypatch.setattr(bench_serve, "_SMALL_REQUESTS", 5)
    llm = make_llm()
    llm.engine.listeners.clear()
    server = serve(llm)
    report = Report("serve")
    asyncio.run(bench_serve.measure(report, server.url, make_llm(), tiny))
    metrics = report.metrics
    assert metrics["overhead_ms_per_request"] == pytest.approx(
        metrics["small_request_http_ms"] - metrics["small_request_in_process_ms"]
    )
    for name in bench_serve.WORKLOADS:
        assert metrics[f"{name}_http_tokens_per_s"] > 0
    assert metrics["throughput_over_in_process"] > 0
    assert 0 < metrics["open_loop_ttft_p50_ms"] <= metrics["open_loop_ttft_p99_ms"]
    assert metrics["open_loop_itl_p50_ms"] > 0
    assert metrics["idle_branches_step_ratio"] > 0
    assert not server.get("/v1/branches").json()["data"]


def test_the_same_tokens_over_http_and_in_process(serve: Serve) -> None:
    server = serve(make_llm())
    outputs: list[object] = []
    keep = bench_serve._num_tokens

    def spy(found: dict[int, list[list[int]]]) -> int:
        outputs.append(found)
        return keep(found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_serve, "_num_tokens", spy)
        bench_serve._in_process(tiny("W3", 1), make_llm())

        async def outside() -> None:
            async with httpx2.AsyncClient(base_url=server.url) as http:
                await bench_serve._over_http(tiny("W3", 1), http)

        asyncio.run(outside())
    assert outputs[0] == outputs[1]


def test_percentiles() -> None:
    assert bench_serve._percentiles([3.0, 1.0, 2.0]) == (2.0, 3.0)
    assert bench_serve._percentiles([float(i) for i in range(1000)]) == (499.5, 990.0)

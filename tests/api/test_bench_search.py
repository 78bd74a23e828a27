"""`ramet bench search`: what must be computed is computed, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from ramet import BeamSearchParams
from ramet.api import bench_search
from ramet.api.bench_search import WAYS, WORKLOADS, Cost, beam_bound, num_fed, report_of
from ramet.api.workloads import BEAM, Request, Workload, build
from tests.conftest import MakeLLM


def small(name: str, seed: int = 1) -> Workload:
    return build(name, seed=seed, vocab_size=512, tiny=True)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", WORKLOADS)
def test_over_branches_the_ideal_is_computed_to_the_token(make_tiny: MakeLLM, name: str, seed: int) -> None:
    workload = small(name, seed)
    for block_size in (4, 16):
        cost = bench_search.measure(make_tiny(num_blocks=512, block_size=block_size), workload, "branches")
        assert cost.prompt_tokens == workload.totals().new_prompt_tokens


def test_without_a_cache_every_prompt_is_computed(make_tiny: MakeLLM) -> None:
    """All of each, but for the tokens that count as sampled: the last one of what a prompt goes on from."""
    for name in ("W2", "W3", "W4", "W8"):
        workload = small(name)
        cost = bench_search.measure(make_tiny(num_blocks=512), workload, "uncached")
        once = num_fed(workload) - sum(call.n * (call.max_tokens - 1) for call in workload)
        assert cost.prompt_tokens == workload.totals().prompt_tokens - once
        cached = bench_search.measure(make_tiny(num_blocks=512), workload, "cached")
        assert workload.totals().new_prompt_tokens <= cached.prompt_tokens <= cost.prompt_tokens


def test_flat_beams_are_beams(make_tiny: MakeLLM) -> None:
    (call,) = small("W9")
    assert call.mode == BEAM
    prompt = list(range(call.prompt_length))
    flat = bench_search.flat_beams(make_tiny(), Request(call, prompt), True)
    params = BeamSearchParams(num_beams=call.n, max_tokens=call.max_tokens, length_penalty=0.0)
    assert flat == [choice.token_ids for choice in make_tiny().generate(prompt, params)[0].choices]


def test_beams_hold_no_more_than_they_must(make_tiny: MakeLLM) -> None:
    (call,) = small("W9")
    # 24 tokens: one full block is shared; each of six beams has the rest of its 30 tokens in one of its own.
    assert beam_bound(call, 16) == 1 + 6 * 1
    # In blocks of four, six are shared, and six tokens more take two blocks.
    assert beam_bound(call, 4) == 6 + 6 * 2
    cost = bench_search.measure(make_tiny(), small("W9"), "branches")
    assert cost.peak_blocks <= beam_bound(call, 16)


def test_the_report_takes_the_worst() -> None:
    workloads = {name: small(name) for name in WORKLOADS}
    ideals = {name: workload.totals().new_prompt_tokens for name, workload in workloads.items()}
    costs = {
        (name, way): Cost(ideals[name] * (3 if way == "uncached" else 1), 99, 0, 5, 1.0)
        for name in WORKLOADS
        for way in WAYS
    }
    report = report_of(costs, workloads)
    assert all(target.met for target in report.targets if target.name != "beam_peak_over_bound")
    costs["W4", "branches"] = Cost(ideals["W4"] + 1, 99, 0, 5, 1.0)
    costs["W3", "branches"] = Cost(ideals["W3"] - 1, 99, 0, 5, 1.0)
    metrics = report_of(costs, workloads).metrics
    assert metrics["prompt_tokens_computed_over_ideal"] == (ideals["W4"] + 1) / ideals["W4"]
    assert metrics["prompt_tokens_computed_under_ideal"] == (ideals["W3"] - 1) / ideals["W3"]
    assert metrics["W3_uncached_prompt_tokens"] == 3 * ideals["W3"]


def test_a_run_reports_every_workload_every_way(tiny_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_search, "VOCAB_SIZE", 512)
    report = bench_search.run(tiny_module, tiny=True)
    assert all(target.met for target in report.targets)
    assert {f"{name}_{way}_wall_s" for name in WORKLOADS for way in WAYS} <= report.metrics.keys()

"""`ramet bench throughput` on a scripted model and a model of the cost of a step."""

from __future__ import annotations

import pytest

from ramet import LLM, SamplingParams
from ramet.api.bench_throughput import Settings, measure, report_of
from ramet.api.throughput_sim import MAX_LEN, Arrival, Step, serve, trace
from ramet.engine.admission import Reserve, num_reserved
from ramet.engine.runs import Generation
from ramet.testing import ScriptedModel, check_invariants


def scripted(num_blocks: int = 123) -> LLM:
    model = ScriptedModel(lambda past: 1)
    llm = LLM(model, num_blocks=num_blocks, block_size=16, max_model_len=MAX_LEN)
    llm.on_step(lambda: check_invariants(llm))
    return llm


def costing(llm: LLM, base: float, a_token: float) -> Step:
    """A step takes `base` seconds and `a_token` for each token that it computes."""

    def step() -> float:
        before = llm.engine.num_computed_tokens
        llm.engine.step()
        return base + a_token * (llm.engine.num_computed_tokens - before)

    return step


def test_one_request_takes_a_step_for_each_token() -> None:
    llm = scripted()
    found = serve(llm, [Arrival(0.0, [1] * 20, 10)], "paged", 1.0, costing(llm, 1.0, 0.0))
    assert (found.latency, found.tokens_per_s) == (1.0, 1.0)
    assert found.mean_running == pytest.approx(0.9), "after the last step nothing runs"


@pytest.mark.parametrize(("reserve", "steps"), [("max", 20), ("pow2", 10), ("exact", 10), ("paged", 10)])
def test_what_does_not_fit_waits(reserve: Reserve, steps: int) -> None:
    """Two requests of 20 + 10 tokens in 256 slots: 29 slots each, 32 as a power of two, or the context."""
    llm = scripted(16)
    arrivals = [Arrival(0.0, [index] * 20, 10) for index in range(2)]
    found = serve(llm, arrivals, reserve, 1.0, costing(llm, 1.0, 0.0))
    assert found.tokens_per_s == pytest.approx(20 / steps)
    assert llm.stats().pages.num_free == 16, "nothing stays cached for the next trace"


@pytest.mark.parametrize(("prompt", "reserved"), [(20, (256, 32, 29)), (120, (256, 256, 129))])
def test_slots_reserved(prompt: int, reserved: tuple[int, int, int]) -> None:
    llm = scripted()
    sequence = llm.engine.new_sequence([1] * prompt, keep=False)
    run = llm.engine.generation(sequence, SamplingParams(max_tokens=10), 0)
    sequence.run = run
    assert isinstance(run, Generation)
    ways: tuple[Reserve, ...] = ("max", "pow2", "exact")
    assert tuple(num_reserved(way, sequence, MAX_LEN) for way in ways) == reserved
    sequence.run = None
    llm.engine.release(sequence)


def test_traces_are_the_same_for_the_same_seed() -> None:
    assert trace(20, 3, 512) == trace(20, 3, 512) != trace(20, 4, 512)
    assert all(len(one.prompt) + one.num_output <= MAX_LEN for one in trace(200, 3, 512))


@pytest.mark.parametrize(
    ("a_token", "num_requests", "bracketed"), [(0.0002, 100, False), (0.0005, 120, True)]
)
def test_paging_wins_where_rows_are_cheap(a_token: float, num_requests: int, bracketed: bool) -> None:
    llm = LLM(ScriptedModel(lambda past: 1), num_blocks=123, block_size=16, max_model_len=MAX_LEN)
    settings = Settings(num_requests=num_requests, num_searched=5, reserves=("max", "paged"))
    report = report_of(measure(llm, costing(llm, 0.03, a_token), settings))
    assert report.metrics["paged_over_max"] > 2
    # Cheap rows take the whole trace at once within the latency: what is reported then is a lower bound.
    assert report.metrics["max_bracketed"] and report.metrics["paged_bracketed"] == bracketed
    assert report.metrics["max_mean_running"] <= 7, "1,968 slots hold seven of 256"
    assert [target.name for target in report.targets] == ["paged_over_max"]

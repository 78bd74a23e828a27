"""`ramet bench cpu`: its sizes, its arithmetic, and one tiny run in a process of its own."""

from __future__ import annotations

import pytest

from ramet.api import bench_cpu, workloads
from ramet.api.bench_cpu import Measured, metrics_of
from ramet.api.cpu_sizes import MAX_ROWS, PROBES, SIZES, VOCAB_SIZE, make


@pytest.mark.parametrize("name", [*SIZES, *PROBES])
def test_sizes_are_cut_to_a_cpu(name: str) -> None:
    workload = make(name, 1)
    totals = workload.totals()
    assert workload.vocab_size == VOCAB_SIZE
    assert totals.most_sequences_at_once <= MAX_ROWS
    assert totals.tree_tokens <= 16_384, "ramet's pool of 1,024 blocks holds all of it"


def test_parallel_sampling_is_as_it_was_asked_for() -> None:
    (call,) = make("W2", 1)
    assert (call.prompt_length, call.n, call.max_tokens) == (512, 16, 64)


def test_no_two_workloads_share_a_prompt() -> None:
    firsts = [next(iter(make(name, 1))).prompt[0] for name in [*SIZES, *PROBES]]
    assert len({text.tokens[:8] for text in firsts if isinstance(text, workloads.Text)}) == len(firsts)


def a_run(wall: float, tokens: int = 100, ttft: float = 0.5) -> dict[str, float]:
    return {"wall": wall, "output_tokens": tokens, "ttft": ttft, "prompt_tokens": 512}


def test_ratios_are_of_pairs_and_against_the_best_of_the_others() -> None:
    measured = Measured(facts={"stream_s": 0.010})
    measured.runs["W2", "ramet"] = [a_run(1.0), a_run(2.0), a_run(1.0)]
    measured.runs["W2", "generate bf16"] = [a_run(9.0), a_run(9.0), a_run(9.0)]
    measured.runs["W2", "generate fp32"] = [a_run(5.0), a_run(12.0), a_run(4.0)]
    measured.runs["one_row", "ramet"] = [a_run(2.5, 101), a_run(2.0, 101)]
    metrics = metrics_of(measured)
    assert metrics["parallel_16_over_generate"] == 4.5, "of 5, 4.5 and 4"
    assert metrics["W2_ramet_tokens_per_s"] == 100
    assert metrics["one_row_step_ms"] == pytest.approx(15.0)
    assert metrics["step_over_weights"] == pytest.approx(1.5)
    assert "parallel_16_over_llamacpp" not in metrics, "it was not there"


@pytest.mark.model
def test_a_tiny_run_and_an_engine_that_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_cpu, "THREADS", 1)
    report = bench_cpu.run(engines=("ramet",), workloads=("W2", "W3", "W5", "one_row"), tiny=True)
    assert report.metrics["W2_ramet_prompt_tokens"] == 64, "computed once for six samples"
    assert report.metrics["W3_ramet_wall"] > 0 and report.metrics["W5_ramet_wall"] > 0
    assert {target.name for target in report.targets} == {"step_over_weights"}

"""`ramet bench beams`: what it measures and holds against a bound."""

from __future__ import annotations

from ramet.api import bench_beams
from ramet.api.bench_beams import Cost, report_of
from ramet.testing import check_idle
from tests.conftest import MakeLLM


def test_it_measures_every_width_and_leaves_nothing(make_tiny: MakeLLM) -> None:
    llm = make_tiny(num_blocks=256)
    report = bench_beams.run(llm, (1, 2, 4), prompt_length=20)
    check_idle(llm)
    for width in (1, 2, 4):
        assert 0 < report.metrics[f"search_ms_{width}"] < report.metrics[f"step_ms_{width}"]
        assert report.metrics[f"copies_a_step_{width}"] <= width - 1
    assert report.metrics["copies_a_step_4"] > 0
    assert len(report.targets) == 2


def test_a_row_may_not_cost_more_in_a_wider_search() -> None:
    linear = {width: Cost(width * 1.0, 0.1 * width, 0.0) for width in bench_beams.WIDTHS}
    assert all(target.met for target in report_of(linear).targets)
    square = {width: Cost(width**1.2, 0.3 * width**1.2, 0.0) for width in bench_beams.WIDTHS}
    assert [target.met for target in report_of(square).targets] == [False, False]

"""The shape of a benchmark's result: targets decide nothing but their own `met`, JSON comes whole."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from rich.table import Table

from ramet.api.bench import Op, Report, Target, show


@pytest.mark.parametrize(
    ("op", "below", "equal", "above"),
    [
        ("<=", True, True, False),
        (">=", False, True, True),
        ("<", True, False, False),
        (">", False, False, True),
    ],
)
def test_a_target_is_met_on_its_side_of_the_bound(op: Op, below: bool, equal: bool, above: bool) -> None:
    assert [Target("x", value, op, 2.0).met for value in (1.0, 2.0, 3.0)] == [below, equal, above]


def test_a_target_takes_its_value_from_the_metric() -> None:
    report = Report("toy", metrics={"speed": 3.5})
    report.target("speed", ">=", 3.0, kind="goal")
    assert report.targets == [Target("speed", 3.5, ">=", 3.0, "goal")]


def test_a_target_without_its_metric_is_a_bug() -> None:
    with pytest.raises(KeyError):
        Report("toy").target("speed", ">=", 3.0)


def toy_report() -> Report:
    table = Table("a column for people")
    report = Report("toy", metrics={"speed": 3.5, "waste": 0.5}, tables=[table])
    report.target("speed", ">=", 3.0)
    report.target("waste", "<", 0.04, kind="goal")
    return report


def test_json_has_the_promised_keys() -> None:
    shown = json.loads(json.dumps(toy_report().to_json()))
    assert set(shown) == {"bench", "metrics", "targets", "versions", "machine"}
    assert shown["bench"] == "toy"
    assert shown["metrics"] == {"speed": 3.5, "waste": 0.5}
    assert shown["targets"] == [
        {"name": "speed", "value": 3.5, "op": ">=", "bound": 3.0, "kind": "must", "met": True},
        {"name": "waste", "value": 0.5, "op": "<", "bound": 0.04, "kind": "goal", "met": False},
    ]
    assert {"python", "ramet"} <= set(shown["versions"])
    assert set(shown["machine"]) == {"system", "cpu", "cores"}


def test_json_is_one_line_on_stdout_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(file=io.StringIO())
    show(toy_report(), as_json=True, console=console)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert json.loads(lines[0])["bench"] == "toy"


def test_people_see_tables_and_targets() -> None:
    out = io.StringIO()
    show(toy_report(), as_json=False, console=Console(file=out, width=100))
    text = out.getvalue()
    assert "a column for people" in text
    speed = next(line for line in text.splitlines() if "speed" in line)
    waste = next(line for line in text.splitlines() if "waste" in line)
    assert "yes" in speed
    assert "no" in waste
    assert "goal" in waste

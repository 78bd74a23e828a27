"""What one engine says about one workload, and the interface that the engines have in common."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol

from ramet.api.workloads import Workload


@dataclass
class Result:
    """One run of one workload; times in seconds, from the first request to the last token."""

    wall: float
    output_tokens: int
    ttft: float | None = None  # of the first request
    prompt_tokens: int | None = None  # that went through the model, recomputed ones included

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Skipped(Exception):
    """The engine does not do this workload, or is not installed; the message says what would help."""


class CpuEngine(Protocol):
    def run(self, workload: Workload) -> Result:
        """Run the whole graph, with sampling at temperature 1 and without ends of text."""
        ...


def check_lengths(workload: Workload, samples: dict[int, list[list[int]]]) -> None:
    """Every engine must have done the work that it is timed for."""
    for call in workload:
        assert [len(tokens) for tokens in samples[call.uid]] == [call.max_tokens] * call.n, "all tokens"

"""What a layer's attention may do beyond causal softmax: a sliding window, a cap on its scores, sinks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """One layer's options. Layers of a model may differ, and a step over the same pages serves them all."""

    window: int | None = None  # a query sees that many tokens at most, itself included
    softcap: float | None = None  # a scaled score s becomes softcap * tanh(s / softcap)
    sinks: torch.Tensor | None = None  # [H]: one more logit a head in the softmax, that has no value

    def __post_init__(self) -> None:
        assert self.window is None or self.window >= 1, "a query sees itself at least"
        assert self.softcap is None or self.softcap > 0, "a cap is a positive number"


PLAIN = AttentionOptions()

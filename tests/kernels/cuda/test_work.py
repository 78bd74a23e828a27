"""The planner of a pool on a GPU."""

from __future__ import annotations

import pytest
import torch

from ramet.kernels.cuda import planning
from ramet.kernels.cuda.planner import GPUPlanner
from ramet.kernels.cuda.work import MIN_SHARED_TOKENS_SAVED, planner
from ramet.kernels.kv_pool import KVPool


def test_the_planner_keeps_segments_that_save_a_chunk(device: str) -> None:
    made = planner(KVPool(1, 4, 1, 16, 16, torch.float32, device, "block-major"))
    assert isinstance(made, GPUPlanner)
    assert made.block_size == 16
    assert made.min_shared_tokens_saved == MIN_SHARED_TOKENS_SAVED


def test_a_missing_compiler_is_known_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    def missing() -> None:
        raise RuntimeError("no C compiler found")

    monkeypatch.setattr(planning, "library", missing)
    with pytest.raises(RuntimeError, match="no C compiler"):
        planner(KVPool(1, 4, 1, 16, 16, torch.float32, device, "block-major"))

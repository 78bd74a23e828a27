"""Turns a step into tensors and runs the model on it. It knows blocks by id only, and no tree."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ramet.engine.models import LoadedModel
from ramet.engine.step import Row, Step
from ramet.kernels import attention
from ramet.kernels.kv_pool import KVPool
from ramet.radix.prefix_cache import Copy


class Runner(Protocol):
    """What computes the steps. Tests put a scripted one in the place of a model."""

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Copy blocks over all layers, ordered before the writes of the next forward."""
        ...

    def forward(self, step: Step) -> Tensor:
        """Logits [R, V] of the tokens that want them, row after row."""
        ...


class ModelRunner:
    """A loaded model over a pool of pages."""

    def __init__(self, model: LoadedModel, pool: KVPool) -> None:
        self.model = model
        self.pool = pool
        self._planner = attention.planner(pool)

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        # See LoadedModel.forward.
        with torch.cuda.device_of(self.pool.storage):  # type: ignore[no-untyped-call]
            self.pool.copy_blocks(copies)

    def forward(self, step: Step) -> Tensor:
        """Write the step's K and V into the pages and return the logits that it wants [R, V]."""
        rows = step.rows
        plan = self._planner.plan(
            [row.block_ids for row in rows],
            query_lens=[len(row.token_ids) for row in rows],
            kv_lens=[row.start + len(row.token_ids) for row in rows],
            num_shared_blocks=step.num_shared_blocks,
        )
        slots = np.concatenate([self._slots(row) for row in rows])  # [T]
        prepared = attention.prepare(self.pool, plan, slots)
        positions = np.concatenate([np.arange(row.start, row.start + len(row.token_ids)) for row in rows])
        device = self.model.device
        return self.model.forward(
            torch.tensor([token for row in rows for token in row.token_ids], device=device),  # [T]
            torch.from_numpy(positions).to(device),  # [T]
            torch.tensor(_logit_indices(rows), dtype=torch.int64, device=device),  # [R]
            partial(attention.attend, prepared),
        )

    def _slots(self, row: Row) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Where each token of a row is written [len(token_ids)], -1 for those that are not."""
        size = self.pool.block_size
        num_tokens = len(row.token_ids)
        slots = np.full(num_tokens, -1, dtype=np.int64)
        if row.num_written:
            first = num_tokens - row.num_written
            positions = np.arange(row.start + first, row.start + num_tokens)
            blocks = np.asarray(row.block_ids[positions[0] // size :], dtype=np.int64)
            slots[first:] = blocks[positions // size - positions[0] // size] * size + positions % size
        return slots


def _logit_indices(rows: Sequence[Row]) -> list[int]:
    """Which of the flat tokens of a step want logits."""
    indices: list[int] = []
    end = 0
    for row in rows:
        end += len(row.token_ids)
        indices.extend(range(end - row.num_logits, end))
    return indices

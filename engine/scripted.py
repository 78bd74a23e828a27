"""A model for tests: its next-token logits are a Python function of the token list.

It keeps tokens in the place of KV and reads each sequence's past back through its block table, so that a
wrong page, a missing copy or a write into a shared block changes what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ramet.engine.step import Step
from ramet.radix.prefix_cache import Copy

Logits = Mapping[int, float] | Sequence[float] | int


@dataclass(frozen=True)
class ScriptedModel:
    """`next_token(token_ids)` gives the logits after a list of tokens: a whole row, a few by token id (the
    others are -inf), or the id of the one token that must come."""

    next_token: Callable[[list[int]], Logits]
    vocab_size: int = 512
    eos_token_ids: frozenset[int] = frozenset()


class ScriptedRunner:
    """Runs a ScriptedModel over pages that hold token ids."""

    def __init__(self, model: ScriptedModel, num_blocks: int, block_size: int) -> None:
        self.model = model
        self.block_size = block_size
        self.pages = np.full((num_blocks, block_size), -1, dtype=np.int64)  # [N, B]

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        for source, target, num_slots in copies:
            self.pages[target, :num_slots] = self.pages[source, :num_slots]
            self.pages[target, num_slots:] = -1

    def forward(self, step: Step) -> Tensor:
        """Write the step's tokens into their pages, then say what comes after each that asks: [R, V]."""
        size = self.block_size
        for row in step.rows:
            first = len(row.token_ids) - row.num_written
            for offset in range(first, len(row.token_ids)):
                position = row.start + offset
                self.pages[row.block_ids[position // size], position % size] = row.token_ids[offset]
        rows = [
            self._logits(self._past(row.block_ids, row.start + offset + 1))
            for row in step.rows
            for offset in range(len(row.token_ids) - row.num_logits, len(row.token_ids))
        ]
        return torch.stack(rows) if rows else torch.empty(0, self.model.vocab_size)

    def _past(self, block_ids: list[int], length: int) -> list[int]:
        past: list[int] = self.pages[block_ids].ravel()[:length].tolist()
        assert -1 not in past, "a sequence reads a slot that was never written"
        return past

    def _logits(self, past: list[int]) -> Tensor:
        said = self.model.next_token(past)
        if isinstance(said, int):
            said = {said: 0.0}
        if isinstance(said, Mapping):
            row = torch.full((self.model.vocab_size,), -torch.inf)
            for token_id, logit in said.items():
                row[token_id] = logit
            return row
        return torch.tensor(said, dtype=torch.float32)

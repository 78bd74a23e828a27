"""What the device is told: the plain data of a step, between deciding (scheduler) and computing (runner)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """The part of one sequence that a step computes.

    Its tokens sit at positions start, start + 1, ... and see everything before them. The first
    `len(token_ids) - num_written` are *query-only*: their KV exists, so they write none; they are there
    because their logits are wanted. Logits are wanted for the last `num_logits` tokens.
    """

    token_ids: list[int]
    start: int
    num_written: int
    num_logits: int
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class Step:
    """Rows in depth-first order of the tree.

    `num_shared_blocks[i]` leading blocks of row i are those of row i - 1 as well (0 for the first row).
    """

    rows: list[Row]
    num_shared_blocks: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)

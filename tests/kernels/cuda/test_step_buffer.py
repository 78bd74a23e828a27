"""Sections at addresses that stay, until a step needs more."""

from __future__ import annotations

import numpy as np
import torch

from ramet.kernels.cuda.step_buffer import SIZES, SLACK, StepBuffer
from ramet.kernels.cuda.work import DecodeWork
from ramet.kernels.cuda.workspace import Workspace
from ramet.kernels.kv_pool import KVPool
from ramet.kernels.plan import Planner


def sections(buffer: StepBuffer) -> list[torch.Tensor]:
    lists = buffer.tokens, buffer.part_starts, buffer.merges, buffer.narrow_items, buffer.wide_items
    return [*lists, buffer.kv_lens, buffer.block_ids]


def test_sections_lie_side_by_side(device: str) -> None:
    buffer = StepBuffer(torch.device(device))
    first = buffer.tokens.data_ptr()
    for section, start, size in zip(sections(buffer), buffer.starts, SIZES, strict=False):
        assert section.data_ptr() == first + 4 * start and len(section) == size
        assert section.data_ptr() % 16 == 0, "kernels may load four numbers at once"


def test_what_is_too_small_is_doubled_at_least(device: str) -> None:
    small = StepBuffer(torch.device(device))
    needed = [SIZES[0] + 1, 10 * SIZES[1] + 1, *SIZES[2:]]
    grown = small.grown(needed)
    assert grown.sizes == [2 * SIZES[0], 10 * SIZES[1] + 64, *SIZES[2:]]
    assert [len(section) for section in sections(grown)] == grown.sizes


def test_ids_may_be_read_past_the_end(device: str) -> None:
    buffer = StepBuffer(torch.device(device))
    behind = buffer.block_ids.untyped_storage().nbytes() // 4 - buffer.starts[-1]
    assert behind == SLACK


def test_addresses_stay_while_steps_fit(device: str) -> None:
    """A captured graph holds on to them. There is room for 64 rows at first."""
    pool = KVPool(1, 1024, 1, 16, 16, torch.float32, device, "block-major")
    workspace = Workspace(pool, 2)
    addresses = []
    for num_rows in (3, 60, 200, 3, 255):
        tables = [[4 * row, 4 * row + 1, 4 * row + 2] for row in range(num_rows)]
        plan = Planner(16).plan(tables, [1] * num_rows, [40] * num_rows, [0] * num_rows)
        work = DecodeWork(plan, np.arange(num_rows), workspace)
        buffer = workspace.buffer
        addresses.append([section.data_ptr() for section in sections(buffer)])
        assert buffer.kv_lens[:num_rows].tolist() == [40] * num_rows
        assert work.list.num_narrow == num_rows
        items = buffer.narrow_items[: 8 * num_rows].view(-1, 8).tolist()
        ids = buffer.block_ids.tolist()
        assert [ids[item[2] : item[2] + 3] for item in items] == tables
    assert addresses[0] == addresses[1] != addresses[2]
    assert addresses[2] == addresses[3] == addresses[4]

"""The Triton kernels, on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

if TYPE_CHECKING:
    from ramet.kernels.cuda.work import DecodeWork
    from ramet.kernels.plan import AttentionPlan

# Triton is there for Linux only.
collect_ignore_glob = [] if find_spec("triton") else ["test_*"]


@pytest.fixture(scope="session")
def device() -> str:
    """Triton's own device: there is no second one to hold it against."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _check_work(work: DecodeWork, plan: AttentionPlan) -> None:
    """Each key of each row is read once, by the right ids, and each part merged once."""
    lists, buffer, size = work.list, work.workspace.buffer, plan.block_size
    rows = np.flatnonzero(plan.query_lens == 1)
    lens, tokens, tables = plan.kv_lens[rows].tolist(), plan.query_starts[rows].tolist(), plan.block_tables
    assert buffer.kv_lens[: len(rows)].tolist() == lens and buffer.tokens[: len(rows)].tolist() == tokens
    ids = buffer.block_ids.tolist()
    read: list[list[tuple[int, int, int]]] = [[] for _ in rows]  # start, stop and part
    narrow = buffer.narrow_items, lists.num_narrow, lists.narrow_tile
    for section, num_items, tile in narrow, (buffer.wide_items, lists.num_wide, lists.wide_tile):
        items = section.view(-1, 8).tolist()
        assert not any(num_rows for _, num_rows, *_ in items[num_items:]), "the rest are without rows"
        for row0, num_rows, first_id, start, num_tokens, part, is_whole, _ in items[:num_items]:
            assert 1 <= num_rows <= tile.rows // work.workspace.group
            assert num_tokens > 0 or num_rows == 1, "only a row's own end is open"
            for row in range(row0, row0 + num_rows):
                stop = lens[row] if num_tokens < 0 else start + num_tokens
                read[row].append((start, stop, -1 if is_whole else part))
                used = list(tables[rows[row]][start // size : -(-stop // size)])
                assert ids[first_id : first_id + len(used)] == used
    assert len(buffer.narrow_items) > 8 * lists.num_narrow, "an item without rows ends them"
    merges, first_part = [], 0
    for row, stretches in enumerate(map(sorted, read)):
        assert [0, *(stop for _, stop, _ in stretches)] == [*(start for start, *_ in stretches), lens[row]]
        parts = [part for *_, part in stretches]
        assert buffer.part_starts[row] == first_part
        if parts != [-1]:
            assert parts == list(range(len(parts)))
            merges.append([tokens[row], first_part, len(parts)])
            first_part += len(parts)
    found = buffer.merges.view(-1, 4)[:, :3].tolist()
    assert found[: lists.num_merges] == merges and not any(n for *_, n in found[lists.num_merges :])
    assert lists.num_parts == first_part and lists.most_parts == max((n for *_, n in merges), default=0)
    assert first_part * work.workspace.num_heads <= len(work.workspace.part_lse)


@pytest.fixture(scope="session")
def check_work() -> Callable[[DecodeWork, AttentionPlan], None]:
    return _check_work

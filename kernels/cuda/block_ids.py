"""The block ids of a work list's segments on the device: all with a new list, then what a step may change."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import TYPE_CHECKING

import numpy as np
import torch

from ramet.kernels.cuda.upload import Upload, int32s
from ramet.kernels.plan import IntArray

if TYPE_CHECKING:
    from ramet.kernels.cuda.work_list import WorkList

Tables = Sequence[Sequence[int]]


class BlockIds:
    """The ids of each segment side by side, in the room that its list gave it.

    As long as list and tables are the same objects, a table has changed from its last block on only (see
    AttentionPlan): that may be a copy now, and a block may have joined it. So one or two ids a row are looked
    at, and sent if they are others.
    """

    def __init__(self, device: torch.device) -> None:
        self._upload = Upload(device, 1 << 16)
        # Of the last step:
        self._list: WorkList | None = None
        self._tables: Tables = ()
        self._ends = np.zeros(0, dtype=np.int64)  # [R], how many blocks of its table a row used

    @property
    def tensor(self) -> torch.Tensor:
        return self._upload.tensor

    def forget(self) -> None:
        """Send all again: a step went by without these rows, which may have changed by more than a block."""
        self._list = None

    def send(self, work_list: WorkList, tables: Tables, kv_lens: IntArray) -> None:
        """Send what the device lacks. The tables and lengths [R] are those of the list's rows."""
        ends = -(-kv_lens // work_list.block_size)
        is_next = work_list is self._list and all(map(is_, tables, self._tables))
        if is_next and (ends - self._ends).max() <= 1:
            self._send_changes(work_list, tables, ends)
        else:
            self._send_all(work_list, tables, ends)
        self._list, self._tables, self._ends = work_list, list(tables), ends

    def _send_changes(self, work_list: WorkList, tables: Tables, ends: IntArray) -> None:
        """The last block of each row, and where there is a new one, the one before it as well."""
        last = ends - 1
        places = work_list.id_places + last
        ids = [table[block] for table, block in zip(tables, last.tolist(), strict=True)]
        grown = np.flatnonzero(ends > self._ends)
        if len(grown):
            before = last[grown] - 1
            ids += [tables[row][block] for row, block in zip(grown.tolist(), before.tolist(), strict=True)]
            places = np.concatenate((places, work_list.id_places[grown] + before))
        self._upload.change(places, ids)

    def _send_all(self, work_list: WorkList, tables: Tables, ends: IntArray) -> None:
        segments = work_list.segments
        block0 = segments.start // work_list.block_size
        room = block0 + work_list.num_blocks
        stops = room.copy()
        stops[segments.num_shared :] = ends[segments.private_rows]
        rows, spare = segments.row0.tolist(), (room - stops).tolist()
        ids: list[int] = []
        for row, start, stop, num_spare in zip(rows, block0.tolist(), stops.tolist(), spare, strict=True):
            ids += tables[row][start:stop]
            ids += (0,) * num_spare
        ids += [tables[row][ends[row] - 1] for row in work_list.closed_rows.tolist()]
        self._upload.send(int32s(ids))

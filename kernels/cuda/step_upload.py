"""What changes with every token, on the device: how long rows are, and the block ids of their segments.

One copy a step. All ids are sent with a new list, then only what a step may change.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem, is_
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from ramet.kernels.cuda.upload import Upload, int32s
from ramet.kernels.plan import IntArray

if TYPE_CHECKING:
    from ramet.kernels.cuda.work_list import WorkList

Tables = Sequence[Sequence[int]]


class StepUpload:
    """The lengths of rows, and behind them the ids of each segment, in the room that its list gave it.

    As long as list and tables are the same objects, a table has changed from its last block on only (see
    AttentionPlan): that may be a copy now, and a block may have joined it. So one or two ids a row are looked
    at, and sent if they are others.
    """

    def __init__(self, device: torch.device) -> None:
        self._upload = Upload(device, 1 << 16)
        self._num_lens = 1024  # the room for lengths: block ids begin there
        # Of the last step:
        self._sent = np.zeros(0, dtype=np.int32)
        self._list: WorkList | None = None
        self._tables: Tables = ()
        self._ends = np.zeros(0, dtype=np.int64)  # [R], how many blocks of its table a row used
        self._last: list[int] = []  # [R], the last of them, and its id
        self._last_ids: list[int] = []
        self._places: list[int] = []  # [R], where block 0 of a row's table would lie
        self._split()

    def _split(self) -> None:
        tensor = self._upload.tensor
        self.kv_lens, self.block_ids = tensor[: self._num_lens], tensor[self._num_lens :]

    def forget(self) -> None:
        """Send all again: a step went by without these rows, which may have changed by more than a block."""
        self._list = None

    def send(self, work_list: WorkList, tables: Tables, kv_lens: IntArray) -> None:
        """Send what the device lacks. The tables and lengths [R] are those of the list's rows."""
        ends = -(-kv_lens // work_list.block_size)
        known, self._list = self._list, None  # an interrupt in between would leave host and device apart
        is_next = work_list is known and all(map(is_, tables, self._tables))
        grown = ends - self._ends if is_next else ends
        stop = len(kv_lens)
        if not is_next or grown.max() > 1:
            self._sent = self._all(work_list, tables, ends)
            stop = len(self._sent)
        elif self._change(tables, ends, grown):
            stop = len(self._sent)
        self._sent[: len(kv_lens)] = kv_lens
        self._upload.send(self._sent[:stop])
        self._ends = ends
        if not is_next:
            self._split()
            self._tables = list(tables)
        self._list = work_list

    def _change(self, tables: Tables, ends: IntArray, grown: IntArray) -> bool:
        """Set the last block of each row, and where there is a new one, the one before it as well.

        Returns whether any is another one now.
        """
        (rows,) = grown.nonzero()
        for row, end in zip(rows.tolist(), ends[rows].tolist(), strict=True):
            table, place = tables[row], self._places[row] + end
            self._sent[place - 1] = self._last_ids[row] = table[end - 1]
            self._last[row] = end - 1
            if grown[row] > 0:
                self._sent[place - 2] = table[end - 2]
        ids = list(map(getitem, tables, self._last))
        copied = ids != self._last_ids
        if copied:
            self._sent[np.add(self._places, self._last)] = self._last_ids = ids
        return copied or len(rows) > 0

    def _all(self, work_list: WorkList, tables: Tables, ends: IntArray) -> npt.NDArray[np.int32]:
        """All ids, behind room for the lengths."""
        segments = work_list.segments
        block0 = segments.start // work_list.block_size
        room = block0 + work_list.num_blocks
        stops = room.copy()
        stops[segments.num_shared :] = ends[segments.private_rows]
        rows, spare = segments.row0.tolist(), (room - stops).tolist()
        self._num_lens = max(self._num_lens, 1 << (len(ends) - 1).bit_length())
        self._places = (work_list.id_places + self._num_lens).tolist()
        self._last = (ends - 1).tolist()
        self._last_ids = list(map(getitem, tables, self._last))
        ids = [0] * self._num_lens
        for row, start, stop, num_spare in zip(rows, block0.tolist(), stops.tolist(), spare, strict=True):
            ids += tables[row][start:stop]
            ids += (0,) * num_spare
        return int32s(ids).copy()

"""The numbers that a step's kernels read, on the device: its lists, block ids and lengths."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import torch

SLACK = 256  # numbers that a kernel may read past the end, without following them
# Numbers in the sections at first: tokens, part_starts, merges, narrow and wide items, kv_lens, block_ids.
# What every step changes stands last, so that one copy of consecutive numbers does, whatever has changed.
SIZES = (64, 64, 256, 1024, 256, 64, 4096)
KV_LENS, BLOCK_IDS = 5, 6


class _Buffer(ctypes.Structure):
    """`Buffer` of csrc/lists.h."""

    _fields_ = (("numbers", ctypes.c_void_p), ("starts", ctypes.c_int64 * (len(SIZES) + 1)))


class StepBuffer:
    """An int32 buffer in sections of fixed size, on host and device."""

    def __init__(self, device: torch.device, sizes: Sequence[int] = SIZES) -> None:
        self.sizes = sizes
        self.starts = [0, *accumulate(sizes)]
        self._host = torch.zeros(self.starts[-1], dtype=torch.int32)
        self._device = torch.zeros(self.starts[-1] + SLACK, dtype=torch.int32, device=device)
        self._for_c = _Buffer(self._host.data_ptr(), (ctypes.c_int64 * len(self.starts))(*self.starts))
        self.address = ctypes.addressof(self._for_c)
        sections = self._device.split([*sizes, SLACK])
        self.tokens, self.part_starts, self.merges, self.narrow_items, self.wide_items = sections[:5]
        self.kv_lens, self.block_ids = sections[5:7]

    def grown(self, needed: Sequence[int]) -> StepBuffer:
        """An empty buffer with so much room in each section; twice as much where there is too little."""
        pairs = zip(needed, self.sizes, strict=True)
        sizes = [size if n <= size else max(2 * size, -(-n // 64) * 64) for n, size in pairs]
        return StepBuffer(self._device.device, sizes)

    def send(self, start: int, stop: int) -> None:
        """Copy numbers [start, stop) to the device, ordered before the launches that follow."""
        # Not from page-locked memory: the driver has its own copy then when it returns, and is faster.
        self._device[start:stop].copy_(self._host[start:stop], non_blocking=True)

"""The buffers that steps share: work lists, block ids and partial results, at addresses that stay.

A captured CUDA graph holds on to addresses, so a step that fits allocates nothing. A buffer that a step
outgrows is replaced by one of at least twice the size.
"""

from __future__ import annotations

from functools import cached_property

import torch

from ramet.kernels.cuda.step_buffer import StepBuffer
from ramet.kernels.cuda.tile import Tiles
from ramet.kernels.cuda.work_list import WorkLists
from ramet.kernels.kv_pool import KVPool

ASSUMED_SMS = 132  # where there is no card: work lists made in tests


class Workspace:
    """What the steps over one pool need with `num_heads` query heads."""

    def __init__(self, pool: KVPool, num_heads: int) -> None:
        assert num_heads % pool.num_kv_heads == 0, "the query heads do not divide among the KV heads"
        assert pool.block_size & (pool.block_size - 1) == 0, "on a GPU a block holds a power of two of slots"
        self.pool = pool
        self.num_heads = num_heads
        self.group = num_heads // pool.num_kv_heads
        device = pool.device
        self.num_sms, capability = ASSUMED_SMS, (9, 0)
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self.num_sms = properties.multi_processor_count
            capability = properties.major, properties.minor
        self.tiles = Tiles(self.group, pool.head_dim, pool.dtype, capability)
        # Programmatic dependent launch came with Hopper.
        self.can_overlap = device.type == "cuda" and capability >= (9, 0)
        self.buffer = StepBuffer(device)
        self.part_out = torch.empty((1, pool.head_dim), dtype=torch.float32, device=device)  # [P*H, D]
        self.part_lse = torch.empty(1, dtype=torch.float32, device=device)  # [P*H]

    @cached_property
    def lists(self) -> WorkLists:
        """The lists of decode steps."""
        return WorkLists(self)

    def reserve_parts(self, num_parts: int) -> None:
        """Make room for `num_parts` partial results of all query heads."""
        numel = num_parts * self.num_heads
        if numel > len(self.part_lse):
            numel = max(numel, 2 * len(self.part_lse))
            self.part_out = self.part_out.new_empty((numel, self.pool.head_dim))
            self.part_lse = self.part_lse.new_empty(numel)

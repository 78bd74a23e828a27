"""The memory of the KV cache: one allocation for K and V of all layers and blocks, made once.

It knows slots and blocks, never tokens or branches: what is stored where is decided above.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch

Layout: TypeAlias = Literal["head-major", "block-major"]

GATHER_BYTES = 4 << 20  # about two L2 caches of a core: what is gathered is still near when it is read


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, not empty: a slot that nobody wrote yet must hold a finite number.

    On the CPU they come from the operating system, which hands out pages as they are first written;
    torch.zeros would touch gigabytes before the first request. Small pages on purpose, not numpy's huge ones:
    a block lies in as many places as there are layers and heads, and clearing 2 MB at each took a second.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(raw, dtype=dtype).view(shape)


class KVPool:
    """K and V in one allocation, seen as [num_layers, 2, Hkv, N, B, D] whatever its layout.

    head-major, for the CPU: memory is in the order of that shape. All slots of one KV head lie side by side,
    so the gather of any set of slots is one index_select for K and V of all heads, and what it yields is
    dense for the attention kernel.

    block-major, for a GPU: memory is [N, num_layers, 2, Hkv, B, D]. A block over all layers is one stretch,
    so copying it, or moving it to the host, is one transfer; a block of one head of one layer is dense as
    well, which is all that the kernels ask for. Only those of ramet.kernels.cuda write and read it.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        layout: Layout | None = None,
    ) -> None:
        """`layout` None is the device's own; a block-major pool on the CPU is for Triton's interpreter."""
        assert min(num_layers, num_blocks, num_kv_heads, head_dim, block_size) > 0, "a pool holds something"
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.block_size = block_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.layout: Layout = layout or ("head-major" if self.device.type == "cpu" else "block-major")
        if self.layout == "head-major":
            shape = (num_layers, 2, num_kv_heads, num_blocks, block_size, head_dim)
            self.storage = _zeros(shape, dtype, self.device)
            self._make_slot_views()
            self._make_gather_buffers()
        else:
            shape = (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
            self.storage = _zeros(shape, dtype, self.device).permute(1, 2, 3, 0, 4, 5)
        self.workspaces: dict[int, object] = {}  # what the GPU's kernels keep, by the number of query heads
        self.data_ptr = self.storage.data_ptr()
        # Views are made once; making one costs as much as a small operation, and each layer needs some.
        self._keys = list(self.storage.select(1, 0).unbind(0))  # each [Hkv, N, B, D]
        self._values = list(self.storage.select(1, 1).unbind(0))  # each [Hkv, N, B, D]

    def _make_slot_views(self) -> None:
        num_slots = self.num_blocks * self.block_size
        by_slot = self.storage.view(self.num_layers, 2, self.num_kv_heads, num_slots, self.head_dim)
        self._key_slots = list(by_slot.select(1, 0).unbind(0))  # each [Hkv, N*B, D]
        self._value_slots = list(by_slot.select(1, 1).unbind(0))  # each [Hkv, N*B, D]
        self._slots = list(by_slot.flatten(1, 2).unbind(0))  # each [2*Hkv, N*B, D]
        by_block = self.storage.view(self.num_layers, 2 * self.num_kv_heads, self.num_blocks, -1)
        self._blocks = list(by_block.unbind(0))  # each [2*Hkv, N, B*D]
        self._all_blocks = by_block.flatten(0, 1)  # [num_layers*2*Hkv, N, B*D]

    def _make_gather_buffers(self) -> None:
        """The room that gathered K and V pass through, made here so that no step allocates it."""
        self.max_gather_slots, self.gather_buffer = self._gather_buffer(self.dtype)
        self.max_widened_slots, self.widened_buffer = self.max_gather_slots, self.gather_buffer
        if self.dtype != torch.float32:
            self.max_widened_slots, self.widened_buffer = self._gather_buffer(torch.float32)

    def _gather_buffer(self, dtype: torch.dtype) -> tuple[int, torch.Tensor]:
        """Room for a whole number of blocks of one layer: how many slots, and the buffer, flat."""
        slot_numel = 2 * self.num_kv_heads * self.head_dim
        num_blocks = max(GATHER_BYTES // (slot_numel * dtype.itemsize * self.block_size), 1)
        num_slots = num_blocks * self.block_size
        return num_slots, torch.empty(num_slots * slot_numel, dtype=dtype, device=self.device)

    @staticmethod
    def block_nbytes(
        num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
    ) -> int:
        """The bytes of one block over all layers, K and V: what a pool of N blocks costs, divided by N."""
        return num_layers * 2 * num_kv_heads * block_size * head_dim * dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        return self.block_nbytes(
            self.num_layers, self.num_kv_heads, self.head_dim, self.block_size, self.dtype
        )

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    def key(self, layer: int) -> torch.Tensor:
        """K of a layer [Hkv, N, B, D], a view; its strides are those of V."""
        return self._keys[layer]

    def value(self, layer: int) -> torch.Tensor:
        """V of a layer [Hkv, N, B, D], a view."""
        return self._values[layer]

    def slots(self, layer: int) -> torch.Tensor:
        """K, then V, of a layer by slot [2*Hkv, N*B, D], a view; head-major only."""
        return self._slots[layer]

    def blocks(self, layer: int) -> torch.Tensor:
        """K, then V, of a layer by block [2*Hkv, N, B*D], a view; head-major only."""
        return self._blocks[layer]

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k, v [T, Hkv, D] at `slots` [T] int64. No slot is named twice.

        A block-major pool skips tokens whose slot is negative; a head-major one takes none.
        """
        if self.layout == "block-major":
            from ramet.kernels.cuda.store import store

            store(self.key(layer), self.value(layer), slots, k, v)
            return
        self._key_slots[layer].index_copy_(1, slots, k.transpose(0, 1))
        self._value_slots[layer].index_copy_(1, slots, v.transpose(0, 1))

    def copy_blocks(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy blocks over all layers, K and V; a copy is (source, destination, slots filled in the source).

        Slots past the filled ones hold what no row reads: a head-major pool copies them as well, which is
        fewer operations, a block-major one does not, which is fewer bytes.
        """
        if not copies:
            return
        sources = [source for source, _, _ in copies]
        destinations = [destination for _, destination, _ in copies]
        assert len(set(destinations)) == len(destinations), "two copies write one block"
        assert not set(sources) & set(destinations), "a block is read and written by one batch of copies"
        assert all(0 <= n <= self.block_size for _, _, n in copies), "a copy fills more than a block"
        if self.layout == "block-major":
            from ramet.kernels.cuda.copy_blocks import copy_blocks

            table = torch.tensor(copies, dtype=torch.int32).to(self.device, non_blocking=True)  # [C, 3]
            copy_blocks(self.storage, table)
            return
        source_ids = torch.tensor(sources, dtype=torch.int64)
        destination_ids = torch.tensor(destinations, dtype=torch.int64)
        self._all_blocks.index_copy_(1, destination_ids, self._all_blocks.index_select(1, source_ids))

    def check(self) -> None:
        """Assert that the pool still is the one allocation that it was made with."""
        assert self.storage.data_ptr() == self.data_ptr, "the pool moved"
        assert self.storage.untyped_storage().nbytes() == self.nbytes, "the pool is more than one allocation"

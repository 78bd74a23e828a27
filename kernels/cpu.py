"""Attention on the CPU: gather a stretch of KV, run torch's flash kernel on it, merge by log-sum-exp.

There is one path: rows that share nothing are a work list without shared items.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ramet.kernels.cpu_work import WorkItem, work_list
from ramet.kernels.kv_pool import KVPool
from ramet.kernels.merge import merge_
from ramet.kernels.plan import AttentionPlan

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Attended(NamedTuple):
    out: torch.Tensor  # [T, H, D], of the dtype of q
    lse: torch.Tensor  # [T, H], fp32, natural logarithm


class _Item(NamedTuple):
    """A work item with its views of the gather buffers, for one number of heads."""

    work: WorkItem
    gathered: torch.Tensor  # [2*Hkv, K/B, B*D] or [2*Hkv, R*K, D]
    widened: torch.Tensor | None  # the same in fp32, or None where the kernel reads `gathered`
    key: torch.Tensor  # [R or G, Hkv, slots, D]
    value: torch.Tensor  # the same
    mask: torch.Tensor | None  # [R, 1, 1, K]


class CPUAttention:
    """One step's attention over one pool: prepared once, then called by each layer."""

    def __init__(self, plan: AttentionPlan, pool: KVPool) -> None:
        assert pool.dtype in (torch.float32, torch.bfloat16, torch.float16), f"no CPU path for {pool.dtype}"
        self.pool = pool
        self.num_tokens = plan.num_tokens
        self.work = work_list(plan, pool)
        self._num_heads = 0  # known at the first call

    def _bind(self, num_heads: int) -> None:
        """Make what depends on the number of query heads: the views of the buffers, and masks."""
        pool = self.pool
        assert num_heads % pool.num_kv_heads == 0, "the query heads do not divide among the KV heads"
        self._num_heads = num_heads
        self._group = num_heads // pool.num_kv_heads
        self._items = [self._bind_item(work) for work in self.work.items]
        self._packs = any(work.num_queries > 1 and not work.causal for work in self.work.items)

    def _bind_item(self, work: WorkItem) -> _Item:
        pool, group = self.pool, self._group
        num_slots = work.num_stretches * work.num_gathered
        if work.num_stretches == 1:
            shape = (2 * pool.num_kv_heads, num_slots // pool.block_size, pool.block_size * pool.head_dim)
        else:
            shape = (2 * pool.num_kv_heads, num_slots, pool.head_dim)
        numel = 2 * pool.num_kv_heads * num_slots * pool.head_dim
        gathered = pool.gather_buffer[:numel].view(shape)
        widened = None
        if work.widens and pool.dtype != torch.float32:
            widened = pool.widened_buffer[:numel].view(shape)
        read = gathered if widened is None else widened
        by_stretch = read.view(2, pool.num_kv_heads, work.num_stretches, work.num_gathered, pool.head_dim)
        key, value = by_stretch[:, :, :, work.slot0 : work.slot1].transpose(1, 2)
        if work.causal:
            # Packing a group's heads as query rows would break the diagonal, so its heads go as a batch.
            key, value = key.expand(group, -1, -1, -1), value.expand(group, -1, -1, -1)
        return _Item(work, gathered, widened, key, value, _mask(work, read.dtype))

    def __call__(self, layer: int, q: torch.Tensor, scale: float) -> Attended:
        """Attend with q [T, H, D] over what the pool holds for `layer`."""
        num_tokens, num_heads, head_dim = q.shape
        assert num_tokens == self.num_tokens, "the batch is not the one that was planned"
        assert q.dtype == self.pool.dtype, "queries and pool differ in dtype"
        if num_heads != self._num_heads:
            self._bind(num_heads)
        pool = self.pool
        by_token = q.reshape(num_tokens, pool.num_kv_heads, self._group, head_dim)  # [T, Hkv, G, D]
        by_head = by_token.transpose(0, 1).contiguous() if self._packs else by_token  # [Hkv, T, G, D]
        out, lse = self._room(by_token)
        stored = pool.blocks(layer), pool.slots(layer)
        for item in self._items:
            part, part_lse = self._run(item, stored, by_token, by_head, scale)
            tokens = item.work.tokens
            if item.work.merges:
                merge_(out[tokens], lse[tokens], part, part_lse)
            elif part.shape[0] == num_tokens and isinstance(tokens, slice):
                out, lse = part, part_lse  # all results at once: nothing to put together yet
            else:
                out[tokens], lse[tokens] = part, part_lse
        return Attended(out.reshape(q.shape).to(q.dtype), lse.reshape(num_tokens, num_heads))

    def _room(self, by_token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where partial results [T, Hkv, G, D] and log-sum-exp [T, Hkv, G] are put together, in fp32."""
        out = torch.empty(by_token.shape, dtype=torch.float32)
        lse = torch.empty(by_token.shape[:3], dtype=torch.float32)
        if self.work.starts_empty:
            out.zero_()
            lse.fill_(-torch.inf)
        return out, lse

    def _run(
        self,
        item: _Item,
        stored: tuple[torch.Tensor, torch.Tensor],
        by_token: torch.Tensor,
        by_head: torch.Tensor,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One gather and one attention call: partial results [R*n, Hkv, G, D] and [R*n, Hkv, G], fp32."""
        work = item.work
        if work.source is not None:
            torch.index_select(stored[work.num_stretches > 1], 1, work.source, out=item.gathered)
            if item.widened is not None:
                item.widened.copy_(item.gathered)
        q = self._queries(work, by_token, by_head)
        if item.widened is not None:
            q = q.float()
        out, lse = _flash(q, item.key, item.value, 0.0, work.causal, attn_mask=item.mask, scale=scale)
        if work.causal:  # [G, Hkv, n, D]
            out, lse = out.permute(2, 1, 0, 3), lse.permute(2, 1, 0)
        elif work.num_queries > 1:  # [R, Hkv, n*G, D]
            split = (work.num_queries, self._group)
            out = out.unflatten(2, split).transpose(1, 2).flatten(0, 1)
            lse = lse.unflatten(2, split).transpose(1, 2).flatten(0, 1)
        return out.float(), lse

    def _queries(self, work: WorkItem, by_token: torch.Tensor, by_head: torch.Tensor) -> torch.Tensor:
        if work.causal:
            return by_token[work.tokens].permute(2, 1, 0, 3)  # [G, Hkv, n, D]
        if work.num_queries == 1:
            return by_token[work.tokens]  # [R, Hkv, G, D]
        num_kv_heads, _, group, head_dim = by_head.shape
        packed = (num_kv_heads, work.num_stretches, work.num_queries * group, head_dim)
        return by_head[:, work.tokens].view(packed).transpose(0, 1)  # [R, Hkv, n*G, D]


def _mask(work: WorkItem, dtype: torch.dtype) -> torch.Tensor | None:
    """-inf where a stretch is shorter than the longest of its batch [R, 1, 1, K]."""
    if work.lens is None:
        return None
    beyond = torch.arange(work.num_gathered) >= torch.from_numpy(work.lens)[:, None]
    mask = torch.zeros(beyond.shape, dtype=dtype).masked_fill_(beyond, -torch.inf)
    return mask[:, None, None]

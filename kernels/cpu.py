"""Attention on the CPU: gather a stretch of KV, run torch's flash kernel on it, merge by log-sum-exp.

There is one path: rows that share nothing are a work list without shared items. Layers with a window have a
work list of their own, made at the first of them; where scores are capped, plain operators take the place of
the flash kernel; sinks join the softmax at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ramet.kernels.capped import capped_attention
from ramet.kernels.cpu_work import WorkItem, WorkList, WorkListBuilder
from ramet.kernels.kv_pool import KVPool
from ramet.kernels.merge import merge_
from ramet.kernels.options import PLAIN, AttentionOptions
from ramet.kernels.plan import AttentionPlan
from ramet.kernels.window import WindowedBuilder

# Hides a key in fp32. Not -inf: a query that sees nothing of a part would get a part that is no number.
_HIDDEN = -1e30

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
    mask: torch.Tensor | None  # [R, 1, 1, K] or [1, 1, n*G, slots]


class _Bound(NamedTuple):
    """A work list whose items have their views."""

    items: tuple[_Item, ...]
    starts_empty: bool
    packs: bool  # an item reads q with the tokens of a head side by side


class CPUAttention:
    """One step's attention over one pool: prepared once, then called by each layer."""

    def __init__(self, plan: AttentionPlan, pool: KVPool) -> None:
        assert pool.layout == "head-major", "the gathers are over heads"
        assert pool.dtype in (torch.float32, torch.bfloat16, torch.float16), f"no CPU path for {pool.dtype}"
        self.pool = pool
        self.num_tokens = plan.num_tokens
        self._plan = plan
        self._longest = int(plan.kv_lens.max())
        self._lists: dict[int | None, WorkList] = {None: self._work_list(None)}
        self._bound: dict[int | None, _Bound] = {}  # by window
        self._num_heads = 0  # known at the first call

    def _work_list(self, window: int | None) -> WorkList:
        plan, sizes = self._plan, (self.pool.max_gather_slots, self.pool.max_widened_slots)
        if window is None:
            return WorkListBuilder(plan, *sizes).build()
        return WindowedBuilder(plan, *sizes, window).build()

    def _bind(self, num_heads: int, window: int | None) -> _Bound:
        """The work list of a window with what depends on the number of query heads: views and masks."""
        pool = self.pool
        if num_heads != self._num_heads:
            assert num_heads % pool.num_kv_heads == 0, "the query heads do not divide among the KV heads"
            self._num_heads = num_heads
            self._group = num_heads // pool.num_kv_heads
            self._bound.clear()
        bound = self._bound.get(window)
        if bound is None:
            if window not in self._lists:
                self._lists[window] = self._work_list(window)
            work = self._lists[window]
            packs = any(item.num_queries > 1 and not item.causal for item in work.items)
            bound = _Bound(tuple(map(self._bind_item, work.items)), work.starts_empty, packs)
            self._bound[window] = bound
        return bound

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
        return _Item(work, gathered, widened, key, value, _mask(work, group, read.dtype))

    def __call__(
        self, layer: int, q: torch.Tensor, scale: float, options: AttentionOptions = PLAIN
    ) -> Attended:
        """Attend with q [T, H, D] over what the pool holds for `layer`."""
        num_tokens, num_heads, head_dim = q.shape
        assert num_tokens == self.num_tokens, "the batch is not the one that was planned"
        assert q.dtype == self.pool.dtype, "queries and pool differ in dtype"
        window = options.window
        if window is not None and window >= self._longest:
            window = None  # it cuts nothing off in this step
        bound = self._bind(num_heads, window)
        pool = self.pool
        by_token = q.reshape(num_tokens, pool.num_kv_heads, self._group, head_dim)  # [T, Hkv, G, D]
        by_head = by_token.transpose(0, 1).contiguous() if bound.packs else by_token  # [Hkv, T, G, D]
        out, lse = self._room(by_token, bound.starts_empty)
        stored = pool.blocks(layer), pool.slots(layer)
        for item in bound.items:
            part, part_lse = self._run(item, stored, by_token, by_head, scale, options.softcap)
            tokens = item.work.tokens
            if item.work.merges:
                merge_(out[tokens], lse[tokens], part, part_lse)
            elif part.shape[0] == num_tokens and isinstance(tokens, slice):
                out, lse = part, part_lse  # all results at once: nothing to put together yet
            else:
                out[tokens], lse[tokens] = part, part_lse
        if options.sinks is not None:
            out, lse = _with_sinks(out, lse, options.sinks)
        return Attended(out.reshape(q.shape).to(q.dtype), lse.reshape(num_tokens, num_heads))

    def output(
        self, layer: int, q: torch.Tensor, scale: float, options: AttentionOptions = PLAIN
    ) -> torch.Tensor:
        """Only the output [T, H, D]."""
        return self(layer, q, scale, options).out

    def _room(self, by_token: torch.Tensor, starts_empty: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Where partial results [T, Hkv, G, D] and log-sum-exp [T, Hkv, G] are put together, in fp32."""
        out = torch.empty(by_token.shape, dtype=torch.float32)
        lse = torch.empty(by_token.shape[:3], dtype=torch.float32)
        if starts_empty:
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
        softcap: float | None,
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
        if softcap is None:
            out, lse = _flash(q, item.key, item.value, 0.0, work.causal, attn_mask=item.mask, scale=scale)
        else:
            out, lse = capped_attention(q, item.key, item.value, work.causal, item.mask, scale, softcap)
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


def _mask(work: WorkItem, group: int, dtype: torch.dtype) -> torch.Tensor | None:
    """What the queries of an item do not see: of shape [R, 1, 1, K], or [1, 1, n*G, slots] for `sees`."""
    if work.sees is not None:
        slots = torch.arange(work.slot1 - work.slot0)
        lows, ends = (torch.from_numpy(side.repeat(group))[:, None] for side in work.sees)
        hidden = (slots < lows) | (slots >= ends)  # [n*G, slots]
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, _HIDDEN)[None, None]
    if work.lens is None:
        return None
    # Where a stretch is shorter than the longest of its batch. It has slots of its own, so -inf is fine.
    beyond = torch.arange(work.num_gathered) >= torch.from_numpy(work.lens)[:, None]
    mask = torch.zeros(beyond.shape, dtype=dtype).masked_fill_(beyond, -torch.inf)
    return mask[:, None, None]


def _with_sinks(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let a logit a head [H], without a value, join the softmax of out [T, Hkv, G, D] and lse [T, Hkv, G].

    exp(lse) becomes exp(lse) + exp(sink), so the output shrinks by the ratio of the two: exact.
    """
    logits = sinks.float().view(lse.shape[1:])
    return out * torch.sigmoid(lse - logits).unsqueeze(-1), torch.logaddexp(lse, logits)

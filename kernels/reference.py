"""Paged attention straight from its definition, in fp64: slow, and what every other path is held against."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ramet.kernels.options import PLAIN, AttentionOptions


def paged_attention(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_tables: Sequence[Sequence[int]],
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    scale: float | None = None,
    options: AttentionOptions = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [T, H, D] over key and value [Hkv, N, B, D] through the block tables of S rows.

    The queries of a row sit at its last positions and see what is not after them, nor further back than the
    window. Returns the output [T, H, D] and the natural logarithm of the softmax's denominator [T, H], which
    a sink is part of, both fp64.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, _, block_size, _ = key.shape
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.empty(q.shape, dtype=torch.float64)
    lse = torch.empty(q.shape[:2], dtype=torch.float64)
    token = 0
    for table, query_len, kv_len in zip(block_tables, query_lens, kv_lens, strict=True):
        blocks = torch.tensor([table[p // block_size] for p in range(kv_len)])
        offsets = torch.arange(kv_len) % block_size
        for position in range(kv_len - query_len, kv_len):
            low = 0 if options.window is None else max(0, position + 1 - options.window)
            see = slice(low, position + 1)
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                keys = key[kv_head, blocks[see], offsets[see]].double()  # [K, D]
                values = value[kv_head, blocks[see], offsets[see]].double()  # [K, D]
                scores = scale * (keys @ q[token, head].double())
                if options.softcap is not None:
                    scores = options.softcap * torch.tanh(scores / options.softcap)
                logits = scores
                if options.sinks is not None:
                    logits = torch.cat([scores, options.sinks[head : head + 1].double()])
                lse[token, head] = torch.logsumexp(logits, 0)
                out[token, head] = torch.softmax(logits, 0)[: len(scores)] @ values
            token += 1
    return out, lse

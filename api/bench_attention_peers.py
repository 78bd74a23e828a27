"""Other attention kernels on the cases of the bench, where they are installed: FlashInfer, FlashAttention 3.

Each gets K and V in its own layout and pages of the same size. One that is missing, or cannot do a case, is
reported as absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ramet.api.bench_attention_cases import DTYPE, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, SCALE, Case
from ramet.kernels.kv_pool import KVPool

WORKSPACE_BYTES = 512 << 20


@dataclass(frozen=True)
class Inputs:
    """A case in the form that the others take: pages [N, B, Hkv, D] of each layer, and page tables."""

    case: Case
    pages: list[tuple[torch.Tensor, torch.Tensor]]
    q: torch.Tensor  # [S, H, D]
    out: torch.Tensor  # [S, H, D]

    @classmethod
    def of(cls, case: Case, pool: KVPool, q: torch.Tensor) -> Inputs:
        layers = range(pool.num_layers)
        pages = [(_pages(pool.key(layer)), _pages(pool.value(layer))) for layer in layers]
        return cls(case, pages, q, torch.full_like(q, torch.nan))


def _pages(stored: torch.Tensor) -> torch.Tensor:
    return stored.permute(1, 2, 0, 3).contiguous()


Layer = Callable[[int], object]
Peer = Callable[[Inputs], Layer | None]


def peers() -> Iterator[tuple[str, Peer]]:
    """The peers that are installed."""
    try:
        import flashinfer  # noqa: F401
    except ImportError:
        pass
    else:
        yield "flashinfer decode", flashinfer_decode
        yield "flashinfer cascade", flashinfer_cascade
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func  # noqa: F401
    except ImportError:
        pass
    else:
        yield "fa3", fa3
        yield "fa3 cascade", fa3_cascade


def _int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def _workspace() -> torch.Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def _starts(counts: list[int]) -> torch.Tensor:
    """Where stretches of these lengths start, and the end [len(counts) + 1]."""
    return _int32([0, *torch.tensor(counts).cumsum(0).tolist()])


def _heads(block_size: int) -> tuple[int, int, int, int]:
    return NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, block_size


def flashinfer_decode(inputs: Inputs) -> Layer:
    """FlashInfer's paged decode with tensor cores: each branch reads all that it sees."""
    import flashinfer

    case = inputs.case
    wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(), "NHD", use_tensor_cores=True)
    last = [(n - 1) % case.block_size + 1 for n in case.kv_lens]
    wrapper.plan(
        _starts([len(table) for table in case.block_tables]),
        _int32([block for table in case.block_tables for block in table]),
        _int32(last),
        *_heads(case.block_size),
        q_data_type=DTYPE,
        kv_data_type=DTYPE,
    )
    return lambda layer: wrapper.run(inputs.q, inputs.pages[layer], out=inputs.out)


def flashinfer_cascade(inputs: Inputs) -> Layer | None:
    """FlashInfer's cascade of one launch a level, with its FA2 kernels.

    Its own choice on Hopper, FA3, does not split KV, and is several times slower on these cases.
    """
    case = inputs.case
    if len(case.levels) < 2 or any(tokens % case.block_size for _, tokens in case.levels[:-1]):
        return None
    import flashinfer

    num_levels = len(case.levels)
    wrapper: Any = flashinfer.MultiLevelCascadeAttentionWrapper(num_levels, _workspace(), "NHD")
    wrapper._batch_prefill_wrappers = [
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(), "NHD", backend="fa2")
        for _ in range(num_levels)
    ]
    queries, pages, ids, last = [], [], [], []
    num_nodes, block0 = 1, 0
    for fan_out, tokens in case.levels:
        num_nodes *= fan_out
        members, blocks = case.num_branches // num_nodes, -(-tokens // case.block_size)
        firsts = [case.block_tables[node * members] for node in range(num_nodes)]
        queries.append(_starts([members] * num_nodes))
        pages.append(_starts([blocks] * num_nodes))
        ids.append(_int32([block for table in firsts for block in table[block0 : block0 + blocks]]))
        last.append(_int32([(tokens - 1) % case.block_size + 1] * num_nodes))
        block0 += blocks
    wrapper.plan(queries, pages, ids, last, *_heads(case.block_size), q_data_type=DTYPE, kv_data_type=DTYPE)
    return lambda layer: inputs.out.copy_(wrapper.run(inputs.q, inputs.pages[layer]))


def _padded_table(case: Case) -> torch.Tensor:
    longest = max(map(len, case.block_tables))
    return torch.tensor(
        [table + [0] * (longest - len(table)) for table in case.block_tables],
        dtype=torch.int32,
        device="cuda",
    )


def fa3(inputs: Inputs) -> Layer:
    """FlashAttention 3 on pages, as vLLM calls it in a graph."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    case = inputs.case
    starts, lens, table = _starts([1] * case.num_branches), _int32(case.kv_lens), _padded_table(case)
    longest = max(case.kv_lens)
    schedule = get_scheduler_metadata(
        batch_size=case.num_branches, max_seqlen_q=1, max_seqlen_k=longest, num_heads_q=NUM_HEADS,
        num_heads_kv=NUM_KV_HEADS, headdim=HEAD_DIM, cache_seqlens=lens, qkv_dtype=DTYPE, cu_seqlens_q=starts,
        page_size=case.block_size, causal=True, window_size=(-1, -1), num_splits=32,
    )  # fmt: skip

    def layer(layer: int) -> None:
        k, v = inputs.pages[layer]
        flash_attn_varlen_func(
            q=inputs.q, k=k, v=v, out=inputs.out, cu_seqlens_q=starts, max_seqlen_q=1, seqused_k=lens,
            max_seqlen_k=longest, softmax_scale=SCALE, causal=True, window_size=[-1, -1], block_table=table,
            softcap=0, scheduler_metadata=schedule, fa_version=3, num_splits=32,
        )  # fmt: skip

    return layer


def fa3_cascade(inputs: Inputs) -> Layer | None:
    """vLLM's cascade on FlashAttention 3, which knows one prefix that all branches have in common."""
    case = inputs.case
    if len(case.levels) != 2 or case.levels[0][0] != 1:
        return None
    from vllm.v1.attention.backends.flash_attn import cascade_attention

    prefix, private = case.levels[0][1], case.levels[1][1]
    starts, table = _starts([1] * case.num_branches), _padded_table(case)
    prefix_starts, prefix_lens = _int32([0, case.num_branches]), _int32([prefix])
    suffix_lens = _int32([private] * case.num_branches)

    def layer(layer: int) -> None:
        k, v = inputs.pages[layer]
        cascade_attention(
            inputs.out, inputs.q, k, v, cu_query_lens=starts, max_query_len=1,
            cu_prefix_query_lens=prefix_starts, prefix_kv_lens=prefix_lens, suffix_kv_lens=suffix_lens,
            max_kv_len=prefix + private, softmax_scale=SCALE, alibi_slopes=None, sliding_window=(-1, -1),
            logits_soft_cap=0, block_table=table, common_prefix_len=prefix, max_num_splits=0, fa_version=3,
        )  # fmt: skip

    return layer

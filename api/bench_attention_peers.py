"""Other attention kernels on the cases of the bench, where they are installed: FlashInfer, FlashAttention 3.

Each gets K and V in its own layout and pages of the same size, and plans before it is timed. Where several
settings of a peer could be the fastest, it makes a layer of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch

from ramet.api.bench_attention_cases import DTYPE, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, SCALE, Case
from ramet.api.bench_attention_levels import Level, cascade_levels
from ramet.kernels.kv_pool import KVPool

WORKSPACE_BYTES = 512 << 20
NUM_SPLITS = (0, 32)  # of FlashAttention 3: its own choice for the batch, and vLLM's limit inside a graph

Layer = Callable[[int], torch.Tensor]  # runs one layer and returns its outputs [S, H, D]


class Inputs:
    """A case in the form that the others take."""

    def __init__(
        self, case: Case, pool: KVPool, q: torch.Tensor, workspace_bytes: int = WORKSPACE_BYTES
    ) -> None:
        """`q` is [S, H, D]."""
        self.case, self.q, self.out = case, q, torch.empty_like(q)
        layers = range(pool.num_layers)
        # K and V of each layer, pages [N, B, Hkv, D].
        self.pages = [(_pages(pool.key(layer)), _pages(pool.value(layer))) for layer in layers]
        self.workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=q.device)

    def int32(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.q.device)

    def starts(self, counts: list[int]) -> torch.Tensor:
        """Where stretches of these lengths start, and the end [len(counts) + 1]."""
        return self.int32(list(accumulate(counts, initial=0)))

    def padded_table(self) -> torch.Tensor:
        """The block tables, one row a branch [S, the longest]."""
        tables = self.case.block_tables
        longest = max(map(len, tables))
        flat = [block for table in tables for block in table + [0] * (longest - len(table))]
        return self.int32(flat).view(len(tables), longest)


def _pages(stored: torch.Tensor) -> torch.Tensor:
    return stored.permute(1, 2, 0, 3).contiguous()


Peer = Callable[[Inputs], Iterator[Layer]]  # nothing for a case that it has no answer to


def flashinfer_decode(inputs: Inputs) -> Iterator[Layer]:
    """FlashInfer's paged decode with tensor cores: each branch reads all that it sees."""
    import flashinfer

    wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        inputs.workspace, "NHD", use_tensor_cores=True
    )
    block_size = inputs.case.block_size
    (level,) = cascade_levels(inputs.case, max_shared=0)
    wrapper.plan(*_pages_of(inputs, level), *_shape(block_size), q_data_type=DTYPE, kv_data_type=DTYPE)
    yield lambda layer: wrapper.run(inputs.q, inputs.pages[layer], out=inputs.out)


def flashinfer_cascade(inputs: Inputs) -> Iterator[Layer]:
    """FlashInfer's cascade of one launch a level, over the first levels of the tree: one, two and so on.

    With its FA2 kernels; its own choice on Hopper, FA3, does not split KV and is slower on these cases.
    """
    import flashinfer

    for max_shared in range(1, len(cascade_levels(inputs.case))):
        levels = cascade_levels(inputs.case, max_shared)
        wrapper: Any = flashinfer.MultiLevelCascadeAttentionWrapper(len(levels), inputs.workspace, "NHD")
        wrapper._batch_prefill_wrappers = [
            flashinfer.BatchPrefillWithPagedKVCacheWrapper(inputs.workspace, "NHD", backend="fa2")
            for _ in levels
        ]
        wrapper.plan(
            [inputs.starts(level.group_sizes) for level in levels],
            *zip(*(_pages_of(inputs, level) for level in levels), strict=True),
            *_shape(inputs.case.block_size),
            q_data_type=DTYPE,
            kv_data_type=DTYPE,
        )

        def run(wrapper: Any, layer: int) -> torch.Tensor:
            out: torch.Tensor = wrapper.run(inputs.q, inputs.pages[layer])
            return out

        yield partial(run, wrapper)


def _pages_of(inputs: Inputs, level: Level) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the pages of each group start, the pages of all, and the tokens in the last of each."""
    ids = [block for blocks in level.block_ids for block in blocks]
    starts = inputs.starts([len(blocks) for blocks in level.block_ids])
    return starts, inputs.int32(ids), inputs.int32(level.last_block_lens)


def _shape(block_size: int) -> tuple[int, int, int, int]:
    return NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, block_size


def fa3(inputs: Inputs) -> Iterator[Layer]:
    """vLLM's FlashAttention 3 on pages: each branch reads all that it sees."""
    case = inputs.case
    starts, lens = inputs.starts([1] * case.num_branches), inputs.int32(case.kv_lens)
    table, longest = inputs.padded_table(), max(case.kv_lens)
    for num_splits in NUM_SPLITS:
        call = _fa3_call(inputs, starts, 1, lens, longest, table, num_splits)
        yield partial(call, out=inputs.out)


def fa3_cascade(inputs: Inputs) -> Iterator[Layer]:
    """vLLM's cascade: FlashAttention 3 on the prefix that all branches share, on the rest, and a merge."""
    case = inputs.case
    root = cascade_levels(case)[0]
    if len(root.group_sizes) > 1 or case.num_branches == 1:
        return
    import_module("vllm._C_stable_libtorch")
    prefix = len(root.block_ids[0]) * case.block_size
    lens = [kv_len - prefix for kv_len in case.kv_lens]
    starts, table = inputs.starts([1] * case.num_branches), inputs.padded_table()
    own_lens, own_table = inputs.int32(lens), table[:, len(root.block_ids[0]) :]
    all_of_them, prefix_lens = inputs.int32([0, case.num_branches]), inputs.int32([prefix])
    for num_splits in NUM_SPLITS:
        shared = _fa3_call(
            inputs, all_of_them, case.num_branches, prefix_lens, prefix, table[:1], num_splits, causal=False
        )
        own = _fa3_call(inputs, starts, 1, own_lens, max(lens), own_table, num_splits)

        def run(shared: Any, own: Any, layer: int) -> torch.Tensor:
            above = shared(layer, return_softmax_lse=True)
            below = own(layer, return_softmax_lse=True)
            torch.ops._C.merge_attn_states(inputs.out, None, *above, *below, None, None)
            return inputs.out

        yield partial(run, shared, own)


def _fa3_call(
    inputs: Inputs,
    starts: torch.Tensor,
    most_queries: int,
    kv_lens: torch.Tensor,
    longest: int,
    table: torch.Tensor,
    num_splits: int,
    causal: bool = True,
) -> Callable[..., Any]:
    """One call of FlashAttention 3 for a layer; its schedule is made beforehand, as vLLM does once a step."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    schedule = get_scheduler_metadata(
        batch_size=len(kv_lens), max_seqlen_q=most_queries, max_seqlen_k=longest, num_heads_q=NUM_HEADS,
        num_heads_kv=NUM_KV_HEADS, headdim=HEAD_DIM, cache_seqlens=kv_lens, qkv_dtype=DTYPE,
        cu_seqlens_q=starts, page_size=inputs.case.block_size, causal=causal, num_splits=num_splits,
    )  # fmt: skip

    def call(layer: int, **options: Any) -> Any:
        k, v = inputs.pages[layer]
        return flash_attn_varlen_func(
            inputs.q, k, v, most_queries, starts, longest, seqused_k=kv_lens, softmax_scale=SCALE,
            causal=causal, block_table=table, scheduler_metadata=schedule, num_splits=num_splits,
            fa_version=3, **options,
        )  # fmt: skip

    return call


PEERS: dict[str, tuple[str, Peer]] = {
    "flashinfer decode": ("flashinfer", flashinfer_decode),
    "flashinfer cascade": ("flashinfer", flashinfer_cascade),
    "fa3": ("vllm.vllm_flash_attn", fa3),
    "fa3 cascade": ("vllm.vllm_flash_attn", fa3_cascade),
}


def installed() -> dict[str, Peer]:
    """The peers that can be imported here."""
    return {name: peer for name, (module, peer) in PEERS.items() if _can_import(module)}


def _can_import(module: str) -> bool:
    try:
        import_module(module)
    except ImportError:
        return False
    return True

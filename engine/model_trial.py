"""A family that no test has tried is tried when it is loaded: a step of ours beside transformers' own pass.

Families that mix tokens outside of their attention, or attend in a way of their own, give other logits
without an exception; two sequences in one batch show it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ramet.engine.errors import UnsupportedModel
from ramet.engine.model_attention import ATTENTION_NAME, Attend, ModelShape
from ramet.kernels import attention
from ramet.kernels.kv_pool import KVPool

_LENGTHS = (9, 6)  # of the two sequences
_BLOCK_SIZE = 4

Forward: TypeAlias = Callable[[Tensor, Tensor, Tensor, Attend], Tensor]  # LoadedModel.forward


def try_model(module: Any, shape: ModelShape, forward: Forward, name: str) -> None:
    """Raise UnsupportedModel if a batch of two sequences gives other logits than each of them alone."""
    device = module.device
    lengths = [min(length, shape.max_model_len) for length in _LENGTHS]
    sequences = [
        torch.arange(length, device=device).add_(seed) % shape.vocab_size
        for seed, length in enumerate(lengths)
    ]
    found = _run_batch(sequences, shape, module.dtype, forward)
    expected = _run_alone(module, sequences)
    tolerance = 1e-3 if module.dtype == torch.float32 else 0.1
    if not (found - expected).norm() <= tolerance * expected.norm():
        raise UnsupportedModel(
            name,
            f"the {module.config.model_type} family gives other logits in a batch than transformers does",
        )


def _run_batch(sequences: list[Tensor], shape: ModelShape, dtype: torch.dtype, forward: Forward) -> Tensor:
    """The logits [T, V] of all tokens of a step over a small pool."""
    lengths = [len(ids) for ids in sequences]
    num_blocks = [-(-length // _BLOCK_SIZE) for length in lengths]
    blocks = torch.split(torch.arange(sum(num_blocks)), num_blocks)
    device = sequences[0].device
    pool = KVPool(
        shape.num_layers, sum(num_blocks), shape.num_kv_heads, shape.head_dim, _BLOCK_SIZE, dtype, device
    )
    plan = attention.planner(pool).plan(
        [ids.tolist() for ids in blocks], lengths, lengths, [0] * len(lengths)
    )
    positions = [torch.arange(length) for length in lengths]
    slots = torch.cat([ids[0] * _BLOCK_SIZE + own for ids, own in zip(blocks, positions, strict=True)])
    prepared = attention.prepare(pool, plan, slots.numpy())
    token_ids = torch.cat(sequences)
    attend = partial(attention.attend, prepared)
    logits_at = torch.arange(len(token_ids), device=device)
    return forward(token_ids, torch.cat(positions).to(device), logits_at, attend).float()


@torch.inference_mode()
def _run_alone(module: Any, sequences: list[Tensor]) -> Tensor:
    """The logits [T, V] as the unchanged module computes them, one sequence after another."""
    module.set_attn_implementation("eager")
    try:
        logits = [module(ids[None], use_cache=False).logits[0] for ids in sequences]
    finally:
        module.set_attn_implementation(ATTENTION_NAME)
    return torch.cat(logits).float()

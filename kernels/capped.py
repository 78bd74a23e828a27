"""Attention with capped scores, step by step in fp32: torch's flash kernel on the CPU has no cap."""

from __future__ import annotations

import torch


def capped_attention(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [R, H, n, D] over key and value [R, H, K, D]: out [R, H, n, D] and log-sum-exp [R, H, n], fp32.

    A score s is softcap * tanh(s / softcap) before `mask`, which broadcasts to [R, H, n, K], is added. With
    `causal`, query i sees keys 0 to i.
    """
    scores = q.float() @ key.float().transpose(-1, -2)  # [R, H, n, K]
    scores.mul_(scale / softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores += mask
    if causal:
        beyond = torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(1)
        scores.masked_fill_(beyond, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    return scores.sub_(lse.unsqueeze(-1)).exp_() @ value.float(), lse

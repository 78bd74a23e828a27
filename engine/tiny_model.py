"""A small random llama for tests: real layers and rotary positions, no files, no network.

Its weights are wide enough apart that greedy output varies from token to token instead of repeating one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


def tiny_llama(
    *,
    num_layers: int = 2,
    num_heads: int = 3,
    num_kv_heads: int = 1,
    head_dim: int = 16,
    vocab_size: int = 512,
    max_position_embeddings: int = 1024,
    seed: int = 0,
    weight_std: float = 0.3,
) -> LlamaForCausalLM:
    """A LlamaForCausalLM on the CPU in float32 with weights drawn from ``seed``; it has no end token.

    The global random state of torch is as it was before.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=num_heads * head_dim,
        intermediate_size=2 * num_heads * head_dim,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config)
    model.eval()  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:  # Norm weights stay 1, as in a model that was just made.
                parameter.normal_(0.0, weight_std, generator=generator)
    return model

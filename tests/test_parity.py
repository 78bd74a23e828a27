"""Parity with transformers: the same model, the same prompts, the same greedy tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from ramet import LLM

NUM_TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "Q: What is 17 plus 25?\nA:",
    "The three primary colours are",
    "In 1969, astronauts",
    "Dear Sir or Madam,",
    "A recipe for tomato soup:\n1.",
    "import numpy as np\n\ndef mean(values):",
    "The mitochondria is",
    "Roses are red,",
    "List of prime numbers: 2, 3, 5, 7,",
    "She opened the door and",
    "The theory of relativity says that",
    "SELECT name FROM users WHERE",
    "To be, or not to be,",
    "The largest animal on Earth is",
    "Monday, Tuesday, Wednesday,",
    "Photosynthesis is the process by which",
]


@pytest.mark.model
def test_smollm2_equals_generate(smollm2: LLM) -> None:
    """20 prompts x 64 greedy tokens in fp32, all prompts in one batch.

    Where the two likeliest tokens are closer than 1e-3 the rest of that prompt is not compared.
    """
    from transformers import AutoModelForCausalLM

    module: Any = smollm2.engine.runner.model.module  # type: ignore[attr-defined]
    config = copy.deepcopy(module.config)  # the attention implementation is written into it
    plain: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, attn_implementation="eager", dtype=torch.float32
    )
    plain.load_state_dict(module.state_dict())
    plain.eval()
    outputs = smollm2.generate(PROMPTS, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
    num_compared = 0
    for output, theirs in zip(outputs, greedy(plain, [o.prompt_token_ids for o in outputs]), strict=True):
        ours = output.choices[0]
        assert ours.logprobs is not None
        for mine, other, (best, second) in zip(ours.token_ids, theirs, ours.logprobs, strict=True):
            if mine != other:
                assert best.logprob - second.logprob < 1e-3
                break
            num_compared += 1
    assert num_compared > 0.95 * len(PROMPTS) * NUM_TOKENS


def greedy(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers generates, all prompts in one batch padded on the left."""
    longest = max(map(len, prompts))
    token_ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])  # [S, longest]
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    generated = model.generate(
        token_ids,
        attention_mask=mask,
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
    )
    tokens: list[list[int]] = generated[:, longest:].tolist()
    return tokens

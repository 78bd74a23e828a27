# needs: ramet trl==1.16.0
"""TRL: two GRPO steps on a tiny model, whose recomputed log-probabilities are those of the rollout."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from ramet.api.adapters.trl import Rollout
from ramet.engine.model_files import load_default
from ramet.testing import tiny_llama


class Checked(GRPOTrainer):  # type: ignore[misc, unused-ignore]
    """Compares at each loss: the batch was shuffled and padded since the rollout, and holds what it gave."""

    differences: list[float]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        told, mask = inputs["sampling_per_token_logps"], inputs["completion_mask"]  # [B, T]
        with torch.no_grad():
            recomputed, *_ = self._get_per_token_logps_and_entropies(
                model,
                torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
                torch.cat([inputs["prompt_mask"], mask], dim=1),
                told.shape[1],
            )
        self.differences.append(float(((recomputed - told) * mask).abs().max()))
        return super()._compute_loss(model, inputs)


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """How many of a completion's tokens are even: something to learn, whatever the text."""
    return [sum(token_id % 2 == 0 for token_id in ids) / len(ids) for ids in completion_ids]


def train(prompts: list[Any], tokenizer: Any, folder: str) -> None:
    model = tiny_llama(vocab_size=len(tokenizer))
    first = model.lm_head.weight.detach().clone()
    rollout = Rollout(num_blocks=256)
    given: list[dict[str, list[Any]]] = []

    def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        given.append(rollout(prompts, trainer))
        return given[-1]

    args = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=12,
        max_steps=2,
        learning_rate=1e-3,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    data = Dataset.from_dict({"prompt": prompts})
    trainer = Checked(model, reward, args, data, processing_class=tokenizer, rollout_func=rollout_func)
    trainer.differences = []
    trainer.train()
    assert len(trainer.differences) == 2, trainer.differences
    assert max(trainer.differences) < 1e-4, trainer.differences
    assert (trainer.model.lm_head.weight - first).abs().max() > 1e-4, "the steps changed nothing"
    assert rollout.llm is not None
    # The second step has an engine of its own: 2 prompts, though 8 were asked for, and what follows each.
    apart = {tuple(prompt) for prompt in given[1]["prompt_ids"]}
    assert len(apart) == 2 and len(given[1]["prompt_ids"]) == 8, given[1]
    most = sum(map(len, apart)) + sum(len(completion) - 1 for completion in given[1]["completion_ids"])
    assert rollout.llm.stats().num_computed_tokens <= most, (rollout.llm.stats(), most)


files = load_default(torch.float32, None)
with tempfile.TemporaryDirectory() as folder:
    train(["The capital of France is", "A short list of fruits: apple,"], files.tokenizer, folder)
    questions = ("Name a colour.", "Say hello to the whole world.")
    chats = [[{"role": "user", "content": question}] for question in questions]
    train(chats, files.tokenizer, folder)

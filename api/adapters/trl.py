"""TRL's `rollout_func`: the completions of a GRPO step, token for token as they were sampled."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence as Seq
from typing import Any, TypeAlias

import torch

from ramet.api.adapters.choices import choices_of
from ramet.engine.errors import InvalidInput
from ramet.engine.llm import LLM

Conversation: TypeAlias = Seq[Mapping[str, Any]]


class Rollout:
    """A `rollout_func` for `GRPOTrainer`: a completion for each prompt that it names, repeated ones included.

    The engine runs a copy of the model that is trained, made anew whenever the weights have changed: one more
    model in memory, and one load a generation.

    Args:
        settings: those of LLM. Give `num_blocks` on a GPU, where LLM takes what is free for its pool.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.llm: LLM | None = None
        self._step = -1  # whose weights the engine has

    def __call__(self, prompts: Seq[str | Conversation], trainer: Any) -> dict[str, list[Any]]:
        """{"prompt_ids", "completion_ids", "logprobs"}, a list a prompt each, as TRL asks for them.

        The log-probabilities are the model's own, so the temperature has to be 1.
        Raises InvalidInput, UnsupportedModel or OutOfCapacity; StepFailed if the model failed.
        """
        args = trainer.args
        if args.temperature != 1:
            raise InvalidInput(
                "temperature", "must be 1: log-probabilities are those of the model", args.temperature
            )
        if trainer.tools:
            raise InvalidInput("tools", "must be called by a rollout_func of your own, over branches")
        if self.llm is None or self._step != trainer.state.global_step:
            self.llm = None  # before there is another
            self.llm = LLM(_copy_of(trainer), trainer.processing_class, **self.settings)
            self._step = trainer.state.global_step
        prompt_ids = [self._encode(self.llm, prompt, trainer.chat_template_kwargs) for prompt in prompts]
        choices = choices_of(
            self.llm,
            prompt_ids,
            lambda _: int(args.max_completion_length),
            top_p=args.top_p,
            top_k=args.top_k or 0,
            min_p=args.min_p or 0.0,
            repetition_penalty=args.repetition_penalty,
        )
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [choice.token_ids for choice in choices],
            "logprobs": [choice.token_logprobs for choice in choices],
        }

    def _encode(self, llm: LLM, prompt: str | Conversation, options: Mapping[str, Any]) -> list[int]:
        if isinstance(prompt, str):
            return llm.encode(prompt, "prompts")
        assert llm.tokenizer is not None, "TRL has no trainer without a tokenizer"
        return llm.tokenizer.apply_chat_template(prompt, **options)


def _copy_of(trainer: Any) -> Any:
    """The trained model without what training put around it: wrappers, hooks, checkpointing."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(model, "peft_config"):
        raise InvalidInput("model", "must not be one of peft: merge its adapters first")
    with torch.random.fork_rng(devices=[]):  # weights drawn for nothing are not to change the training
        other = type(model)(copy.deepcopy(model.config)).to(device=model.device, dtype=model.dtype)
    other.load_state_dict(model.state_dict())
    return other

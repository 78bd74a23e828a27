"""llm-reasoners' `LanguageModel` over an LLM, so that its searches run here unchanged.

Prompts stay strings, as it hands them over: what they have in common with earlier ones is found in the tree
and not computed again. Log-probabilities are the model's, as those of its `HFModel` are.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ramet.api.adapters.choices import choices_of
from ramet.engine.errors import InvalidInput
from ramet.engine.llm import LLM
from ramet.engine.outputs import Score

if TYPE_CHECKING:
    from reasoners import GenerateOutput

_POSTPROCESS = (None, "softmax", "log_softmax")


class RametModel:
    """A `reasoners.LanguageModel`; see `reasoners/base.py` for what its three methods promise.

    Args:
        llm: the model with its engine.
        max_length: tokens of a prompt and its output together, where a call says nothing else.

    Raises ImportError where llm-reasoners is not installed.
    """

    def __init__(self, llm: LLM, *, max_length: int = 2048) -> None:
        from reasoners import LanguageModel

        LanguageModel.register(RametModel)  # a base class would have to be imported with this module
        self.llm = llm
        self.max_length = max_length

    def generate(
        self,
        inputs: Seq[str],
        max_length: int | None = None,
        max_new_tokens: int | None = None,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int = 50,
        top_p: float = 1.0,
        num_return_sequences: int = 1,
        eos_token_id: str | int | Seq[str | int] | None = None,
        hide_input: bool = True,
        output_log_probs: bool = False,
        stopping_criteria: object = None,
        **settings: Any,
    ) -> GenerateOutput:
        """`num_return_sequences` texts for each prompt; one that is given several times is computed once.

        A string in `eos_token_id` ends a text wherever it appears, and stays in it. `settings` are further
        fields of SamplingParams. `log_prob` has one array [tokens] for each text.
        Raises InvalidInput or OutOfCapacity; StepFailed if the model failed.
        """
        from reasoners import GenerateOutput

        if isinstance(inputs, str):
            raise InvalidInput("inputs", "must be a list of texts", inputs)
        if stopping_criteria is not None:
            raise InvalidInput("stopping_criteria", "must be None; name texts in eos_token_id instead")
        ends = [eos_token_id] if isinstance(eos_token_id, str | int) else list(eos_token_id or ())
        settings = {
            "temperature": temperature if do_sample else 0.0,
            "top_k": top_k,
            "top_p": top_p,
            "stop": [end for end in ends if isinstance(end, str)],
            "stop_token_ids": [end for end in ends if not isinstance(end, str)],
            "include_stop_str_in_output": True,
            "echo": not hide_input,
            **settings,
        }
        room = self.max_length if max_length is None else max_length
        prompts = [self.llm.encode(text, "inputs") for text in inputs]
        choices = choices_of(
            self.llm,
            [prompt for prompt in prompts for _ in range(num_return_sequences)],
            lambda prompt: _room_after(prompt, room) if max_new_tokens is None else max_new_tokens,
            **settings,
        )
        logprobs = [np.array(choice.token_logprobs, np.float32) for choice in choices]
        return GenerateOutput([choice.text for choice in choices], logprobs if output_log_probs else None)

    def get_next_token_logits(
        self,
        prompt: str | Seq[str],
        candidates: Seq[str] | Seq[Seq[str]],
        postprocess: str | None = None,
    ) -> list[NDArray[np.float32]]:
        """The model's logits of single-token candidates after each prompt: an array [candidates] a prompt.

        `candidates` are those of all prompts, or a list for each. `postprocess` is None, "softmax" or
        "log_softmax", over the whole vocabulary. Raises InvalidInput, also for a candidate of several tokens.
        """
        if postprocess not in _POSTPROCESS:
            raise InvalidInput("postprocess", f"must be one of {_POSTPROCESS}", postprocess)
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        texts = [one for one in candidates if isinstance(one, str)]
        each = [texts] * len(prompts) if texts else [list(own) for own in candidates]
        if len(each) != len(prompts) or 0 < len(texts) < len(candidates):
            raise InvalidInput("candidates", f"must be texts, or a list for each of {len(prompts)} prompts")
        rows = []
        for text, own in zip(prompts, each, strict=True):
            scores = self._score(self.llm.encode(text), [self._single_token(one) for one in own])
            if postprocess is None:
                row = np.array([score.first_logit for score in scores], np.float32)
            else:
                row = np.array([score.logprob for score in scores], np.float32)
            rows.append(np.exp(row) if postprocess == "softmax" else row)
        return rows

    def get_loglikelihood(self, prefix: str, contents: Seq[str]) -> NDArray[np.float32]:
        """The log-likelihoods, in nats, of what each content has after the prefix: an array [contents].

        Raises InvalidInput for a content whose tokens do not begin with those of the prefix and go on.
        """
        start = self.llm.encode(prefix, "prefix", add_special_tokens=False)
        rests = []
        for content in contents:
            token_ids = self.llm.encode(content, "contents", add_special_tokens=False)
            if token_ids[: len(start)] != start or len(token_ids) == len(start):
                raise InvalidInput("contents", "must begin with the tokens of the prefix and go on", content)
            rests.append(token_ids[len(start) :])
        return np.array([score.logprob for score in self._score(start, rests)], np.float32)

    def _score(self, prompt: list[int], candidates: list[list[int]]) -> list[Score]:
        branch = self.llm.branch(prompt, compute=False)  # with the scores, in one pass
        try:
            return branch.score(candidates)
        finally:
            branch.release()  # its blocks stay cached: the next prompt begins like this one

    def _single_token(self, text: str) -> list[int]:
        token_ids = self.llm.encode(text, "candidates", add_special_tokens=False)
        if len(token_ids) != 1:
            raise InvalidInput("candidates", f"must be single tokens, and one has {len(token_ids)}", text)
        return token_ids


def _room_after(prompt: Seq[int], max_length: int) -> int:
    if len(prompt) >= max_length:
        raise InvalidInput("max_length", f"must be more than a prompt's {len(prompt)} tokens", max_length)
    return max_length - len(prompt)

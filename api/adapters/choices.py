"""One choice for each of many prompts, for frameworks that repeat a prompt once for each sample of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence as Seq
from typing import Any

from ramet.engine.llm import LLM
from ramet.engine.outputs import Choice
from ramet.engine.sampling_params import SamplingParams


def choices_of(
    llm: LLM, prompts: Seq[Seq[int]], max_tokens: Callable[[Seq[int]], int | None], **settings: Any
) -> list[Choice]:
    """A choice for each prompt, all in one batch; equal prompts are computed once.

    `max_tokens` says for a prompt how many may follow; `settings` are the other fields of SamplingParams.
    Raises InvalidInput, also where a prompt is repeated more often than `n` allows; see LLM.generate.
    """
    counts = Counter(map(tuple, prompts))
    if not counts:
        return []
    params = [
        SamplingParams(n=count, max_tokens=max_tokens(prompt), **settings) for prompt, count in counts.items()
    ]
    outputs = llm.generate([list(prompt) for prompt in counts], params)
    left = {prompt: iter(output.choices) for prompt, output in zip(counts, outputs, strict=True)}
    return [next(left[tuple(prompt)]) for prompt in prompts]

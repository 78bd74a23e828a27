"""Prompts that are repeated for each sample: computed once, and answered in the order in which they came."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ramet import LLM, InvalidInput
from ramet.api.adapters.choices import choices_of

MakeLLM = Callable[..., LLM]

FIRST, SECOND = list(range(40)), list(range(100, 130))


def test_repeated_prompts_are_computed_once_and_keep_their_order(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    prompts = [FIRST, SECOND, FIRST, FIRST]
    choices = choices_of(llm, prompts, lambda prompt: len(prompt) // 10, temperature=1.0)
    assert [len(choice.token_ids) for choice in choices] == [4, 3, 4, 4]
    # The last token of a choice is not computed: nobody asks for what follows it.
    assert llm.stats().num_computed_tokens == len(FIRST) + len(SECOND) + 3 * 3 + 2
    assert len({tuple(choices[index].token_ids) for index in (0, 2, 3)}) == 3, "each has its own stream"


def test_no_prompt_is_no_choice(make_tiny: MakeLLM) -> None:
    assert choices_of(make_tiny(), [], lambda _: 1) == []


def test_more_than_one_request_may_have_is_refused(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    with pytest.raises(InvalidInput, match=r"^n must be between 1 and 128"):
        choices_of(llm, [FIRST] * 129, lambda _: 1)
    assert llm.stats().num_steps == 0

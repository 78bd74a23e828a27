"""What Rollout refuses, without TRL; tests/clients/trl_grpo.py trains with the real package."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ramet import InvalidInput
from ramet.api.adapters.trl import Rollout


def trainer(temperature: float = 1.0, tools: list[Any] | None = None, **model: Any) -> Any:
    return SimpleNamespace(
        tools=tools,
        args=SimpleNamespace(temperature=temperature),
        state=SimpleNamespace(global_step=0),
        accelerator=SimpleNamespace(unwrap_model=lambda one: one),
        model=SimpleNamespace(**model),
        processing_class=None,
        chat_template_kwargs={},
    )


def test_another_temperature_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"^temperature must be 1"):
        Rollout()(["Say hello."], trainer(temperature=0.7))


def test_tools_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"^tools must be called by"):
        Rollout()(["Say hello."], trainer(tools=[print]))


def test_a_model_with_adapters_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"^model must not be one of peft"):
        Rollout()(["Say hello."], trainer(peft_config={}))

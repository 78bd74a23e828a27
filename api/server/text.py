"""Text to tokens and back, on a thread of its own with a tokenizer of its own: a long prompt holds up neither
the event loop nor the engine."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

from ramet.api.server.errors import ApiError, invalid
from ramet.engine.async_llm import AsyncLLM
from ramet.engine.errors import InvalidInput
from ramet.engine.token_bytes import TokenBytes
from ramet.engine.tokenizer import IncrementalDetokenizer, Tokenizer, validate_token_ids

T = TypeVar("T")
MAX_PROMPTS = 1024


class Text:
    """The tokenizer as the server uses it. Everything raises ApiError or InvalidInput, naming the field."""

    def __init__(self, engine: AsyncLLM) -> None:
        self.vocab_size = engine.vocab_size
        self._tokenizer = None if engine.tokenizer is None else engine.tokenizer.copy()
        self._bytes = None if self._tokenizer is None else TokenBytes(self._tokenizer)
        self._max_tokens = engine.config.max_tokens
        self._pool = ThreadPoolExecutor(1, "ramet-text")

    def close(self) -> None:
        self._pool.shutdown()

    @cached_property
    def _reserved_options(self) -> set[str]:
        """What a template gets from elsewhere."""
        hf = self.tokenizer.hf
        return {"messages", *inspect.signature(hf.apply_chat_template).parameters, *hf.special_tokens_map}

    @property
    def tokenizer(self) -> Tokenizer:
        """For what changes no setting of it, and is short. Raises ApiError if the model has none."""
        return self._needed_for(None)

    def _needed_for(self, field: str | None) -> Tokenizer:
        if self._tokenizer is None:
            message = "this model has no tokenizer: only token ids can be used"
            raise ApiError(400, message, code="no_tokenizer", param=field)
        return self._tokenizer

    @cached_property
    def _max_chars(self) -> int:
        """A text that is longer cannot fit into the context, whatever its tokens are."""
        pieces = (self.tokenizer.piece(token_id) or "" for token_id in range(self.vocab_size))
        return self._max_tokens * max(map(len, pieces))

    def check_length(self, num_chars: int, field: str) -> None:
        """Raise ApiError for what would only keep others waiting while it is tokenized."""
        if num_chars > self._max_chars:
            message = (
                f"{field} has {num_chars} characters; {self._max_tokens} tokens are at most {self._max_chars}"
            )
            raise ApiError(400, message, code="context_length_exceeded", param=field)

    async def _run(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    async def encode(
        self, text: str, field: str, *, add_special_tokens: bool = True, control_tokens: bool = True
    ) -> list[int]:
        tokenizer = self._needed_for(field)
        self.check_length(len(text), field)
        return await self._run(
            lambda: tokenizer.encode(
                text, add_special_tokens=add_special_tokens, control_tokens=control_tokens
            )
        )

    async def prompts(self, prompt: object, *, add_special_tokens: bool = True) -> list[list[int]]:
        """One prompt or a list of them, each a text or token ids, as lists of token ids."""
        many = _split(prompt)
        found = []
        for index, one in enumerate(many):
            field = "prompt" if len(many) == 1 else f"prompt.{index}"
            if isinstance(one, str):
                token_ids = await self.encode(one, field, add_special_tokens=add_special_tokens)
            else:
                token_ids = validate_token_ids(one, self.vocab_size, field)
            if not token_ids:
                raise invalid(field, "must hold at least one token")
            found.append(token_ids)
        return found

    async def chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        options: dict[str, Any] | None = None,
    ) -> list[int]:
        """The token ids of a conversation; `options` go to the chat template."""
        tokenizer = self._needed_for("messages")
        self.check_length(sum(map(_num_chars, messages)), "messages")
        if continue_final_message and add_generation_prompt:
            raise invalid("continue_final_message", "needs add_generation_prompt to be false")
        taken = sorted(self._reserved_options & set(options or ()))
        if taken:
            raise invalid("chat_template_kwargs", f"must not hold {', '.join(taken)}")
        more = dict(options or {})
        if continue_final_message:
            more["continue_final_message"] = True
        try:
            return await self._run(
                lambda: tokenizer.apply_chat_template(
                    messages, add_generation_prompt=add_generation_prompt, **more
                )
            )
        except InvalidInput as error:
            raise invalid("messages", error.limit) from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def preview(self, token_ids: Sequence[int]) -> str:
        """A few tokens as a text, if there is one."""
        return "" if self._tokenizer is None else self._tokenizer.decode(token_ids, skip_special_tokens=False)

    # -- single tokens -------------------------------------------------------------------------------

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if self._bytes is None else self._bytes[token_id]

    def token_text(self, token_id: int, *, as_id: bool = False) -> str:
        """How log-probabilities name a token: its text; its bytes if they are no text; or its id.

        Two tokens of a vocabulary may have one text, but then one of them is a control token, or spelled in
        bytes, so names seldom meet.
        """
        if as_id or self._bytes is None:
            return f"token_id:{token_id}"
        raw = self._bytes[token_id]
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def pieces(self, *, skip_special_tokens: bool) -> IncrementalDetokenizer | None:
        """What tells which part of a text each token adds."""
        if self._tokenizer is None:
            return None
        return IncrementalDetokenizer(self._tokenizer, skip_special_tokens=skip_special_tokens)


def _num_chars(message: dict[str, Any]) -> int:
    """Of all that a template may show, or that is kept with a branch."""
    return len(json.dumps(message, ensure_ascii=False))


def _split(prompt: object) -> list[Any]:
    """The prompts in what OpenAI calls a prompt: a text, token ids, or a list of one or the other."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise invalid("prompt", "must be a text, a list of token ids, or a list of those")
    if not prompt:
        raise invalid("prompt", "must hold at least one token")
    if all(isinstance(one, (str, list)) for one in prompt):
        if len(prompt) > MAX_PROMPTS:
            raise invalid("prompt", f"must hold at most {MAX_PROMPTS} prompts, got {len(prompt)}")
        return prompt
    return [prompt]

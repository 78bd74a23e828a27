"""/v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ramet.api.server.answers import Answer, finish_reason, finite
from ramet.api.server.errors import invalid
from ramet.api.server.messages import normalised
from ramet.api.server.sampling import beam_params, refuse_unsupported, sampling_params
from ramet.api.server.schemas import ChatRequest
from ramet.api.server.state import State
from ramet.engine.beam_params import BeamSearchParams
from ramet.engine.outputs import Delta
from ramet.engine.sampler import TokenLogprob
from ramet.engine.sampling_params import MAX_LOGPROBS, SamplingParams


def chat_params(body: ChatRequest) -> SamplingParams | BeamSearchParams:
    """What a chat completion asks for. Raises ApiError or InvalidInput."""
    refuse_unsupported(body)
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise invalid("max_tokens", "must be the same as max_completion_tokens, or left out")
    count = None
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise invalid("top_logprobs", "needs logprobs to be true")
        if not 0 <= body.top_logprobs <= MAX_LOGPROBS:
            raise invalid("top_logprobs", f"must be between 0 and {MAX_LOGPROBS}")
    if body.logprobs:
        count = body.top_logprobs or 0
    params = beam_params if body.use_beam_search else sampling_params
    return params(body, max_tokens=limits.pop() if limits else None, logprobs=count)


async def chat_prompt(state: State, body: ChatRequest) -> list[int]:
    """The messages as the model reads them."""
    continues = bool(body.continue_final_message)
    generates = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    return await state.text.chat(
        normalised(body.messages),
        add_generation_prompt=generates,
        continue_final_message=continues,
        options=body.chat_template_kwargs,
    )


class ChatAnswer(Answer):
    """`n` messages after one conversation."""

    body: ChatRequest
    endpoint = "/v1/chat/completions"
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, state: State, body: ChatRequest, model: str, prompts: Sequence[list[int]], n: int
    ) -> None:
        super().__init__(state, body, model, prompts, n)
        self._sums = [0.0] * n
        self._prompt_logprobs: list[Any] | None = None
        self._prompt_told = False

    def opening(self) -> Iterable[dict[str, Any]]:
        for index in range(self.n):
            delta = {"role": "assistant", "content": ""}
            yield {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, delta: Delta) -> dict[str, Any] | None:
        body = self.body
        reason = finish_reason(delta)
        self.num_generated += len(delta.token_ids)
        self._sums[delta.index] += sum(delta.token_logprobs)
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = self.prompt_logprobs(delta.prompt_logprobs, self.prompts[0])
        if not (delta.text or reason or (delta.token_ids and self.tells_tokens)):
            return None
        logprobs = None
        if body.logprobs:
            rows = zip(delta.token_ids, delta.logprobs or (), strict=True)
            logprobs = {"content": [self._row(token_id, top) for token_id, top in rows], "refusal": None}
        message: dict[str, Any] = {"delta": {"content": delta.text}}
        if not body.stream:
            message = {"message": {"role": "assistant", "content": delta.text, "refusal": None}}
        choice: dict[str, Any] = {
            "index": delta.index,
            **message,
            "logprobs": logprobs,
            "finish_reason": reason,
            **self.extras(delta, reason is not None),
        }
        if reason is not None:
            choice["cumulative_logprob"] = finite(self._sums[delta.index])
        return choice

    def envelope(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """With what there is to say about the prompt: once, as it is one for all choices."""
        whole = super().envelope(choices, usage)
        if self.body.return_token_ids and not self._prompt_told:
            whole["prompt_token_ids"], self._prompt_told = self.prompts[0], True
        if self._prompt_logprobs is not None:
            whole["prompt_logprobs"], self._prompt_logprobs = self._prompt_logprobs, None
        return whole

    def _row(self, token_id: int, entry: list[TokenLogprob]) -> dict[str, Any]:
        own = next(token for token in entry if token.token_id == token_id)
        top = [self._named(token) for token in entry[: self.body.top_logprobs or 0]]
        return {**self._named(own), "top_logprobs": top}

    def _named(self, token: TokenLogprob) -> dict[str, Any]:
        text = self.state.text
        as_id = bool(self.body.return_tokens_as_token_ids)
        return {
            "token": text.token_text(token.token_id, as_id=as_id),
            "logprob": finite(token.logprob),
            "bytes": list(text.token_bytes(token.token_id)),
        }

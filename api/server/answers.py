"""What completions and chat have in common: an answer that is rendered as a whole or in pieces.

A whole choice is rendered as one piece, so the two cannot differ.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import Response

from ramet.api.server.ids import new_id
from ramet.api.server.schemas import GenerationRequest
from ramet.api.server.sse import DONE, EventStream, JsonResponse, error_event, event, unless_gone
from ramet.api.server.state import State, request_id_of
from ramet.engine.outputs import Choice, Delta, Output
from ramet.engine.sampler import TokenLogprob

LOWEST = -9999.0  # stands for minus infinity, which JSON has not


class Answer(ABC):
    """One request's answer while it grows."""

    endpoint: str
    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(
        self, state: State, body: GenerationRequest, model: str, prompts: Sequence[list[int]], n: int
    ) -> None:
        self.state = state
        self.body = body
        self.prompts = prompts
        self.n = n
        self.num_generated = 0
        self.timer = state.metrics.timer(self.endpoint)  # runs before the engine is asked
        logprobs = getattr(body, "logprobs", None)  # a number or a flag: 0 asks for something
        # Whether there is something to tell of a token that adds no text yet.
        self.tells_tokens = bool(
            body.return_token_ids
            or body.return_entropy
            or body.logprob_token_ids
            or body.prompt_logprobs is not None
            or (logprobs is not None and logprobs is not False)
        )
        self._head: dict[str, Any] = {
            "id": new_id(self.id_prefix),
            "object": self.chunk_object if body.stream else self.whole_object,
            "created": int(time.time()),
            "model": model,
        }

    @abstractmethod
    def part(self, delta: Delta) -> dict[str, Any] | None:
        """A piece of one choice as the client gets it; None if there is nothing to show yet."""

    def opening(self) -> Iterable[dict[str, Any]]:
        """Pieces that come before any token."""
        return ()

    def envelope(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        return {**self._head, "choices": choices, "usage": usage}

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        choices = [self.part(delta) for delta in _as_deltas(outputs)]
        return self.envelope([choice for choice in choices if choice is not None], self.usage(outputs))

    def usage(self, outputs: Sequence[Output] | None = None) -> dict[str, Any]:
        """What was computed so far; what was found in the cache is known with the outputs."""
        num_prompt = sum(map(len, self.prompts))
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": self.num_generated,
            "total_tokens": num_prompt + self.num_generated,
        }
        if outputs is not None:
            cached = sum(output.num_cached_tokens for output in outputs)
            usage["prompt_tokens_details"] = {
                "cached_tokens": cached,
                "cache_write_tokens": num_prompt - cached,
            }
        return usage

    def extras(self, delta: Delta, finished: bool) -> dict[str, Any]:
        """The fields beyond OpenAI's, those that were asked for."""
        body = self.body
        fields: dict[str, Any] = {}
        if body.return_token_ids:
            fields["token_ids"] = delta.token_ids
        if delta.score is not None:
            fields["score"] = finite(delta.score)
        if delta.entropies is not None:
            fields["entropy"] = delta.entropies
        if delta.named_logprobs is not None:
            fields["logprob_token_ids"] = [
                {str(token.token_id): finite(token.logprob) for token in named}
                for named in delta.named_logprobs
            ]
        if finished:
            reason = delta.stop_reason
            wanted = isinstance(reason, str) or reason in (body.stop_token_ids or ())
            # vLLM tells what stopped it only where the request named it, SGLang always.
            fields["stop_reason"] = reason if wanted else None
            fields["matched_stop"] = reason
        return fields

    def prompt_logprobs(self, entries: list[list[TokenLogprob] | None], prompt: list[int]) -> list[Any]:
        """vLLM's form; the prompt's own token comes first in each entry."""
        shown: list[Any] = []
        most = self.body.prompt_logprobs or 0
        for token_id, entry in zip(prompt, entries, strict=True):
            if entry is None:
                shown.append(None)
                continue
            ranked = {token.token_id: (rank, token.logprob) for rank, token in enumerate(entry, 1)}
            top = [token.token_id for token in entry[:most] if token.token_id != token_id]
            shown.append(
                {
                    str(one): {
                        "logprob": finite(ranked[one][1]),
                        "rank": ranked[one][0] if ranked[one][0] <= most else None,
                        "decoded_token": self.state.text.token_text(one),
                    }
                    for one in (token_id, *top)
                }
            )
        return shown


def finish_reason(ended: Delta | Choice) -> str | None:
    return "cancelled" if ended.finish_reason == "abort" else ended.finish_reason


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def _as_deltas(outputs: Sequence[Output]) -> list[Delta]:
    """Every choice as one piece."""
    return [
        Delta(
            choice.index,
            choice.text,
            choice.token_ids,
            choice.finish_reason,
            prompt_logprobs=output.prompt_logprobs if choice.index == 0 else None,
            prompt_index=prompt_index,
            stop_reason=choice.stop_reason,
            token_logprobs=choice.token_logprobs,
            logprobs=choice.logprobs,
            named_logprobs=choice.named_logprobs,
            entropies=choice.entropies,
            score=choice.score,
        )
        for prompt_index, output in enumerate(outputs)
        for choice in output.choices
    ]


class Source(Protocol):
    """Where an answer's tokens come from: a Work, or what reads as one."""

    async def read(self) -> list[Delta]: ...

    async def result(self) -> list[Output]: ...


async def respond(request: Request, answer: Answer, work: Source, held: ExitStack) -> Response:
    """Send the answer. `held` is what must be let go of afterwards; a stream takes it over."""
    if answer.body.stream:
        taken = held.pop_all()
        return EventStream(_events(answer, work, request_id_of(request)), taken.close)
    outputs = await unless_gone(request, work.result())
    return JsonResponse(answer.whole(outputs))


async def _events(answer: Answer, work: Source, request_id: str) -> AsyncGenerator[bytes]:
    options = answer.body.stream_options
    continuous = options is not None and bool(options.continuous_usage_stats)
    try:
        for choice in answer.opening():
            yield event(answer.envelope([choice], answer.usage() if continuous else None))
        told = False
        while deltas := await work.read():
            told = True
            yield _parts(answer, deltas, continuous)
        outputs = await work.result()
        if not told:  # a beam search, which knows nothing for sure before its end
            yield _parts(answer, _as_deltas(outputs), continuous)
        if options is not None and options.include_usage:
            yield event(answer.envelope([], answer.usage(outputs)))
    except Exception as error:
        yield error_event(error, request_id)
    yield DONE


def _parts(answer: Answer, deltas: Sequence[Delta], continuous: bool) -> bytes:
    """The events of what has come now."""
    parts = []
    answer.timer.tokens(max((len(delta.token_ids) for delta in deltas), default=0))
    for delta in deltas:
        if (choice_part := answer.part(delta)) is not None:
            usage = answer.usage() if continuous else None
            parts.append(event(answer.envelope([choice_part], usage)))
    return b"".join(parts)

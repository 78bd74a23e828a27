"""Generating on branches: into the branch itself, or into new children, whole or as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import Response

from ramet.api.server.answers import finish_reason, finite
from ramet.api.server.branch_schemas import BeamRequest, GenerateRequest
from ramet.api.server.branch_store import Entry
from ramet.api.server.branch_verbs import Context
from ramet.api.server.errors import invalid, unsupported
from ramet.api.server.generating import Generating, grow
from ramet.api.server.ids import new_id
from ramet.api.server.metrics import Timer
from ramet.api.server.sampling import sampling_params
from ramet.api.server.schemas import SamplingFields
from ramet.api.server.sse import DONE, EventStream, error_event, event
from ramet.engine.async_work import Work
from ramet.engine.outputs import Choice, Delta
from ramet.engine.sampling_params import MAX_LOGPROBS, SamplingParams

_ENDPOINT = "/v1/branches/{branch_id}/generate"
_OF_PROMPTS = ("prompt_logprobs",)  # fields that say nothing on a branch


def _params_of(body: GenerateRequest) -> list[SamplingParams]:
    """One for all, or one for each child. Raises ApiError or InvalidInput."""
    for name in ("tools", "response_format"):
        if getattr(body, name) not in (None, [], {"type": "text"}):
            raise unsupported(name)
    count = count_of_top(body)
    if body.params is None:
        return [_one(body, "", count)]
    given = sorted(name for name in SamplingFields.model_fields if getattr(body, name) is not None)
    if given:
        raise invalid("params", f"cannot be given together with {', '.join(given)}")
    if body.into == "self":
        raise invalid("params", 'need into to be "children"')
    many = [_one(one, f"params.{index}.", count) for index, one in enumerate(body.params)]
    for index, one in enumerate(many):
        if one.n != 1:
            raise invalid(f"params.{index}.n", "must be 1")
    return many


def count_of_top(body: GenerateRequest | BeamRequest) -> int | None:
    """How many of the likeliest tokens are to be told with each token."""
    if body.top_logprobs is not None and not (body.logprobs and 0 <= body.top_logprobs <= MAX_LOGPROBS):
        raise invalid("top_logprobs", f"must be between 0 and {MAX_LOGPROBS}, and needs logprobs to be true")
    return body.top_logprobs or None


def _one(body: SamplingFields, where: str, top_logprobs: int | None) -> SamplingParams:
    for name in _OF_PROMPTS:
        if getattr(body, name) is not None:
            raise unsupported(f"{where}{name}", "says nothing on a branch; see score and extend")
    return sampling_params(body, max_tokens=body.max_tokens, logprobs=top_logprobs)


def _generating(context: Context, entry: Entry, body: GenerateRequest) -> Generating:
    """What the body asks for. Raises ApiError or InvalidInput."""
    params = _params_of(body)
    into_children = body.into == "children" or body.params is not None
    if not into_children and params[0].n != 1:
        raise invalid("n", 'needs into to be "children"', code="n_requires_children")
    return Generating(
        context,
        entry,
        params,
        into_children=into_children,
        expect_position=body.expect_position,
        checkpoint=body.checkpoint,
    )


async def generate(context: Context, entry: Entry, body: GenerateRequest) -> dict[str, Any]:
    """All choices, when the last one has ended."""
    generating = _generating(context, entry, body)
    abandoned = True
    try:
        work = await generating.begin(read=False)
        choices = await generating.choices(work)
        for index, choice in enumerate(choices):
            await generating.complete(index, choice)
        abandoned = False
    finally:
        await asyncio.shield(generating.end(abandoned=abandoned))
    return {
        "id": new_id("gen_"),
        "object": "branch.generation",
        "parent_id": entry.id,
        "choices": [_shown(generating, body, index, choice) for index, choice in enumerate(choices)],
        "usage": generating.usage(choices),
    }


async def stream(context: Context, entry: Entry, body: GenerateRequest) -> Response:
    """The same as server-sent events: deltas, each branch's completion, then the usage."""
    generating = _generating(context, entry, body)
    timer = context.state.metrics.timer(_ENDPOINT)  # runs while it waits for its turn, too
    try:
        work = await generating.begin(read=True)
    except BaseException:
        await asyncio.shield(generating.end(abandoned=True))
        raise
    told = _Told(generating, body, work, timer)

    def close() -> None:
        context.state.spawn(told.close())

    return EventStream(told.events(context.request_id), close)


class _Told:
    """A generation whose client hears of it as it goes."""

    def __init__(self, generating: Generating, body: GenerateRequest, work: Work[Any], timer: Timer) -> None:
        self._generating = generating
        self._body = body
        self._work = work
        self._timer = timer
        self._choices = [Choice(index) for index in range(generating.num_choices)]

    async def events(self, request_id: str) -> AsyncGenerator[bytes]:
        try:
            async for part in self._parts():
                yield part
            await self._generating.choices(self._work)
            whole = {
                "type": "generation.completed",
                "id": new_id("gen_"),
                "parent_id": self._generating.entry.id,
                "usage": self._generating.usage(self._choices),
            }
            yield event(whole, name="generation.completed")
        except Exception as error:
            yield error_event(error, request_id)
        yield DONE

    async def _parts(self) -> AsyncGenerator[bytes]:
        while deltas := await self._generating.read(self._work):
            self._timer.tokens(max(len(delta.token_ids) for delta in deltas))
            for delta in deltas:
                choice = self._choices[delta.index]
                grow(choice, delta)
                if delta.text or (delta.token_ids and self._body.return_token_ids):
                    yield self._delta(delta)
                if delta.finish_reason is not None:
                    await self._generating.complete(delta.index, choice)
                    shown = _shown(self._generating, self._body, delta.index, choice)
                    yield event({"type": "branch.completed", **shown}, name="branch.completed")

    def _delta(self, delta: Delta) -> bytes:
        data: dict[str, Any] = {
            "type": "branch.output_text.delta",
            "index": delta.index,
            "branch_id": self._generating.target(delta.index).id,
            "delta": delta.text,
        }
        if self._body.return_token_ids:
            data["token_ids"] = delta.token_ids
        return event(data, name="branch.output_text.delta")

    async def close(self) -> None:
        """The client has all, or has gone: then what has not ended ends, unless it asked for it to go on."""
        if self._body.on_disconnect == "continue":
            try:
                async for _ in self._parts():
                    pass
            except Exception:
                pass  # of the engine: whoever asks for the branch is told
        await self._generating.end_with(self._choices)


def _shown(generating: Generating, body: GenerateRequest, index: int, choice: Choice) -> dict[str, Any]:
    """A choice as the client gets it."""
    branch = generating.target(index)
    shown = {**whereabouts(branch), **shown_choice(body, index, choice, generating.start)}
    if choice.entropies is not None:
        shown["entropy"] = choice.entropies
    if choice.named_logprobs is not None:
        shown["logprob_token_ids"] = [_by_id(row) for row in choice.named_logprobs]
    return shown


def whereabouts(branch: Entry) -> dict[str, Any]:
    """Which branch has a choice: enough to go on with it."""
    return {"branch_id": branch.id, "tree_id": branch.tree.id, "parent_id": branch.parent_id}


def shown_choice(
    body: GenerateRequest | BeamRequest, index: int, choice: Choice, start: int
) -> dict[str, Any]:
    """What a client is told of a choice that begins at position `start`."""
    shown: dict[str, Any] = {
        "index": index,
        "finish_reason": finish_reason(choice),
        "stop_reason": choice.stop_reason,
        "matched_stop": choice.stop_reason,
        "text": choice.text,
        "message": {"role": "assistant", "content": choice.text},
        "start_position": start,
        "end_position": start + len(choice.token_ids),
        "cumulative_logprob": finite(choice.cumulative_logprob),
        "mean_logprob": finite(choice.mean_logprob),
    }
    if body.return_token_ids:
        shown["token_ids"] = choice.token_ids
    if body.logprobs:
        shown["token_logprobs"] = [finite(one) for one in choice.token_logprobs]
    if choice.logprobs is not None and body.top_logprobs:
        shown["top_logprobs"] = [_by_id(row) for row in choice.logprobs]
    return shown


def _by_id(row: list[Any]) -> dict[str, float]:
    return {str(token.token_id): finite(token.logprob) for token in row}

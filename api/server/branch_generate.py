"""Generating on branches: into the branch itself, or into new children, whole or as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

from fastapi import Request
from starlette.responses import Response

from ramet.api.server import leases
from ramet.api.server.answers import finite
from ramet.api.server.branch_schemas import BeamRequest, GenerateRequest
from ramet.api.server.branch_store import Entry
from ramet.api.server.branch_verbs import Context, check_position, child_of, register
from ramet.api.server.errors import ApiError, invalid, unsupported
from ramet.api.server.ids import new_id
from ramet.api.server.sampling import sampling_params
from ramet.api.server.schemas import SamplingFields
from ramet.api.server.sse import DONE, EventStream, error_event, event
from ramet.engine.async_llm import AsyncBranch
from ramet.engine.async_work import Work
from ramet.engine.errors import BranchReleased
from ramet.engine.outputs import Choice, Delta
from ramet.engine.sampling_params import MAX_LOGPROBS, SamplingParams

_MAX_UNREAD = 256
_ENDPOINT = "/v1/branches/{branch_id}/generate"
_OF_PROMPTS = ("prompt_logprobs",)  # fields that say nothing on a branch


class Generating:
    """One generation from a branch, from its turn on the branch to the end."""

    def __init__(self, context: Context, entry: Entry, body: GenerateRequest) -> None:
        self.context = context
        self.entry = entry
        self.body = body
        self.id = new_id("gen_")
        self.timer = context.state.metrics.timer(_ENDPOINT)  # runs while it waits for its turn, too
        self.params = _params_of(body)
        self.into_children = body.into == "children" or body.params is not None
        if not self.into_children and self.params[0].n != 1:
            raise invalid("n", 'needs into to be "children"', code="n_requires_children")
        self.start = 0
        self.resident = 0
        self.children: list[Entry] = []
        self._ended = False
        self._held = AsyncExitStack()
        self._loop = asyncio.get_running_loop()

    @property
    def num_choices(self) -> int:
        return self.params[0].n if len(self.params) == 1 else len(self.params)

    async def begin(self, *, read: bool) -> Work[Any]:
        """Wait for the turn and start. Whoever calls it calls `end` in any case."""
        entry, store = self.entry, self.context.store
        works = self._held.enter_context(self.context.tenant.running(self.context.request_id))
        await self._held.enter_async_context(entry.turn())
        check_position(entry, self.body.expect_position)
        entry.check_mark(self.body.checkpoint)
        self.start = len(entry.branch)
        if self.into_children:
            store.check_room(entry.tree, self.num_choices)
        # What it may generate, as far as it said so; the rest is bounded by the context.
        most = self.context.state.engine.config.max_tokens
        entry.tree.check_tokens(sum(min(one.max_tokens or 0, most) * one.n for one in self.params))
        max_unread = _MAX_UNREAD if read else None
        looking = asyncio.ensure_future(self.context.state.engine.look([entry.branch]))
        await asyncio.sleep(0)  # the look is sent before the start, and so sees what was there
        if self.into_children:
            params = self.params if self.body.params is not None else self.params[0]
            work: Work[Any] = entry.branch.start_expand(params=params, max_unread=max_unread, born=self._born)
        else:
            work = entry.branch.start_generate(self.params[0], max_unread=max_unread)
        self._held.callback(work.close)
        works.append(work)
        await work.started()
        entry.work = work
        self.resident = (await looking)[0].resident_tokens  # at one go with the start, between two steps
        entry.tree.events.add("branch.generating", {"branch_id": entry.id, "n": self.num_choices})
        return work

    def _born(self, branches: list[AsyncBranch]) -> None:
        """On the engine's thread. The tables are the event loop's."""
        self._loop.call_soon_threadsafe(self._register, branches)

    def _register(self, branches: list[AsyncBranch]) -> None:
        state, tree = self.context.state, self.entry.tree
        for branch in branches:
            child = child_of(state, self.entry, branch, self.start)
            self.children.append(child)
            if self._ended or tree.events.closed:  # nobody asks for it any more
                child.gone = True
                state.spawn(branch.prune())
            else:
                register(self.context.store, child)
                state.metrics.forks.inc()

    def target(self, index: int) -> Entry:
        """The branch that a choice goes to."""
        return self.children[index] if self.into_children else self.entry

    async def complete(self, index: int, choice: Choice) -> dict[str, Any]:
        """A choice has ended: its branch is free to be used, whatever the others do."""
        entry = self.target(index)
        entry.num_generated += len(choice.token_ids)
        if not entry.gone:
            entry.mark(self.body.checkpoint)
            await leases.use(self.context.state, entry)
            data = {"branch_id": entry.id, "position": self.start + len(choice.token_ids)}
            entry.tree.events.add("branch.completed", {**data, "finish_reason": _reason(choice)})
        return self._shown(index, entry, choice)

    def _shown(self, index: int, entry: Entry, choice: Choice) -> dict[str, Any]:
        shown = shown_choice(self.body, index, choice, self.start)
        shown["branch_id"] = entry.id
        if choice.entropies is not None:
            shown["entropy"] = choice.entropies
        if choice.named_logprobs is not None:
            shown["logprob_token_ids"] = [_by_id(row) for row in choice.named_logprobs]
        return shown

    def usage(self, num_generated: int) -> dict[str, Any]:
        return {
            "prompt_tokens": self.start,
            "completion_tokens": num_generated,
            "total_tokens": self.start + num_generated,
            "prompt_tokens_details": {
                "cached_tokens": self.resident,
                "cache_write_tokens": self.start - self.resident,
            },
        }

    async def end(self, *, abandoned: bool) -> None:
        """Leave the branch to the next one; children that nobody will hear of are let go of."""
        self._ended = True
        self.entry.work = None
        await self._held.aclose()
        if abandoned:
            for child in self.children:
                await abandon(self.context, child)


def shown_choice(
    body: GenerateRequest | BeamRequest, index: int, choice: Choice, start: int
) -> dict[str, Any]:
    """What a client is told of a choice that begins at position `start`."""
    shown: dict[str, Any] = {
        "index": index,
        "finish_reason": _reason(choice),
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


async def abandon(context: Context, child: Entry) -> None:
    """Let go of a child that nobody will hear of."""
    if not child.gone:
        context.store.remove(child, "pruned")
        context.state.metrics.prunes.labels("abandoned").inc()
    await child.branch.prune()


def count_of_top(body: GenerateRequest | BeamRequest) -> int | None:
    """How many of the likeliest tokens are to be told with each token."""
    if body.top_logprobs is not None and not (body.logprobs and 0 <= body.top_logprobs <= MAX_LOGPROBS):
        raise invalid("top_logprobs", f"must be between 0 and {MAX_LOGPROBS}, and needs logprobs to be true")
    return body.top_logprobs or None


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


def _one(body: SamplingFields, where: str, top_logprobs: int | None) -> SamplingParams:
    for name in _OF_PROMPTS:
        if getattr(body, name) is not None:
            raise unsupported(f"{where}{name}", "says nothing on a branch; see score and extend")
    return sampling_params(body, max_tokens=body.max_tokens, logprobs=top_logprobs)


async def generate(context: Context, entry: Entry, body: GenerateRequest) -> dict[str, Any]:
    """All choices, when the last one has ended."""
    generating = Generating(context, entry, body)
    abandoned = True
    try:
        work = await generating.begin(read=False)
        result = await result_of(entry, work)
        if generating.into_children:
            choices = [branch.output for branch in result]
        else:
            choices = [result]
        shown = [await generating.complete(index, choice) for index, choice in enumerate(choices)]
        abandoned = False
    finally:
        await asyncio.shield(generating.end(abandoned=abandoned))
    num_generated = sum(len(choice.token_ids) for choice in choices)
    return {
        "id": generating.id,
        "object": "branch.generation",
        "parent_id": entry.id,
        "choices": shown,
        "usage": generating.usage(num_generated),
    }


async def result_of(entry: Entry, work: Work[Any]) -> Any:
    try:
        return await work.result()
    except BranchReleased:
        if entry.gone:
            raise
        raise ApiError(409, "cancelled before the first token", code="cancelled") from None


async def stream(context: Context, entry: Entry, body: GenerateRequest, request: Request) -> Response:
    """The same as server-sent events: deltas, each branch's completion, then the usage."""
    generating = Generating(context, entry, body)
    try:
        work = await generating.begin(read=True)
    except BaseException:
        await asyncio.shield(generating.end(abandoned=True))
        raise
    told = _Told(generating, work)

    def close() -> None:
        context.state.spawn(told.close())

    return EventStream(told.events(context.request_id), close)


class _Told:
    """A generation whose client hears of it as it goes."""

    def __init__(self, generating: Generating, work: Work[Any]) -> None:
        self._generating = generating
        self._work = work
        self._choices = [Choice(index) for index in range(generating.num_choices)]
        self._done = 0

    async def events(self, request_id: str) -> AsyncGenerator[bytes]:
        generating = self._generating
        try:
            async for part in self._parts():
                yield part
            await result_of(generating.entry, self._work)
            num_generated = sum(len(choice.token_ids) for choice in self._choices)
            head = {"id": generating.id, "parent_id": generating.entry.id}
            yield event(
                {"type": "generation.completed", **head, "usage": generating.usage(num_generated)},
                name="generation.completed",
            )
        except Exception as error:
            yield error_event(error, request_id)
        yield DONE

    async def _parts(self) -> AsyncGenerator[bytes]:
        while deltas := await self._work.read():
            self._generating.timer.tokens(max(len(delta.token_ids) for delta in deltas))
            for delta in deltas:
                choice = self._choices[delta.index]
                _grow(choice, delta)
                if delta.text or (delta.token_ids and self._generating.body.return_token_ids):
                    yield self._delta(delta)
                if delta.finish_reason is not None:
                    self._done += 1
                    shown = await self._generating.complete(delta.index, choice)
                    yield event({"type": "branch.completed", **shown}, name="branch.completed")

    def _delta(self, delta: Delta) -> bytes:
        data: dict[str, Any] = {
            "type": "branch.output_text.delta",
            "index": delta.index,
            "branch_id": self._generating.target(delta.index).id,
            "delta": delta.text,
        }
        if self._generating.body.return_token_ids:
            data["token_ids"] = delta.token_ids
        return event(data, name="branch.output_text.delta")

    async def close(self) -> None:
        """The client has all, or has gone: then what has not ended ends, unless it asked for it to go on."""
        generating = self._generating
        if self._done < len(self._choices) and generating.body.on_disconnect == "continue":
            try:
                async for _ in self._parts():
                    pass
            except Exception:
                pass  # of the engine: whoever asks for the branch is told
        await generating.end(abandoned=False)
        for child, choice in zip(generating.children, self._choices, strict=True):
            if choice.finish_reason is None:
                await abandon(generating.context, child)


def _grow(choice: Choice, delta: Delta) -> None:
    choice.text += delta.text
    choice.token_ids += delta.token_ids
    choice.token_logprobs += delta.token_logprobs
    for name in ("logprobs", "named_logprobs", "entropies"):
        more = getattr(delta, name)
        if more is not None:
            setattr(choice, name, [*(getattr(choice, name) or ()), *more])
    choice.finish_reason = delta.finish_reason
    choice.stop_reason = delta.stop_reason


def _reason(choice: Choice) -> str | None:
    return "cancelled" if choice.finish_reason == "abort" else choice.finish_reason


def _by_id(row: list[Any]) -> dict[str, float]:
    return {str(token.token_id): finite(token.logprob) for token in row}

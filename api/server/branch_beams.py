"""Beam search after a prompt, or from a branch into new children, whole or with its progress as events."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

from starlette.responses import Response

from ramet.api.server import leases
from ramet.api.server.answers import finite
from ramet.api.server.branch_generate import count_of_top, shown_choice, whereabouts
from ramet.api.server.branch_schemas import BeamRequest, CreateRequest, PromptBeamRequest
from ramet.api.server.branch_store import Entry
from ramet.api.server.branch_verbs import Context, check_position, child_of, make, register, tokens_of
from ramet.api.server.errors import ApiError, blaming, invalid, unsupported
from ramet.api.server.generating import abandon, result_of
from ramet.api.server.ids import new_id
from ramet.api.server.sampling import beam_search_params
from ramet.api.server.sse import DONE, EventStream, error_event, event
from ramet.engine.async_llm import AsyncBranch
from ramet.engine.async_work import Work
from ramet.engine.beam_params import BeamSearchParams
from ramet.engine.errors import BranchReleased
from ramet.engine.outputs import BeamProgress, Choice, Output

_OF_PROMPTS = ("model", "messages", "prompt", "token_ids", "add_generation_prompt", "chat_template_kwargs")
# What other engines have, and the values that ask for nothing.
_HARMLESS = {"num_beam_groups": 1, "diversity_penalty": 0, "response_format": {"type": "text"}}


class Searching(ABC):
    """One beam search, from its turn on the branch to the end."""

    endpoint: str

    def __init__(self, context: Context, body: BeamRequest) -> None:
        self.context = context
        self.body = body
        self.id = new_id("beam_")
        self.timer = context.state.metrics.timer(self.endpoint)
        self.params = _params_of(body)
        self.start = 0
        self.cached = 0
        self._held = AsyncExitStack()
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._progress: BeamProgress | None = None
        self.told = False  # whether the client has the whole answer

    @abstractmethod
    async def begin(self) -> Work[Any]:
        """Start. Whoever calls it calls `end` in any case."""

    @abstractmethod
    async def result(self, work: Work[Any]) -> dict[str, Any]:
        """The whole answer."""

    async def end(self) -> None:
        """Leave nothing that runs."""
        await self._held.aclose()

    def hear(self, progress: BeamProgress) -> None:
        """On the engine's thread. A slow reader hears of the last step only."""
        self._loop.call_soon_threadsafe(self._tell, progress)

    def _tell(self, progress: BeamProgress) -> None:
        self._progress = progress
        self._news.set()

    async def events(self, work: Work[Any]) -> AsyncGenerator[bytes]:
        """Progress while there is some, then each beam, then the usage."""
        try:
            result = asyncio.ensure_future(self.result(work))
            try:
                result.add_done_callback(lambda _: self._news.set())
                while not result.done():
                    await self._news.wait()
                    self._news.clear()
                    if self._progress is not None:
                        progress, self._progress = self._progress, None
                        self.timer.tokens(1)
                        yield self._event("beam_search.progress", _shown_progress(progress))
            finally:
                result.cancel()
            answer = result.result()
            for choice in answer.pop("choices"):
                yield self._event("branch.completed", choice)
            self.told = True
            yield self._event("beam_search.completed", answer)
        except Exception as error:
            yield error_event(error, self.context.request_id)
        yield DONE

    def _event(self, name: str, data: dict[str, Any]) -> bytes:
        return event({"type": name, **data}, name=name)

    def answer(self, choices: list[dict[str, Any]], parent: Entry | None) -> dict[str, Any]:
        num_generated = sum(one["end_position"] - one["start_position"] for one in choices)
        return {
            "id": self.id,
            "object": "beam_search",
            "parent_id": None if parent is None else parent.id,
            "choices": choices,
            "usage": {
                "prompt_tokens": self.start,
                "completion_tokens": num_generated,
                "total_tokens": self.start + num_generated,
                "prompt_tokens_details": {
                    "cached_tokens": self.cached,
                    "cache_write_tokens": self.start - self.cached,
                },
            },
        }

    def shown(self, choice: Choice) -> dict[str, Any]:
        assert choice.score is not None, "a beam has one"
        shown = shown_choice(self.body, choice.index, choice, self.start)
        return {**shown, "score": finite(choice.score), "beam_indices": choice.beam_indices}


class PromptSearch(Searching):
    """Of a prompt, whose beams nobody keeps."""

    body: PromptBeamRequest
    endpoint = "/v1/beam_search"

    def __init__(self, context: Context, body: PromptBeamRequest, prompt_field: str) -> None:
        super().__init__(context, body)
        self.prompt_field = prompt_field

    async def begin(self) -> Work[Any]:
        context = self.context
        context.state.check_model(self.body.model)
        works = self._held.enter_context(context.tenant.running(context.request_id))
        token_ids, _ = await tokens_of(context.state, self.body)
        self.start = len(token_ids)
        work = context.state.engine.start(
            [token_ids],
            self.params,
            namespace=context.tenant.namespace(self.body.cache_salt),
            on_progress=self.hear if self.body.stream else None,
        )
        self._held.callback(work.close)
        works.append(work)
        with blaming(self.prompt_field):
            await work.started()
        context.state.metrics.beams(self.params)
        return work

    async def result(self, work: Work[list[Output]]) -> dict[str, Any]:
        try:
            (output,) = await work.result()
        except BranchReleased:
            raise ApiError(409, "cancelled before the first token", code="cancelled") from None
        self.cached = output.num_cached_tokens
        return self.answer([self.shown(choice) for choice in output.choices], None)


class BranchSearch(Searching):
    """Of a branch, whose new children the beams are."""

    endpoint = "/v1/branches/{branch_id}/beam_search"

    def __init__(self, context: Context, entry: Entry, body: BeamRequest, *, new: bool = False) -> None:
        """`new`: the branch was made for this search, and goes if that fails."""
        super().__init__(context, body)
        self.entry = entry
        self._new = new
        self._children: list[Entry] = []
        self._work: Work[Any] | None = None

    async def begin(self) -> Work[Any]:
        context, entry, params = self.context, self.entry, self.params
        works = self._held.enter_context(context.tenant.running(context.request_id))
        await self._held.enter_async_context(entry.turn())
        check_position(entry, self.body.expect_position)
        self.start = len(entry.branch)
        context.store.check_room(entry.tree, params.num_returned)
        most = context.state.engine.config.max_tokens
        entry.tree.check_tokens(min(params.max_tokens or 0, most) * params.num_returned)
        looking = asyncio.ensure_future(context.state.engine.look([entry.branch]))
        await asyncio.sleep(0)  # the look is sent before the start, and so sees what was there
        work = entry.branch.start_beam_search(params, on_progress=self.hear if self.body.stream else None)
        self._held.callback(work.close)
        works.append(work)
        await work.started()
        entry.work = self._work = work
        self.cached = (await looking)[0].resident_tokens
        context.state.metrics.beams(params)
        entry.tree.events.add("branch.generating", {"branch_id": entry.id, "n": params.num_returned})
        return work

    async def result(self, work: Work[list[AsyncBranch]]) -> dict[str, Any]:
        self._register(await result_of(self.entry, work))
        choices = []
        for child in self._children:
            assert child.branch.output is not None, "it was searched for"
            shown = self.shown(child.branch.output)
            choices.append({**whereabouts(child), **shown})
            if not child.gone:
                await leases.use(self.context.state, child)
                data = {"branch_id": child.id, "position": shown["end_position"]}
                child.tree.events.add("branch.completed", {**data, "finish_reason": shown["finish_reason"]})
        return self.answer(choices, self.entry)

    def _register(self, branches: list[AsyncBranch]) -> None:
        """They are the tenant's from now on."""
        state, tree = self.context.state, self.entry.tree
        if self.entry.pruned or tree.events.closed:
            for branch in branches:
                state.spawn(branch.prune())
            raise ApiError(409, "the branch or its tree was deleted meanwhile", code="cancelled")
        for branch in branches:
            child = child_of(state, self.entry, branch, self.start)
            child.num_generated = len(branch) - self.start
            register(self.context.store, child)
            self._children.append(child)
            state.metrics.forks.inc()

    async def end(self) -> None:
        """Leave the branch to the next one; let go of children that nobody will hear of."""
        if self.entry.work is self._work:
            self.entry.work = None
        await super().end()
        if not self.told:
            for entry in [*self._children, *([self.entry] if self._new else [])]:
                await abandon(self.context, entry)


async def search_branch(context: Context, entry: Entry, body: BeamRequest) -> dict[str, Any]:
    """All beams, when the search has ended."""
    return await _whole(BranchSearch(context, entry, body))


async def search_prompt(context: Context, body: PromptBeamRequest) -> dict[str, Any]:
    return await _whole(await _of_prompt(context, body))


async def _whole(searching: Searching) -> dict[str, Any]:
    try:
        answer = await searching.result(await searching.begin())
        searching.told = True
        return answer
    finally:
        await asyncio.shield(searching.end())


async def stream_branch(context: Context, entry: Entry, body: BeamRequest) -> Response:
    """The same as server-sent events."""
    return await _stream(BranchSearch(context, entry, body))


async def stream_prompt(context: Context, body: PromptBeamRequest) -> Response:
    return await _stream(await _of_prompt(context, body))


async def _stream(searching: Searching) -> Response:
    try:
        work = await searching.begin()
    except BaseException:
        await asyncio.shield(searching.end())
        raise

    def close() -> None:
        searching.context.state.spawn(searching.end())

    return EventStream(searching.events(work), close)


async def _of_prompt(context: Context, body: PromptBeamRequest) -> Searching:
    """A search of the prompt itself, or of a new branch at its end if branches are to be kept."""
    given = [name for name in ("messages", "prompt", "token_ids") if getattr(body, name) is not None]
    if len(given) != 1:
        raise invalid("messages", "or prompt or token_ids must be given, and only one of them")
    if not body.return_branches:
        if body.expect_position is not None:
            raise invalid("expect_position", "must be left out: there is no branch yet")
        return PromptSearch(context, body, given[0])
    _params_of(body)  # what is wrong is said before there is a branch
    fields = {name: getattr(body, name) for name in (*_OF_PROMPTS, "cache_salt")}
    root = await make(context, CreateRequest(**fields, prefill="lazy"))
    return BranchSearch(context, root, body, new=True)


def _params_of(body: BeamRequest) -> BeamSearchParams:
    """Raises ApiError or InvalidInput."""
    for name, harmless in _HARMLESS.items():
        if getattr(body, name) not in (None, harmless):
            raise unsupported(name)
    return beam_search_params(body, max_tokens=body.max_tokens, logprobs=count_of_top(body))


def _shown_progress(progress: BeamProgress) -> dict[str, Any]:
    return {
        "num_tokens": progress.num_tokens,
        "num_running": progress.num_running,
        "num_finished": progress.num_finished,
        "text": progress.text,
    }

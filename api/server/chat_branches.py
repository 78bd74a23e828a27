"""Chat completions on branches: `messages` stay the whole conversation, the tokens stay the branch's own."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import ExitStack
from typing import Any

from fastapi import Request
from starlette.responses import Response

from ramet.api.server import leases
from ramet.api.server.answers import respond
from ramet.api.server.branch_messages import Splice, history_of
from ramet.api.server.branch_schemas import Settable
from ramet.api.server.branch_store import Entry, Turn
from ramet.api.server.branch_verbs import Context, child_of, new_entry, new_tree, settle
from ramet.api.server.chat_completions import ChatAnswer, chat_params, chat_prompt
from ramet.api.server.errors import ApiError, invalid, unsupported
from ramet.api.server.generating import Generating, abandon, grow
from ramet.api.server.messages import normalised
from ramet.api.server.schemas import ChatRequest
from ramet.engine.async_work import Work
from ramet.engine.beam_params import BeamSearchParams
from ramet.engine.outputs import Choice, Delta, Output


async def prompt_of(context: Context, body: ChatRequest) -> tuple[list[int], Hashable]:
    """What the model reads, and where its prefixes are cached."""
    if body.branch_id is None:
        return await chat_prompt(context.state, body), context.tenant.namespace(body.cache_salt)
    source = _source(context, body.branch_id, body)
    held = source.branch.token_ids
    splice = await _splice(context, source, held, body)
    return [*held[: splice.keep], *splice.token_ids], source.branch.namespace


def _source(context: Context, branch_id: str, body: ChatRequest) -> Entry:
    if body.cache_salt is not None:
        raise invalid("cache_salt", "cannot be given with branch_id: the branch has its own")
    return context.store.get(branch_id, "branch_id")


async def _splice(context: Context, source: Entry, held: list[int], body: ChatRequest) -> Splice:
    turns = list(source.turns)
    whole = await chat_prompt(context.state, body)
    return history_of(context.state.text, held, turns, normalised(body.messages), whole)


async def keep(context: Context, body: ChatRequest, model: str, request: Request) -> Response:
    """A completion whose choices stay: one is the branch of the prompt itself, several are its children."""
    params = chat_params(body)
    if isinstance(params, BeamSearchParams):
        raise unsupported("store_branch", "is not for beams; see /v1/beam_search and return_branches")
    if body.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "says nothing on a branch; see score and extend")
    entry = await _with_prompt(context, body)
    generating = Generating(context, entry, [params], into_children=params.n > 1)
    answer = _KeptAnswer(context.state, body, model, [entry.branch.token_ids], params.n)
    answer.generating = generating
    kept = _Kept(generating, answer.prompts[0])
    with ExitStack() as held:
        held.callback(lambda: context.state.spawn(kept.close()))
        await kept.begin(read=bool(body.stream))
        return await respond(request, answer, kept, held)


async def _with_prompt(context: Context, body: ChatRequest) -> Entry:
    """A new branch that holds the prompt, of which nothing is computed yet."""
    state, store = context.state, context.store
    tree, start = new_tree(state), 0
    if body.branch_id is None:
        store.check_room(None, 1)
        prompt, namespace = await prompt_of(context, body)
        entry = new_entry(state, await state.engine.branch(prompt, namespace=namespace, compute=False), tree)
    else:
        source = _source(context, body.branch_id, body)
        store.check_room(source.tree, 1)
        held = source.branch.token_ids
        splice = await _splice(context, source, held, body)
        source.tree.check_tokens(len(splice.token_ids))
        entry, start = await _forked(context, source, held, splice), splice.keep
    entry.checkpoints["prompt"] = len(entry.branch)
    entry.turns.append(Turn(start, len(entry.branch), normalised(body.messages)))
    await settle(context, [entry], Settable())
    return entry


async def _forked(context: Context, source: Entry, held: list[int], splice: Splice) -> Entry:
    """A child of `source` that holds what the splice says; a new root beside it if nothing of it stays."""
    state = context.state
    if not splice.keep:
        root = await state.engine.branch(splice.token_ids, namespace=source.branch.namespace, compute=False)
        return new_entry(state, root, source.tree)
    (branch,) = await source.branch.fork(at=min(splice.keep, len(source.branch)))
    try:
        if branch.token_ids != held[: splice.keep]:
            raise ApiError(409, "the branch was changed meanwhile", code="head_moved", param="branch_id")
        await branch.extend(splice.token_ids)
    except BaseException:
        await branch.prune()
        raise
    await leases.use(state, source)
    state.metrics.forks.inc()
    return child_of(state, source, branch, splice.keep)


class _KeptAnswer(ChatAnswer):
    """With its last piece each choice tells its branch."""

    generating: Generating

    def part(self, delta: Delta) -> dict[str, Any] | None:
        choice = super().part(delta)
        if choice is not None and choice["finish_reason"] is not None:
            choice["branch_id"] = self.generating.target(delta.index).id
        return choice


class _Kept:
    """A generation on a branch, as answers read their work."""

    def __init__(self, generating: Generating, prompt: list[int]) -> None:
        self._generating = generating
        self._prompt = prompt
        self._choices = [Choice(index) for index in range(generating.num_choices)]
        self._work: Work[Any] | None = None

    async def begin(self, *, read: bool) -> None:
        self._work = await self._generating.begin(read=read)

    async def read(self) -> list[Delta]:
        assert self._work is not None, "it has begun"
        deltas = await self._generating.read(self._work)
        for delta in deltas:
            grow(self._choices[delta.index], delta)
            if delta.finish_reason is not None:
                await self._generating.complete(delta.index, self._choices[delta.index])
        return deltas

    async def result(self) -> list[Output]:
        assert self._work is not None, "it has begun"
        choices = await self._generating.choices(self._work)
        for index, choice in enumerate(choices):
            if self._choices[index].finish_reason is None:  # it was not read
                await self._generating.complete(index, choice)
        self._choices = choices
        return [Output(self._prompt, await self._num_cached(), choices)]

    async def _num_cached(self) -> int:
        """What was resident when the branch was forked, or found when it was new."""
        generating = self._generating
        (look,) = await generating.context.state.engine.look([generating.entry.branch])
        return max(generating.resident, look.cached_tokens)

    async def close(self) -> None:
        """What is not complete is let go of, and the prompt's branch with it if nothing is."""
        await self._generating.end_with(self._choices)
        if all(choice.finish_reason is None for choice in self._choices):
            await abandon(self._generating.context, self._generating.entry)

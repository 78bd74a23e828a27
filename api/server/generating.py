"""A generation from a branch: its turn on the branch, its children, and what stays of it in the end."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from ramet.api.server import leases
from ramet.api.server.answers import finish_reason
from ramet.api.server.branch_store import Entry
from ramet.api.server.branch_verbs import Context, check_position, child_of, register
from ramet.api.server.errors import ApiError
from ramet.engine.async_llm import AsyncBranch
from ramet.engine.async_work import Work
from ramet.engine.errors import BranchReleased
from ramet.engine.outputs import Choice, Delta
from ramet.engine.sampling_params import SamplingParams

_MAX_UNREAD = 256  # tokens of a choice that wait for a slow client before the choice does


class Generating:
    """One generation from a branch, from its turn on the branch to the end."""

    def __init__(
        self,
        context: Context,
        entry: Entry,
        params: list[SamplingParams],
        *,
        into_children: bool,
        expect_position: int | None = None,
        checkpoint: str | None = None,
    ) -> None:
        """`params`: one for all choices, or one for each child."""
        self.context = context
        self.entry = entry
        self.params = params
        self.into_children = into_children
        self._expect_position = expect_position
        self._checkpoint = checkpoint
        self.start = 0
        self.resident = 0
        self.children: list[Entry] = []
        self._work: Work[Any] | None = None
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
        check_position(entry, self._expect_position)
        entry.check_mark(self._checkpoint)
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
            params = self.params if len(self.params) > 1 else self.params[0]
            work: Work[Any] = entry.branch.start_expand(params=params, max_unread=max_unread, born=self._born)
        else:
            work = entry.branch.start_generate(self.params[0], max_unread=max_unread)
        self._held.callback(work.close)
        works.append(work)
        await work.started()
        entry.work = self._work = work
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
            child.growing = asyncio.Event()
            self.children.append(child)
            if self._ended or self.entry.pruned or tree.events.closed:  # nobody asks for it any more
                child.gone = True
                state.spawn(branch.prune())
            else:
                register(self.context.store, child)
                state.metrics.forks.inc()

    def target(self, index: int) -> Entry:
        """The branch that a choice goes to."""
        return self.children[index] if self.into_children else self.entry

    async def complete(self, index: int, choice: Choice) -> None:
        """A choice has ended: its branch is free to be used, whatever the others do."""
        entry = self.target(index)
        entry.num_generated += len(choice.token_ids)
        if entry.growing is not None:
            entry.growing.set()
        if not entry.gone:
            entry.mark(self._checkpoint)
            await leases.use(self.context.state, entry)
            data = {"branch_id": entry.id, "position": self.start + len(choice.token_ids)}
            entry.tree.events.add("branch.completed", {**data, "finish_reason": finish_reason(choice)})

    def usage(self, choices: list[Choice]) -> dict[str, Any]:
        num_generated = sum(len(choice.token_ids) for choice in choices)
        return {
            "prompt_tokens": self.start,
            "completion_tokens": num_generated,
            "total_tokens": self.start + num_generated,
            "prompt_tokens_details": {
                "cached_tokens": self.resident,
                "cache_write_tokens": self.start - self.resident,
            },
        }

    async def read(self, work: Work[Any]) -> list[Delta]:
        """What came since the last time; nothing if it was cancelled before there were children."""
        deltas = await work.read()
        return [] if self.into_children and not self.children else deltas

    async def choices(self, work: Work[Any]) -> list[Choice]:
        """All choices, once the last one has ended."""
        result = await result_of(self.entry, work)
        return [branch.output for branch in result] if self.into_children else [result]

    async def end(self, *, abandoned: bool) -> None:
        """Leave the branch to the next one; children that nobody will hear of are let go of."""
        self._ended = True
        if self.entry.work is self._work:  # and not that of another one, while this one waited
            self.entry.work = None
        await self._held.aclose()
        if abandoned:
            for child in self.children:
                await abandon(self.context, child)

    async def end_with(self, choices: list[Choice]) -> None:
        """`end`, when the client has been told of those of `choices` that are complete."""
        await self.end(abandoned=False)
        for child, choice in zip(self.children, choices, strict=False):  # none may have been born
            if choice.finish_reason is None:
                await abandon(self.context, child)


async def abandon(context: Context, child: Entry) -> None:
    """Let go of a child that nobody will hear of."""
    if not child.gone:
        context.store.remove(child, "pruned")
        context.state.metrics.prunes.labels("abandoned").inc()
    if child.growing is not None:
        child.growing.set()  # who waits for it finds it gone
    await child.branch.prune()


async def result_of(entry: Entry, work: Work[Any]) -> Any:
    """What comes out of the work on a branch. Raises ApiError if it was cancelled before it had any."""
    try:
        return await work.result()
    except BranchReleased:
        if entry.gone:
            raise
        raise ApiError(409, "cancelled before the first token", code="cancelled") from None


def grow(choice: Choice, delta: Delta) -> None:
    """Add a piece of a stream to what there is."""
    choice.text += delta.text
    choice.token_ids += delta.token_ids
    choice.token_logprobs += delta.token_logprobs
    for name in ("logprobs", "named_logprobs", "entropies"):
        more = getattr(delta, name)
        if more is not None:
            setattr(choice, name, [*(getattr(choice, name) or ()), *more])
    choice.finish_reason = delta.finish_reason
    choice.stop_reason = delta.stop_reason

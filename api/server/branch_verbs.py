"""What can be done with a branch, but for generating and scoring. Each verb gives the JSON of its answer.

Fork, get, patch, cancel and delete act at once; what changes a branch's tokens waits for its turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import Request

from ramet.api.server import leases
from ramet.api.server.answers import finite
from ramet.api.server.branch_messages import delta_of
from ramet.api.server.branch_schemas import (
    CreateRequest,
    ExtendRequest,
    ForkRequest,
    PatchRequest,
    PromoteRequest,
    PromptBeamRequest,
    Settable,
    TruncateRequest,
)
from ramet.api.server.branch_store import BranchStore, Entry, Tree, Turn
from ramet.api.server.branch_view import show_branch, show_branches
from ramet.api.server.errors import ApiError, blaming, invalid, not_found, unsupported
from ramet.api.server.events import EventLog
from ramet.api.server.messages import normalised
from ramet.api.server.state import State, request_id_of, state_of, tenant_of
from ramet.api.server.tenants import Tenant
from ramet.engine.async_llm import AsyncBranch
from ramet.engine.tokenizer import validate_token_ids


@dataclass(frozen=True)
class Context:
    """Who asks, and of what."""

    state: State
    tenant: Tenant
    request_id: str

    @property
    def store(self) -> BranchStore:
        return self.tenant.branches


def context_of(request: Request) -> Context:
    return Context(state_of(request), tenant_of(request), request_id_of(request))


async def create(context: Context, body: CreateRequest) -> dict[str, Any]:
    """A root, or with `from` a fork."""
    entry = await make(context, body)
    try:
        return await show_branch(context.state, entry)
    except BaseException:  # the client has gone, say: nobody has heard of it
        await _prune(context, [entry], "abandoned")
        raise


async def make(context: Context, body: CreateRequest) -> Entry:
    """The branch of `create`, of which nobody has been told yet."""
    state, store = context.state, context.store
    state.check_model(body.model)
    if body.tools not in (None, []):
        raise unsupported("tools")
    given = [name for name in ("messages", "prompt", "token_ids", "from_") if getattr(body, name) is not None]
    if len(given) != 1:
        raise invalid("messages", "or prompt, token_ids or from must be given, and only one of them")
    if body.from_ is not None:
        source = store.get(body.from_.branch_id, "from.branch_id")
        position = _position(source, body.from_.position, "from.position")
        (child,) = await _fork(context, source, 1, position, body)
        return child
    tree = None if body.tree_id is None else store.tree(body.tree_id, "tree_id")
    store.check_room(tree, 1)
    token_ids, messages = await tokens_of(state, body)
    if tree is None:
        tree = new_tree(state)
    tree.check_tokens(len(token_ids))
    namespace = context.tenant.namespace(body.cache_salt)
    with blaming(given[0]):
        branch = await state.engine.branch(token_ids, namespace=namespace, compute=body.prefill != "lazy")
    entry = new_entry(state, branch, tree)
    entry.checkpoints["prompt"] = len(token_ids)
    if messages is not None:
        entry.turns.append(Turn(0, len(token_ids), messages))
    await settle(context, [entry], body)
    return entry


async def tokens_of(
    state: State, body: CreateRequest | PromptBeamRequest
) -> tuple[list[int], list[dict[str, Any]] | None]:
    """The tokens of a prompt, and its messages if it is made of some."""
    if body.messages is not None:
        messages = normalised(body.messages)
        generates = body.add_generation_prompt is not False
        options = body.chat_template_kwargs
        return await state.text.chat(messages, add_generation_prompt=generates, options=options), messages
    if body.token_ids is not None:
        token_ids = validate_token_ids(body.token_ids, state.text.vocab_size, "token_ids")
        if not token_ids:
            raise invalid("token_ids", "must hold at least one token")
        return token_ids, None
    return (await state.text.prompts(body.prompt))[0], None


async def fork(context: Context, entry: Entry, body: ForkRequest) -> dict[str, Any]:
    """`n` children, at any position, also while the branch generates."""
    children = await _fork(context, entry, body.n or 1, _position(entry, body.at, "at"), body)
    return {"object": "list", "data": await show_branches(context.state, children)}


async def _fork(context: Context, entry: Entry, n: int, at: int | None, body: Settable) -> list[Entry]:
    state, store = context.state, context.store
    store.check_room(entry.tree, n)
    branches = await entry.branch.fork(n, at=at)
    children = [child_of(state, entry, branch, len(branch)) for branch in branches]
    await settle(context, children, body)
    await leases.use(state, entry)
    state.metrics.forks.inc(n)
    return children


def child_of(state: State, parent: Entry, branch: AsyncBranch, forked_at: int) -> Entry:
    """What a tenant knows of a new child; it is not in the tables yet."""
    child = new_entry(state, branch, parent.tree)
    child.path = (*parent.path, parent.id)
    child.forked_at = forked_at
    child.checkpoints = dict(parent.checkpoints)
    child.turns = list(parent.turns)
    child.cut(forked_at)
    child.lease = parent.lease
    child.pin = "soft" if parent.lease is not None else "none"
    child.lease_ends_at = None if parent.lease is None else state.clock() + parent.lease.ttl
    return child


def new_tree(state: State) -> Tree:
    """A tree that is in no table until its first branch is."""
    return Tree(state.clock(), EventLog(state.clock))


def new_entry(state: State, branch: AsyncBranch, tree: Tree) -> Entry:
    now = state.clock()
    return Entry(branch, tree, created_at=now, expires_at=now + state.settings.branch_ttl)


async def settle(context: Context, entries: list[Entry], body: Settable) -> None:
    """Put new branches into the tables, with what the request says of them; all or none."""
    try:
        for entry in entries:
            entry.set(body)
            await leases.set_lease(context.state, entry, body)
        # Others may have made some while these were computed, or have dropped the tree.
        tree = entries[0].tree
        context.store.check_room(tree, len(entries))
        if tree.events.closed:
            raise not_found("tree", tree.id)
    except BaseException:
        for entry in entries:
            await entry.branch.prune()
        raise
    for entry in entries:
        register(context.store, entry)


def register(store: BranchStore, entry: Entry) -> None:
    store.add(entry)
    data = {"branch_id": entry.id, "parent_id": entry.parent_id, "forked_at": entry.forked_at}
    entry.tree.events.add("branch.created", {**data, "position": len(entry.branch)})


async def extend(context: Context, entry: Entry, body: ExtendRequest) -> dict[str, Any]:
    """Append tokens, a text, or messages; computed now unless it is told otherwise."""
    state = context.state
    given = [name for name in ("token_ids", "text", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise invalid("token_ids", "or text or messages must be given, and only one of them")
    if body.prefill == "lazy" and body.return_logprobs:
        raise invalid("return_logprobs", "needs the tokens to be computed: prefill must be eager")
    async with entry.turn():
        check_position(entry, body.expect_position)
        entry.check_mark(body.checkpoint)
        branch, start = entry.branch, len(entry.branch)
        keep = start
        messages, how, exact = None, "delta", True
        if body.messages is not None:
            delta = await delta_of(state.text, entry, body)
            messages, how, (keep, new, exact) = delta.messages, delta.how, delta.splice
        elif body.text is not None:
            new = await state.text.encode(body.text, "text", add_special_tokens=False, control_tokens=False)
        else:
            assert body.token_ids is not None, "one of the three is given"
            new = validate_token_ids(body.token_ids, state.text.vocab_size, "token_ids")
        entry.tree.check_tokens(len(new))
        logprobs: list[float] = []
        with blaming(given[0]):
            if body.prefill == "lazy" and keep == start:
                await branch.extend(new)
            else:
                logprobs = await branch.compute(new, at=keep, logprobs=bool(body.return_logprobs))
        entry.cut(keep)
        if messages is not None:
            entry.turns.append(Turn(keep, len(branch), messages))
        entry.mark(body.checkpoint)
        await leases.use(state, entry)
    position = keep + len(new)
    entry.tree.events.add("branch.extended", {"branch_id": entry.id, "position": position})
    answer = {
        "object": "branch.extension",
        "branch_id": entry.id,
        "start_position": keep,
        "position": position,
        "token_ids": new,
    }
    if body.messages is not None:
        answer |= {"render": how, "template_exact": exact, "reused_tokens": keep}
    if body.return_logprobs:
        answer["token_logprobs"] = [finite(one) for one in logprobs]
    return answer


async def truncate(context: Context, entry: Entry, body: TruncateRequest) -> dict[str, Any]:
    """Move the branch's own head back; its children keep theirs."""
    if (body.position is None) == (body.checkpoint is None):
        raise invalid("position", "or checkpoint must be given, and not both")
    async with entry.turn():
        check_position(entry, body.expect_position)
        field = "position" if body.checkpoint is None else "checkpoint"
        position = _position(entry, getattr(body, field), field)
        assert position is not None, "one of the two is given"
        await entry.branch.truncate(position)
        entry.cut(position)
        await leases.use(context.state, entry)
    entry.tree.events.add("branch.truncated", {"branch_id": entry.id, "position": position})
    return await show_branch(context.state, entry)


async def promote(context: Context, entry: Entry, body: PromoteRequest) -> dict[str, Any]:
    """Keep this branch, what it grew from and what grew from it; prune the rest below an ancestor."""
    ancestor = entry.parent_id if body.ancestor is None else body.ancestor
    if ancestor == "root":
        ancestor = entry.path[0] if entry.path else None
    if ancestor is not None and ancestor not in entry.path:
        raise invalid("ancestor", "must be a branch above this one")
    kept = {*entry.path, entry.id}
    losers = [
        one
        for one in entry.tree.branches.values()
        if ancestor in one.path and one.id not in kept and entry.id not in one.path
    ]
    freed = await _prune(context, losers, "promote")
    entry.tree.events.add("branch.promoted", {"branch_id": entry.id, "pruned": len(losers)})
    shown = await show_branch(context.state, entry)
    return {"object": "branch.promotion", "branch": shown, **freed}


async def delete(context: Context, entry: Entry, scope: str) -> dict[str, Any]:
    """Let go of a branch, or of all that grew from it as well."""
    if scope == "subtree":
        freed = await _prune(context, context.store.family(entry), "explicit")
    else:
        context.store.remove(entry, "pruned")
        context.state.metrics.prunes.labels("explicit").inc()
        freed = _freed(context, 1, await entry.branch.release())
    return {"id": entry.id, "object": "branch", "deleted": True, **freed}


async def delete_tree(context: Context, tree: Tree) -> dict[str, Any]:
    freed = await _prune(context, list(tree.branches.values()), "explicit")
    return {"id": tree.id, "object": "tree", "deleted": True, **freed}


async def _prune(context: Context, entries: list[Entry], reason: str) -> dict[str, Any]:
    context.state.metrics.prunes.labels(reason).inc(len(entries))
    for entry in entries:
        entry.pruned = True
        context.store.remove(entry, "pruned")
    freed = 0
    for entry in reversed(entries):  # children came after their parents
        freed += await entry.branch.prune()
    return _freed(context, len(entries), freed)


def _freed(context: Context, num_branches: int, num_blocks: int) -> dict[str, Any]:
    return {
        "num_branches": num_branches,
        "freed_blocks": num_blocks,
        "freed_bytes": num_blocks * context.state.engine.block_nbytes,
    }


async def patch(context: Context, entry: Entry, body: PatchRequest) -> dict[str, Any]:
    """Say something else of a branch; what is not given stays as it is."""
    entry.check(body)
    entry.check_mark(body.checkpoint)
    await leases.set_lease(context.state, entry, body)
    entry.mark(body.checkpoint)
    entry.set(body)
    entry.tree.events.add("branch.updated", {"branch_id": entry.id, "annotations": entry.annotations})
    return await show_branch(context.state, entry)


async def cancel(context: Context, entry: Entry) -> dict[str, Any]:
    """End what is generated now, of this branch or from it; tokens so far are kept."""
    context.state.metrics.cancelled(1)
    if entry.work is not None:
        await entry.work.cancel()
    else:
        await entry.branch.cancel()
    return await show_branch(context.state, entry)


def check_position(entry: Entry, expected: int | None) -> None:
    if expected is not None and expected != len(entry.branch):
        message = f"the branch is at position {len(entry.branch)}, and not at {expected}"
        raise ApiError(409, message, code="head_moved", param="expect_position")


def _position(entry: Entry, at: object, field: str) -> int | None:
    """A number, or the name of a checkpoint; None is the head."""
    if isinstance(at, str):
        if at not in entry.checkpoints:
            raise ApiError(400, f"{field} must name a checkpoint", code="invalid_position", param=field)
        return entry.checkpoints[at]
    if at is None:
        return None
    if isinstance(at, bool) or not isinstance(at, int) or not 1 <= at <= len(entry.branch):
        limit = f"must be between 1 and {len(entry.branch)}, or the name of a checkpoint"
        raise invalid(field, limit, code="invalid_position")
    return at

"""The branch and tree endpoints: they find what is asked for, and hand over to the verbs."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from ramet.api.server import branch_beams, branch_generate, branch_store, branch_verbs as verbs, kv_events
from ramet.api.server.batch import run_batch
from ramet.api.server.branch_schemas import (
    MAX_BATCH,
    MAX_CANDIDATES,
    BatchRequest,
    BeamRequest,
    CreateRequest,
    ExtendRequest,
    ForkRequest,
    GenerateRequest,
    PatchRequest,
    PromoteRequest,
    PromptBeamRequest,
    ScoreRequest,
    TruncateRequest,
)
from ramet.api.server.branch_score import score as score_branch
from ramet.api.server.branch_verbs import Context, context_of
from ramet.api.server.branch_view import (
    BRANCH_PARTS,
    TREE_PARTS,
    parts_of,
    show_branch,
    show_branches,
    show_tree,
)
from ramet.api.server.errors import invalid
from ramet.api.server.json_body import StrictRoute
from ramet.api.server.sse import EventStream, JsonResponse, unless_gone
from ramet.api.server.state import state_of
from ramet.engine.beam_params import MAX_BEAMS
from ramet.engine.sampling_params import MAX_CHOICES

router = APIRouter(route_class=StrictRoute)
_MAX_LISTED = 100
T = TypeVar("T")
Thing = TypeVar("Thing", branch_store.Entry, branch_store.Tree)
_Limit = Annotated[int, Query(ge=1, le=_MAX_LISTED)]
_Order = Annotated[Literal["asc", "desc"], Query()]


async def _run(
    context: Context, request: Request, verb: Callable[..., Coroutine[Any, Any, T]], *arguments: Any
) -> T:
    """Do what may take a while, as one of the tenant's running requests, unless the client goes away."""
    with context.tenant.running(context.request_id):
        return await unless_gone(request, verb(context, *arguments))


@router.post("/v1/branches", status_code=201, response_model=None)
async def create(body: CreateRequest, request: Request) -> Response:
    """A branch at the end of messages, a text, token ids, or a position of another branch."""
    shown = await _run(context_of(request), request, verbs.create, body)
    return JsonResponse(shown, 201)


@router.post("/v1/branches/batch", response_model=None)
async def batch(body: BatchRequest, request: Request) -> Response:
    """Up to 256 operations at once, each with its own result or error."""
    return await run_batch(context_of(request), body, request)


@router.get("/v1/branches")
async def list_branches(
    request: Request,
    tree_id: str | None = None,
    parent_id: str | None = None,
    state: Literal["idle", "generating", "parked"] | None = None,
    after: str | None = None,
    limit: _Limit = 20,
    order: _Order = "asc",
) -> dict[str, Any]:
    """Branches as OpenAI lists things; `after` is the last id of the page before."""
    context = context_of(request)
    entries = [
        one
        for one in context.store.entries()
        if tree_id in (None, one.tree.id) and parent_id in (None, one.parent_id)
    ]
    if state is not None:
        looks = await context.state.engine.look([one.branch for one in entries])
        entries = [one for one, look in zip(entries, looks, strict=True) if look.state == state]
    page, has_more = _page(entries, after, limit, order)
    return _list(await show_branches(context.state, page), has_more)


def _page(things: list[Thing], after: str | None, limit: int, order: str) -> tuple[list[Thing], bool]:
    """One page of them, and whether there are more."""
    if order == "desc":
        things.reverse()
    if after is not None:
        ids = [one.id for one in things]
        if after not in ids:
            raise invalid("after", "must be an id of this list")
        things = things[ids.index(after) + 1 :]
    return things[:limit], len(things) > limit


def _list(data: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


@router.get("/v1/branches/{branch_id}")
async def get(branch_id: str, request: Request, include: str | None = None) -> dict[str, Any]:
    context = context_of(request)
    parts = parts_of(include, BRANCH_PARTS)
    return await show_branch(context.state, context.store.get(branch_id), parts)


@router.patch("/v1/branches/{branch_id}")
async def patch(branch_id: str, body: PatchRequest, request: Request) -> dict[str, Any]:
    context = context_of(request)
    return await verbs.patch(context, context.store.get(branch_id), body)


@router.delete("/v1/branches/{branch_id}")
async def delete(
    branch_id: str, request: Request, scope: Literal["branch", "subtree"] = "branch"
) -> dict[str, Any]:
    context = context_of(request)
    return await verbs.delete(context, context.store.get(branch_id), scope)


@router.post("/v1/branches/{branch_id}/fork", response_model=None)
async def fork(branch_id: str, body: ForkRequest, request: Request) -> Response:
    """Children at the branch's head or at any earlier token; nothing is computed."""
    context = context_of(request)
    return JsonResponse(await verbs.fork(context, context.store.get(branch_id), body), 201)


@router.post("/v1/branches/{branch_id}/extend")
async def extend(branch_id: str, body: ExtendRequest, request: Request) -> dict[str, Any]:
    """Append tokens, a text (a tool's result, say), or messages through the chat template."""
    context = context_of(request)
    return await _run(context, request, verbs.extend, context.store.get(branch_id), body)


@router.post("/v1/branches/{branch_id}/generate", response_model=None)
async def generate(branch_id: str, body: GenerateRequest, request: Request) -> Response:
    """Continue the branch, or let `n` new children do so."""
    context = context_of(request)
    entry = context.store.get(branch_id)
    if body.stream:
        return await branch_generate.stream(context, entry, body)
    work = branch_generate.generate(context, entry, body)
    if body.on_disconnect == "continue":
        work = context.state.detached(work)
    return JsonResponse(await unless_gone(request, work))


@router.post("/v1/branches/{branch_id}/beam_search", response_model=None)
async def beam_search(branch_id: str, body: BeamRequest, request: Request) -> Response:
    """The best continuations of the branch, as new children."""
    context = context_of(request)
    entry = context.store.get(branch_id)
    if body.stream:
        return await branch_beams.stream_branch(context, entry, body)
    return JsonResponse(await unless_gone(request, branch_beams.search_branch(context, entry, body)))


@router.post("/v1/beam_search", response_model=None)
async def prompt_beam_search(body: PromptBeamRequest, request: Request) -> Response:
    """The best continuations of messages, a text, or token ids."""
    context = context_of(request)
    if body.stream:
        return await branch_beams.stream_prompt(context, body)
    return JsonResponse(await unless_gone(request, branch_beams.search_prompt(context, body)))


@router.post("/v1/branches/{branch_id}/score")
async def score(branch_id: str, body: ScoreRequest, request: Request) -> dict[str, Any]:
    """How likely several continuations are; the branch does not change."""
    context = context_of(request)
    return await _run(context, request, score_branch, context.store.get(branch_id), body)


@router.post("/v1/branches/{branch_id}/truncate")
async def truncate(branch_id: str, body: TruncateRequest, request: Request) -> dict[str, Any]:
    """Move the branch's own head back; to keep it as well, fork at that position instead."""
    context = context_of(request)
    return await _run(context, request, verbs.truncate, context.store.get(branch_id), body)


@router.post("/v1/branches/{branch_id}/promote")
async def promote(branch_id: str, body: PromoteRequest, request: Request) -> dict[str, Any]:
    """Keep this path and prune what else grew from the ancestor."""
    context = context_of(request)
    return await verbs.promote(context, context.store.get(branch_id), body)


@router.post("/v1/branches/{branch_id}/cancel")
async def cancel(branch_id: str, request: Request) -> dict[str, Any]:
    """End what is generated now; tokens so far are kept."""
    context = context_of(request)
    return await verbs.cancel(context, context.store.get(branch_id))


# -- trees -------------------------------------------------------------------------------------------------


@router.get("/v1/trees")
async def list_trees(
    request: Request, after: str | None = None, limit: _Limit = 20, order: _Order = "asc"
) -> dict[str, Any]:
    context = context_of(request)
    page, has_more = _page(list(context.store.trees.values()), after, limit, order)
    return _list([await show_tree(context.state, tree) for tree in page], has_more)


@router.get("/v1/trees/{tree_id}")
async def get_tree(tree_id: str, request: Request, include: str | None = None) -> dict[str, Any]:
    """What the tree holds; with include=nodes,blocks also how it is shared."""
    context = context_of(request)
    return await show_tree(context.state, context.store.tree(tree_id), parts_of(include, TREE_PARTS))


@router.delete("/v1/trees/{tree_id}")
async def delete_tree(tree_id: str, request: Request) -> dict[str, Any]:
    context = context_of(request)
    return await verbs.delete_tree(context, context.store.tree(tree_id))


@router.get("/v1/trees/{tree_id}/events", response_model=None)
async def events(tree_id: str, request: Request) -> Response:
    """Server-sent events of a tree; Last-Event-ID goes on where a reader was cut off."""
    context = context_of(request)
    tree = context.store.tree(tree_id)
    await kv_events.watch(context.state, tree)
    last = request.headers.get("last-event-id", "")
    after = int(last) if last.isdecimal() and len(last) <= 18 else None

    def snapshot() -> dict[str, Any]:
        branches = [_brief(one) for one in tree.branches.values()]
        return {"tree_id": tree.id, "branches": branches, "kv": kv_events.totals(context.state, tree)}

    return EventStream(tree.events.read(after, snapshot), lambda: None)


def _brief(entry: branch_store.Entry) -> dict[str, Any]:
    return {
        "branch_id": entry.id,
        "parent_id": entry.parent_id,
        "forked_at": entry.forked_at,
        "position": len(entry.branch),
        "name": entry.name,
        "annotations": entry.annotations,
    }


@router.get("/v1/limits")
async def limits(request: Request) -> dict[str, Any]:
    state = state_of(request)
    return {
        "object": "limits",
        "max_branches": branch_store.MAX_BRANCHES,
        "max_branches_per_tree": branch_store.MAX_TREE_BRANCHES,
        "max_tokens_per_tree": branch_store.MAX_TREE_TOKENS,
        "max_queued_operations": branch_store.MAX_QUEUED,
        "max_checkpoints": branch_store.MAX_CHECKPOINTS,
        "max_n": MAX_CHOICES,
        "max_beams": MAX_BEAMS,
        "max_score_candidates": MAX_CANDIDATES,
        "max_batch": MAX_BATCH,
        "max_list": _MAX_LISTED,
        "max_model_len": state.engine.config.max_tokens,
        "max_concurrent_requests": state.settings.max_running,
        "max_body_bytes": state.settings.max_body_bytes,
        "max_pinned_ratio": state.settings.max_pinned_ratio,
        "branch_ttl": state.settings.branch_ttl,
    }

"""Many operations on branches in one request: they run side by side, and each has its own result or error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any

from fastapi import Request
from pydantic import ValidationError
from starlette.responses import Response

from ramet.api.server import branch_beams, branch_generate, branch_score, branch_verbs as verbs, log
from ramet.api.server.branch_schemas import (
    BatchOp,
    BatchRequest,
    BeamRequest,
    ExtendRequest,
    ForkRequest,
    GenerateRequest,
    PromoteRequest,
    ScoreRequest,
    TruncateRequest,
)
from ramet.api.server.branch_store import Entry
from ramet.api.server.branch_verbs import Context
from ramet.api.server.branch_view import show_branch
from ramet.api.server.errors import INTERNAL, invalid, of_engine, of_validation, unsupported
from ramet.api.server.schemas import Body
from ramet.api.server.sse import DONE, EventStream, JsonResponse, event, unless_gone

_VERBS: dict[str, tuple[type[Body], Callable[..., Awaitable[dict[str, Any]]]]] = {
    "fork": (ForkRequest, verbs.fork),
    "extend": (ExtendRequest, verbs.extend),
    "generate": (GenerateRequest, branch_generate.generate),
    "beam_search": (BeamRequest, branch_beams.search_branch),
    "score": (ScoreRequest, branch_score.score),
    "truncate": (TruncateRequest, verbs.truncate),
    "promote": (PromoteRequest, verbs.promote),
}


async def run_batch(context: Context, body: BatchRequest, request: Request) -> Response:
    """The results in the order of the operations; in a stream, in the order in which they end."""
    works = [_run(context, index, op) for index, op in enumerate(body.ops)]
    if body.stream:
        tasks = [asyncio.ensure_future(work) for work in works]

        def close() -> None:
            for task in tasks:
                task.cancel()

        return EventStream(_events(tasks), close)
    return JsonResponse({"object": "list", "data": await unless_gone(request, _all(works))})


async def _all(works: list[Coroutine[Any, Any, dict[str, Any]]]) -> list[dict[str, Any]]:
    """As a task, which ends quietly where it is cancelled; what `gather` gives would be logged."""
    return await asyncio.gather(*works)


async def _events(tasks: list[asyncio.Task[dict[str, Any]]]) -> AsyncGenerator[bytes]:
    for done in asyncio.as_completed(tasks):
        yield event(await done, name="batch.result")
    yield DONE


async def _run(context: Context, index: int, op: BatchOp) -> dict[str, Any]:
    try:
        result = await _do(context, op)
        return {"index": index, "status": 200, "result": result, "error": None}
    except ValidationError as error:
        shown = of_validation(error.errors())
    except Exception as error:
        known = of_engine(error)
        if known is None:
            log.error("a bug", error, request_id=context.request_id)
        shown = known or INTERNAL
    failed = shown.body["error"]
    if shown.param is not None:
        of_op = shown.param in BatchOp.model_fields  # and not of its body
        failed["param"] = f"ops.{index}.{shown.param}" if of_op else f"ops.{index}.body.{shown.param}"
    return {"index": index, "status": shown.status_code, "result": None, "error": failed}


async def _do(context: Context, op: BatchOp) -> dict[str, Any]:
    entry: Entry = context.store.get(op.branch_id, "branch_id")
    if op.op in ("cancel", "get", "delete"):
        given = dict(op.body or {})
        scope = given.pop("scope", "branch") if op.op == "delete" else "branch"
        if given or scope not in ("branch", "subtree"):
            raise invalid("body", "must be left out, but for the scope of delete: branch or subtree")
        if op.op == "delete":
            return await verbs.delete(context, entry, scope)
        if op.op == "cancel":
            return await verbs.cancel(context, entry)
        return await show_branch(context.state, entry)
    schema, verb = _VERBS[op.op]
    body = schema.model_validate(op.body or {})
    if getattr(body, "stream", None):
        raise unsupported("stream", "belongs to the batch, not to an operation of it")
    return await verb(context, entry, body)

"""Server-sent events, and what happens when the client goes away: everything it asked for ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ramet.api.server import log
from ramet.api.server.errors import INTERNAL, ApiError, of_engine

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


def dumps(value: Any) -> bytes:
    """Compact JSON. NaN is a bug: no client could read it."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def event(data: Any, *, name: str | None = None, event_id: int | None = None) -> bytes:
    """One event; JSON never holds a line break, so its data is one line."""
    head = b"" if event_id is None else f"id: {event_id}\n".encode()
    if name is not None:
        head += f"event: {name}\n".encode()
    return head + b"data: " + dumps(data) + b"\n\n"


def error_event(error: Exception, request_id: str) -> bytes:
    """What ends a stream that has begun. openai's clients raise it as an APIError."""
    shown = of_engine(error)
    if shown is None:
        log.error("a bug", error, request_id=request_id)
        shown = INTERNAL
    return event(shown.body)


class JsonResponse(Response):
    """A body that was made by `dumps`."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content)


class EventStream(Response):
    """Sends what `events` yields until that ends or the client goes away, then calls `close` in any case."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._close = close
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _unless_gone(receive, self._send(send))
        except ClientGone:
            scope["state"]["client_gone"] = True  # nobody else is left to be told
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for part in self._events:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class ClientGone(ApiError):
    """The client closed the connection before there was an answer."""

    def __init__(self) -> None:
        super().__init__(499, "the client closed the connection")


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client goes away first; then raises ClientGone.

    Starlette tells nobody that a client has gone, so somebody has to listen.
    """
    return await _unless_gone(request.receive, work)


async def _unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

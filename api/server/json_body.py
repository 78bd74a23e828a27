"""Request bodies: JSON read strictly, so that what comes behind it meets only values that JSON can hold."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.responses import JSONResponse

from ramet.api.server.errors import ApiError, as_api_error, invalid
from ramet.api.server.state import tenant_of

MAX_DEPTH = 64


class StrictRoute(APIRoute):
    """A route whose body is read by `parse`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            request = _StrictRequest(request.scope, request.receive)
            key = request.headers.get("idempotency-key")
            if key is None or request.method != "POST":
                return await handle(request)
            return await _once(key, request, handle)

        return strict


async def _once(key: str, request: Request, handle: Callable[[Request], Awaitable[Response]]) -> Response:
    """Answer as before if the key has been used before."""
    body = await request.body()
    value = parse(body) if body else None
    if isinstance(value, dict) and value.get("stream"):
        raise invalid("idempotency-key", "cannot be used with a stream")
    asked = f"{request.method} {request.url.path}\n".encode() + body

    async def act() -> Response:
        try:
            return await handle(request)
        except Exception as error:
            shown = as_api_error(error)  # which raises a bug again
            return JSONResponse(shown.body, shown.status_code, shown.headers)

    return await tenant_of(request).idempotency.run(key, asked, act)


class _StrictRequest(Request):
    async def json(self) -> Any:
        return parse(await self.body())


def parse(body: bytes) -> Any:
    """The value of a JSON text. Raises ApiError for one that is not valid, or nested too deep."""
    try:
        value = json.loads(body.decode(), parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise _invalid(f"is nested deeper than {MAX_DEPTH}") from None
    except ValueError as error:  # also bytes that are not UTF-8, and numbers of thousands of digits
        where = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise _invalid(f"is not valid JSON{where}") from None
    _check(value, look_for_surrogates=b"\\ud" in body or b"\\uD" in body)
    return value


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise _invalid("holds a number that is too large")
    return number


def _no_constant(name: str) -> NoReturn:
    raise _invalid(f"is not valid JSON: {name} is no number")


def _invalid(why: str) -> ApiError:
    return ApiError(400, f"the body {why}", code="invalid_json")


def _check(value: Any, look_for_surrogates: bool) -> None:
    """Walk without recursion: bound the depth, and find strings that are not valid Unicode."""
    kinds = (dict, list, str) if look_for_surrogates else (dict, list)
    stack: list[tuple[Any, tuple[str, ...]]] = [(value, ())]
    while stack:
        at, path = stack.pop()
        if len(path) > MAX_DEPTH:
            raise _invalid(f"is nested deeper than {MAX_DEPTH}")
        if isinstance(at, dict):
            if look_for_surrogates:
                for key in at:
                    _check_text(key, path)
            stack.extend((part, (*path, key)) for key, part in at.items() if isinstance(part, kinds))
        elif isinstance(at, list):
            stack.extend((part, (*path, str(i))) for i, part in enumerate(at) if isinstance(part, kinds))
        elif isinstance(at, str) and look_for_surrogates:
            _check_text(at, path)


def _check_text(text: str, path: tuple[str, ...]) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        where = ".".join(part for part in path if part.isascii()) or "body"
        raise invalid(where, "must be valid Unicode, without lone surrogates") from None

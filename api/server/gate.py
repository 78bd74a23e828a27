"""What each request passes: an id, a key, a bound on its body, a line in the log, an answer to every bug."""

from __future__ import annotations

import re
import time
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ramet.api.server import log
from ramet.api.server.auth import is_loopback
from ramet.api.server.errors import INTERNAL, ApiError
from ramet.api.server.ids import new_id
from ramet.api.server.state import State

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_OPEN = "/health"


class Gate:
    """An ASGI middleware around all routes, also those that do not exist."""

    def __init__(self, app: ASGIApp, state: State) -> None:
        self.app = app
        self.state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        sent = headers.get(b"x-request-id", b"")
        # A client's own id goes back to it and into the log; nothing is ever kept under it alone.
        request_id = sent.decode() if _REQUEST_ID.fullmatch(sent) else new_id("req_")
        scope.setdefault("state", {})["request_id"] = request_id
        start = time.perf_counter()
        status = 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._admit(scope, headers)
            await self.app(scope, self._bounded(receive), tagged)
        except ApiError as error:
            await _respond(error, scope, receive, tagged)
        except ClientDisconnect:  # its body was still on the way: nobody is left to be told
            scope["state"]["client_gone"] = True
        except Exception as error:
            log.error("a bug", error, request_id=request_id, path=scope["path"])
            if status:
                raise  # the answer has begun: all that is left is to cut it off
            await _respond(INTERNAL, scope, receive, tagged)
        finally:
            if scope["state"].get("client_gone"):
                status = 499
            seconds = time.perf_counter() - start
            self.state.metrics.answered(_endpoint(scope), status, seconds)
            log.info(
                "request",
                request_id=request_id,
                method=scope["method"],
                path=scope["path"],
                status=status,
                ms=round(1000 * seconds, 1),
            )

    async def _admit(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Find the tenant. Raises ApiError for a request that must not come in."""
        state, path = self.state, scope["path"]
        tenant = state.keys.tenant_of(headers.get(b"authorization"))
        if tenant is None and path != _OPEN and path not in state.settings.open_paths:
            raise ApiError(
                401,
                "a valid API key is needed, as in `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        if not state.keys.required and not _is_local_name(headers.get(b"host", b"")):
            # Without a key only the address protects us, and a web page may give it a name of its own.
            raise ApiError(403, "without an API key only loopback names are served", code="host_not_allowed")
        if state.draining and path != _OPEN:
            raise ApiError(503, "the server is stopping", code="engine_restarting", retry=True)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > state.settings.max_body_bytes:
            raise self._too_long()
        if tenant is not None:
            scope["state"]["tenant"] = state.tenants.get(tenant)

    def _bounded(self, receive: Receive) -> Receive:
        """Bodies without a length are counted while they come."""
        num_bytes = 0

        async def bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.state.settings.max_body_bytes:
                raise self._too_long()
            return message

        return bounded

    def _too_long(self) -> ApiError:
        most = self.state.settings.max_body_bytes
        return ApiError(413, f"the body must have at most {most} bytes", code="body_too_large")


def _is_local_name(host: bytes) -> bool:
    try:
        name = urlsplit(f"//{host.decode()}").hostname
    except ValueError:
        return False
    return name is not None and is_loopback(name)


def _endpoint(scope: Scope) -> str:
    """The path's pattern, of which there are few; what matches none is one."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else "other"


async def _respond(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    headers = dict(error.headers or {})
    await JSONResponse(error.body, error.status_code, headers)(scope, receive, send)

"""Puts the HTTP application together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from ramet.api.server import branches, docs, meta, openai, scrape
from ramet.api.server.auth import Keys
from ramet.api.server.errors import as_api_error
from ramet.api.server.gate import Gate
from ramet.api.server.kv_events import tell_for_ever
from ramet.api.server.leases import sweep_for_ever
from ramet.api.server.settings import Settings
from ramet.api.server.state import State
from ramet.engine.async_llm import AsyncLLM
from ramet.engine.errors import RametError


def create_app(engine: AsyncLLM, settings: Settings, keys: Keys | None = None) -> FastAPI:
    """An ASGI application over an engine, which it closes when it is shut down."""
    state = State(engine, settings, keys or Keys())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.spawn(sweep_for_ever(state))
        state.spawn(tell_for_ever(state))
        yield
        await state.close()

    app = FastAPI(
        title="ramet",
        version=version("ramet"),
        lifespan=lifespan,
        openapi_url="/openapi.json" if settings.docs else None,
        docs_url=None,  # fastapi's would load scripts from elsewhere; see docs.py
        redoc_url=None,
    )
    app.state.ramet = state
    app.add_middleware(Gate, state=state)
    app.add_exception_handler(HTTPException, _show)
    app.add_exception_handler(RequestValidationError, _show)
    app.add_exception_handler(RametError, _show)
    for module in (meta, openai, branches, scrape):
        app.include_router(module.router)
    if settings.docs:
        app.include_router(docs.router)
    return app


async def _show(request: Request, error: Exception) -> Response:
    shown = as_api_error(error)
    return JSONResponse(shown.body, shown.status_code, shown.headers)

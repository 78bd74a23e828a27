"""What all requests share. It is made once, with the app."""

from __future__ import annotations

import time
from typing import cast

from fastapi import Request

from ramet.api.server.auth import Keys
from ramet.api.server.errors import ApiError
from ramet.api.server.settings import Settings
from ramet.api.server.tenants import Tenant, Tenants
from ramet.api.server.text import Text
from ramet.engine.async_llm import AsyncLLM


class State:
    """The engine and everything around it."""

    def __init__(self, engine: AsyncLLM, settings: Settings, keys: Keys) -> None:
        self.engine = engine
        self.settings = settings
        self.keys = keys
        self.tenants = Tenants(settings)
        self.text = Text(engine)
        self.started_at = int(time.time())
        self.draining = False  # the server is stopping: what runs may end, nothing new begins

    async def close(self) -> None:
        self.draining = True
        await self.engine.close()
        self.text.close()

    @property
    def healthy(self) -> bool:
        return self.engine.is_running and not self.draining

    def check_model(self, model: str | None) -> str:
        """The name to answer with. Raises ApiError for one that is not served."""
        names = self.settings.model_names
        if model is None or model in names:
            return model or names[0]
        raise ApiError(404, f"the model {model[:80]!r} does not exist", code="model_not_found", param="model")


def state_of(request: Request) -> State:
    return cast(State, request.app.state.ramet)


def tenant_of(request: Request) -> Tenant:
    return cast(Tenant, request.state.tenant)


def request_id_of(request: Request) -> str:
    return cast(str, request.state.request_id)

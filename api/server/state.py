"""What all requests share. It is made once, with the app."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

from fastapi import Request

from ramet.api.server import log
from ramet.api.server.auth import Keys
from ramet.api.server.branch_store import BranchStore
from ramet.api.server.errors import ApiError, of_engine
from ramet.api.server.metrics import Metrics
from ramet.api.server.settings import Settings
from ramet.api.server.tenants import Tenant, Tenants
from ramet.api.server.text import Text
from ramet.engine.async_llm import AsyncLLM

T = TypeVar("T")


class State:
    """The engine and everything around it."""

    def __init__(self, engine: AsyncLLM, settings: Settings, keys: Keys) -> None:
        self.engine = engine
        self.settings = settings
        self.keys = keys
        self.tenants = Tenants(settings)
        self.text = Text(engine)
        self.metrics = Metrics(settings.model_names[0], vllm_names=settings.vllm_metrics)
        self.started_at = int(time.time())
        self.clock: Callable[[], float] = time.time
        self.telling = asyncio.Lock()  # of blocks: one look after the other
        self._tasks: set[asyncio.Task[Any]] = set()
        self.draining = False  # the server is stopping: what runs may end, nothing new begins

    def stores(self) -> list[BranchStore]:
        """The branches of each tenant, for what is done for all alike."""
        return [tenant.branches for tenant in self.tenants]

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Do something that nobody waits for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and of_engine(error) is None:
            log.error("a bug", error)

    async def detached(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` gives; it goes on if nobody waits for it any more."""
        return await asyncio.shield(self.spawn(work))

    def drain(self) -> None:
        """Take nothing new, and end what only waits for news."""
        self.draining = True
        for store in self.stores():
            for tree in store.trees.values():
                tree.events.close()

    async def close(self) -> None:
        self.drain()
        for task in list(self._tasks):
            task.cancel()
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

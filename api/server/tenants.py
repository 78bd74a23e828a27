"""Tenants: each has tables of its own, and nothing here ever looks into another one's."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from ramet.api.server.branch_store import BranchStore
from ramet.api.server.errors import ApiError
from ramet.api.server.idempotency import Idempotency
from ramet.api.server.settings import Settings
from ramet.engine.async_work import Work


class Tenant:
    """What one tenant has on this server."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.branches = BranchStore()
        self.idempotency = Idempotency(time.time)
        self._settings = settings
        # What each request is doing, by request id: a client may choose one, and use it twice.
        self._running: dict[str, list[list[Work[Any]]]] = {}
        self._num_running = 0

    def namespace(self, cache_salt: str | None) -> Hashable:
        """Where its prefixes are cached: prompts of different namespaces never find each other's."""
        return "http", self._owner, cache_salt or ""

    def owns(self, namespace: Hashable) -> bool:
        """Whether its prefixes are cached there, under whatever salt."""
        return isinstance(namespace, tuple) and namespace[:2] == ("http", self._owner)

    @property
    def _owner(self) -> str | None:
        return self.name if self._settings.cache_scope == "tenant" else None

    @contextmanager
    def running(self, request_id: str) -> Iterator[list[Work[Any]]]:
        """Count a request while it runs. Gives a list of its own: `cancel` finds the work that is put there.

        Raises ApiError if too many run already.
        """
        if self._num_running >= self._settings.max_running:
            limit = self._settings.max_running
            raise ApiError(429, f"{limit} requests run already", code="rate_limit_exceeded", retry=True)
        self._num_running += 1
        works: list[Work[Any]] = []
        same_id = self._running.setdefault(request_id, [])
        same_id.append(works)
        try:
            yield works
        finally:
            self._num_running -= 1
            same_id[:] = [one for one in same_id if one is not works]
            if not same_id:
                del self._running[request_id]

    async def cancel(self, request_id: str) -> int:
        """End what runs under a request id, keeping the tokens so far; returns how many works that were."""
        works = [work for works in self._running.get(request_id, ()) for work in works]
        return sum([await work.cancel() for work in works])


class Tenants:
    """All tenants, made as they come. Names come from keys, so there are no more of them than keys."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tenants: dict[str, Tenant] = {}

    def __iter__(self) -> Iterator[Tenant]:
        return iter(list(self._tenants.values()))

    def get(self, name: str) -> Tenant:
        if name not in self._tenants:
            self._tenants[name] = Tenant(name, self._settings)
        return self._tenants[name]

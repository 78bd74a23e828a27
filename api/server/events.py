"""What happens in a tree, kept for a while, so that a reader that was cut off goes on where it was."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any, NamedTuple

from ramet.api.server.sse import event

_KEPT = 1024
_PING_S = 15.0


class Event(NamedTuple):
    id: int
    name: str
    data: dict[str, Any]


class EventLog:
    """The last events of one tree, and who reads them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._events: deque[Event] = deque(maxlen=_KEPT)
        self._next_id = 1
        self.closed = False
        self._changed = asyncio.Event()

    def add(self, name: str, data: dict[str, Any]) -> None:
        self._events.append(Event(self._next_id, name, {"type": name, "created_at": self._clock(), **data}))
        self._next_id += 1
        self._wake()

    def close(self) -> None:
        """Nothing more will happen: readers end when they have read all."""
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def read(self, after: int | None, snapshot: Callable[[], dict[str, Any]]) -> AsyncGenerator[bytes]:
        """Events after the one with this id, and all that come, as server-sent events.

        A reader that begins, or was away or too slow for longer than events are kept, gets a snapshot.
        """
        while True:
            changed = self._changed
            if after is None or not self._next_id - len(self._events) - 1 <= after < self._next_id:
                after = self._next_id - 1
                yield event({"type": "tree.snapshot", **snapshot()}, name="tree.snapshot", event_id=after)
            for one in [one for one in self._events if one.id > after]:
                after = one.id
                yield event(one.data, name=one.name, event_id=one.id)
            if after < self._next_id - 1:
                continue  # more has come while these were sent
            if self.closed:
                return
            try:
                await asyncio.wait_for(changed.wait(), _PING_S)
            except TimeoutError:
                yield b": still here\n\n"  # else a proxy, or nobody, might find the silence too long

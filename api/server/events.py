"""What happens in a tree, kept for a while, so that a reader that was cut off goes on where it was."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ramet.api.server.sse import event

_KEPT = 1024
_KEPT_KV = 256
_PING_S = 15.0


class Event(NamedTuple):
    id: int
    name: str
    data: dict[str, Any]


@dataclass
class Told:
    """What a log has told of the blocks of its tree, from its first reader on."""

    blocks: set[int] = field(default_factory=set)
    resident_tokens: int = 0
    upto: int = 0  # the last event of a branch that was there when it looked


class EventLog:
    """The last events of one tree, and who reads them.

    Those of blocks come in any number, so they are kept apart: they never push out those of branches. A
    reader that missed some of them is right again with the next one, which has the totals.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._of_branches: deque[Event] = deque(maxlen=_KEPT)
        self._of_blocks: deque[Event] = deque(maxlen=_KEPT_KV)
        self._last_id = 0
        self._forgotten = 0  # the last event of a branch that is not kept any more
        self.last_of_branches = 0
        self.told: Told | None = None  # None until somebody reads
        self.closed = False
        self._changed = asyncio.Event()

    def add(self, name: str, data: dict[str, Any]) -> None:
        """Something happened to a branch."""
        if len(self._of_branches) == _KEPT:
            self._forgotten = self._of_branches[0].id
        self._put(self._of_branches, name, data)
        self.last_of_branches = self._last_id

    def add_kv(self, name: str, data: dict[str, Any]) -> None:
        """Something happened to blocks."""
        self._put(self._of_blocks, name, data)

    def _put(self, events: deque[Event], name: str, data: dict[str, Any]) -> None:
        self._last_id += 1
        events.append(Event(self._last_id, name, {"type": name, "created_at": self._clock(), **data}))
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
            if after is None or not self._forgotten <= after <= self._last_id:
                after = self._last_id
                yield event({"type": "tree.snapshot", **snapshot()}, name="tree.snapshot", event_id=after)
            for one in sorted(one for one in [*self._of_branches, *self._of_blocks] if one.id > after):
                after = one.id
                yield event(one.data, name=one.name, event_id=one.id)
            if after < self._last_id:
                continue  # more has come while these were sent
            if self.closed:
                return
            try:
                await asyncio.wait_for(changed.wait(), _PING_S)
            except TimeoutError:
                yield b": still here\n\n"  # else a proxy, or nobody, might find the silence too long

"""Answers kept for a while by the key that a client chose, so that a retry does nothing twice.

The openai client retries by itself and sends no such key; ramet's client does.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.responses import Response

from ramet.api.server.errors import ApiError, invalid

KEPT_S = 600.0
_MOST = 1024
_MOST_BYTES = 64 << 20  # of all answers that are kept
_MAX_KEY = 255


@dataclass
class _Kept:
    request: bytes  # a digest of what was asked
    at: float
    answer: asyncio.Future[Response | None]  # None: nothing that could be kept

    @property
    def num_bytes(self) -> int:
        answer = self.answer.result()
        return 0 if answer is None else len(answer.body)


class Idempotency:
    """One tenant's answers."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    async def run(self, key: str, request: bytes, act: Callable[[], Awaitable[Response]]) -> Response:
        """The answer that `request` got under this key before, or what `act` gives.

        Two at once: the second waits for the first. Raises ApiError if the key stands for another request.
        """
        if not 1 <= len(key) <= _MAX_KEY:
            raise invalid("idempotency-key", f"must have 1 to {_MAX_KEY} characters")
        digest = hashlib.sha256(request).digest()
        self._forget_old()
        while (kept := self._kept.get(key)) is not None:
            if kept.request != digest:
                raise ApiError(
                    422,
                    "this key stands for another request",
                    code="idempotency_key_reused",
                    param="idempotency-key",
                )
            answer = await asyncio.shield(kept.answer)
            if answer is not None:
                replay = Response(answer.body, answer.status_code)
                replay.raw_headers = [*answer.raw_headers, (b"idempotent-replayed", b"true")]
                return replay
        kept = self._kept[key] = _Kept(digest, self._clock(), asyncio.get_running_loop().create_future())
        answer = None
        try:
            response = await act()
            # What may turn out otherwise the next time is done again.
            if response.status_code < 429:
                answer = response
            return response
        finally:
            if answer is None:
                self._kept.pop(key, None)
            kept.answer.set_result(answer)

    def _forget_old(self) -> None:
        """What is too old goes, and then the oldest, while there is too much; nothing that still runs."""
        done = [(key, kept) for key, kept in self._kept.items() if kept.answer.done()]
        num_bytes = sum(kept.num_bytes for _, kept in done)
        for key, kept in done:
            too_many = len(self._kept) >= _MOST or num_bytes > _MOST_BYTES
            if not too_many and kept.at > self._clock() - KEPT_S:
                return
            del self._kept[key]
            num_bytes -= kept.num_bytes

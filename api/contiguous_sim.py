"""A saturated server whose allocator gives each request one contiguous range: where do its slots go?

The model, shared with `paged_sim`: requests wait in one first-in queue that never runs empty, and only its
head may enter. A request enters with its prompt computed, gains one token a step, and leaves after
`num_output` steps. Time is counted in steps. Nothing is moved or preempted: a range is kept to the end.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ramet.api.contiguous import Allocator
from ramet.api.request_lengths import Request


class PoolShares(NamedTuple):
    """Where the slots of a pool are, as time-averaged fractions of the pool that add up to 1."""

    used: float  # holds a token
    reservation: float  # will hold a token of its request later
    internal: float  # allocated, and never used by its request
    external: float  # free, in holes too small for the request that waits
    free: float = 0.0  # free, and usable by any request

    @property
    def waste(self) -> float:
        """The article's three flaws together."""
        return self.reservation + self.internal + self.external


class Refusal(NamedTuple):
    """The head of the queue was refused although its size was free in total. Sizes in slots."""

    request: Request
    size: int
    num_free: int
    largest_hole: int
    num_resident: int
    at: int  # step
    num_events: int  # the length of the event log then


class Event(NamedTuple):
    kind: Literal["enter", "leave"]
    at: int  # step
    request: Request


class ContiguousResult(NamedTuple):
    shares: PoolShares
    num_resident: float  # requests, time-averaged
    refused_by_fragmentation: float  # share of the time in which the head waits although its size is free


@dataclass(slots=True)
class _Totals:
    """Slots times steps."""

    steps: int = 0
    resident: int = 0
    used: float = 0.0
    reservation: float = 0.0
    internal: int = 0
    free: int = 0
    fragmented: int = 0


class _Resident(NamedTuple):
    leaves_at: int
    number: int  # breaks ties, so that requests are never compared
    entered_at: int
    start: int
    request: Request


@dataclass
class ContiguousSim:
    """One run; `size_of` says how many slots a request asks for when it enters."""

    allocator: Allocator
    size_of: Callable[[Request], int]
    requests: Iterator[Request]
    events: list[Event] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._head = next(self.requests)
        self._residents: list[_Resident] = []  # a heap: who leaves first
        self._totals = _Totals()
        self._fragmented = False

    def run(self, steps: int, warm_up: int) -> ContiguousResult:
        """Simulate `steps` steps, of which the first `warm_up` are not counted."""
        now = 0
        while now < steps:
            self._leave(now)
            self._enter(now)
            until = min(self._residents[0].leaves_at, steps)
            if until > warm_up:
                self._account(max(now, warm_up), until)
            now = until
        return self._result()

    def _leave(self, now: int) -> None:
        while self._residents and self._residents[0].leaves_at == now:
            resident = heapq.heappop(self._residents)
            self.allocator.free(resident.start)
            self.events.append(Event("leave", now, resident.request))

    def _enter(self, now: int) -> None:
        while (start := self.allocator.allocate(self.size_of(self._head))) is not None:
            request = self._head
            resident = _Resident(now + request.num_output, request.index, now, start, request)
            heapq.heappush(self._residents, resident)
            self.events.append(Event("enter", now, request))
            self._head = next(self.requests)
        assert self._residents, "a request that no empty pool can hold waits for ever"
        self._note_refusal(now)

    def _note_refusal(self, now: int) -> None:
        size, num_free = self.size_of(self._head), self.allocator.num_free
        self._fragmented = num_free >= size
        if self._fragmented:
            hole, num_resident = self.allocator.largest_hole, len(self._residents)
            self.refusals.append(
                Refusal(self._head, size, num_free, hole, num_resident, now, len(self.events))
            )

    def _account(self, begin: int, end: int) -> None:
        """Add the steps from `begin` up to `end`, in which nobody enters or leaves."""
        steps, totals = end - begin, self._totals
        for r in self._residents:
            age = (begin + end - 1) / 2 - r.entered_at  # the mean over these steps
            used = r.request.num_prompt + age
            totals.used += steps * used
            totals.reservation += steps * (r.request.num_kv - used)
            totals.internal += steps * (self.allocator.taken(r.start) - r.request.num_kv)
        totals.steps += steps
        totals.resident += steps * len(self._residents)
        totals.free += steps * self.allocator.num_free
        totals.fragmented += steps * self._fragmented

    def _result(self) -> ContiguousResult:
        totals = self._totals
        slot_steps = totals.steps * self.allocator.num_slots
        # The head of the queue waits at every counted step, so all that is free is of no use to it.
        shares = PoolShares(
            used=totals.used / slot_steps,
            reservation=totals.reservation / slot_steps,
            internal=totals.internal / slot_steps,
            external=totals.free / slot_steps,
        )
        return ContiguousResult(shares, totals.resident / totals.steps, totals.fragmented / totals.steps)

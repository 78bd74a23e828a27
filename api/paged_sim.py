"""The same saturated server on the real block pool and radix tree: pages instead of ranges.

The queue and the clock are those of `contiguous_sim`. What paging changes: a request enters when its prompt's
blocks and one more (the watermark) are free, and takes further blocks as it grows. When the pool is dry, the
youngest request is preempted: its blocks are freed, it goes back to the head of the queue, and when it enters
again it recomputes its tokens in one step. Only residents are counted. Tokens are random, so requests share
nothing; the parallel samples of one request are forks of its prompt and share that. A finished request is
pruned, not cached. There is no device, so copies need no time.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ramet.api.contiguous_sim import PoolShares
from ramet.api.request_lengths import Request
from ramet.radix.block_pool import OutOfBlocks
from ramet.radix.cursor import Cursor
from ramet.radix.prefix_cache import PrefixCache
from ramet.radix.tokens import TOKEN_BYTES

NAMESPACE = ("bench",)
WATERMARK = 1  # blocks that stay free when a request enters, so that it does not preempt at its next token
TICK = 256  # steps between two reports of progress


class PagedResult(NamedTuple):
    shares: PoolShares  # of the pool
    waste: float  # allocated slots without a token / allocated slots
    num_resident: float  # requests, time-averaged
    waste_per_sequence: float  # slots, over sequences that do not reach the longest length
    blocks_per_sequence: float  # entries of a block table, time-averaged
    saved_by_sharing: float  # blocks saved / blocks that the same sequences take without sharing
    num_finished: int
    num_preempted: int


@dataclass(slots=True)
class _Group:
    """A request and its samples; the first cursor is the one that the others were forked from."""

    request: Request
    prompt: bytes
    outputs: list[bytes]  # one a sample
    num_generated: int = 0  # tokens of each sample, the last of them without KV
    cursors: list[Cursor] = field(default_factory=list)

    @property
    def num_kv(self) -> int:
        return self.request.num_prompt + self.num_generated - 1


@dataclass(slots=True)
class _Totals:
    """Sums over the counted steps."""

    steps: int = 0
    resident: int = 0
    sequences: int = 0
    blocks: int = 0  # really taken from the pool
    blocks_unshared: int = 0
    slots_unfilled: int = 0
    uncapped: int = 0  # sequences
    unfilled_uncapped: int = 0  # slots


@dataclass
class PagedSim:
    """One run on an empty cache. `num_samples`: n of parallel sampling, all of its output length."""

    cache: PrefixCache
    requests: Iterator[Request]
    num_samples: int = 1
    seed: int = 0
    max_resident: int | None = None  # requests; below what fits, the server is busy but not saturated

    def __post_init__(self) -> None:
        self._rng = random.Random(f"tokens:{self.seed}")
        self._queue = deque([self._draw()])
        self._residents: list[_Group] = []  # oldest first
        self._totals = _Totals()
        self._num_finished = 0
        self._num_preempted = 0

    def run(self, steps: int, warm_up: int, tick: Callable[[int], None] = lambda _: None) -> PagedResult:
        """Simulate `steps` steps, the first `warm_up` not counted; `tick` is told how many are done."""
        for now in range(steps):
            self._decode()
            self._enter()
            if now >= warm_up:
                self._account()
            self._leave()
            if (now + 1) % TICK == 0:
                tick(TICK)
        tick(steps % TICK)
        return self._result()

    def close(self) -> None:
        """Let everyone go. The pool is then whole again, or blocks have leaked."""
        for group in self._residents:
            self._drop(group)
        self._residents.clear()
        pool = self.cache.pool
        assert pool.num_free == pool.num_blocks, "blocks have leaked"

    def _draw(self) -> _Group:
        request = next(self.requests)
        outputs = [self._rng.randbytes(TOKEN_BYTES * request.num_output) for _ in range(self.num_samples)]
        return _Group(request, self._rng.randbytes(TOKEN_BYTES * request.num_prompt), outputs)

    def _decode(self) -> None:
        """Write the last sampled token of every sequence, and sample one more."""
        while True:
            rows = [(cursor, 1) for group in self._residents for cursor in group.cursors]
            try:
                reservations = iter(self.cache.reserve(rows))
                break
            except OutOfBlocks:
                self._preempt_youngest()
        self._copies()
        for group in self._residents:
            begin = TOKEN_BYTES * (group.num_generated - 1)
            for output in group.outputs:
                self.cache.commit(next(reservations), output[begin : begin + TOKEN_BYTES])
            group.num_generated += 1

    def _enter(self) -> None:
        limit = self.cache.pool.num_blocks if self.max_resident is None else self.max_resident
        while (
            len(self._residents) < limit
            and self.cache.pool.num_free >= self._blocks_to_enter(self._queue[0]) + WATERMARK
        ):
            group = self._queue.popleft()
            self._compute(group)
            self._residents.append(group)
            if not self._queue:
                self._queue.append(self._draw())
        assert self._residents, "a request that no empty pool can hold waits for ever"

    def _blocks_to_enter(self, group: _Group) -> int:
        """The prompt, once, and what each sample had generated before a preemption."""
        block_size, num_prompt = self.cache.block_size, group.request.num_prompt
        if group.num_generated <= 1:
            return -(-num_prompt // block_size)
        shared = num_prompt // block_size
        return shared + self.num_samples * (-(-group.num_kv // block_size) - shared)

    def _compute(self, group: _Group) -> None:
        """Prefill the prompt, fork the samples, and write again what was lost by a preemption."""
        root = self.cache.attach(NAMESPACE, group.prompt)
        assert root.length == 0, "random prompts share nothing"
        self._write([(root, group.prompt)])
        group.cursors = [root, *(root.fork() for _ in range(self.num_samples - 1))]
        group.num_generated = max(1, group.num_generated)
        lost = TOKEN_BYTES * (group.num_generated - 1)
        if lost:
            pairs = zip(group.cursors, group.outputs, strict=True)
            self._write([(cursor, output[:lost]) for cursor, output in pairs])

    def _write(self, rows: list[tuple[Cursor, bytes]]) -> None:
        reservations = self.cache.reserve([(cursor, len(tokens) // TOKEN_BYTES) for cursor, tokens in rows])
        self._copies()
        for reservation, (_, tokens) in zip(reservations, rows, strict=True):
            self.cache.commit(reservation, tokens)

    def _copies(self) -> None:
        """Copy-on-write costs blocks here, and no time."""
        self.cache.take_copies()
        self.cache.copies_done()

    def _preempt_youngest(self) -> None:
        group = self._residents.pop()
        assert self._residents, "the oldest request always fits: it is never preempted"
        self._drop(group)
        self._queue.appendleft(group)
        self._num_preempted += 1

    def _leave(self) -> None:
        staying = []
        for group in self._residents:
            if group.num_generated < group.request.num_output:
                staying.append(group)
            else:
                self._drop(group)
                self._num_finished += 1
        self._residents = staying

    def _drop(self, group: _Group) -> None:
        # Forks first: each prunes down to where it was forked, and the first cursor prunes the prompt.
        for cursor in reversed(group.cursors):
            cursor.prune()
        group.cursors = []

    def _account(self) -> None:
        totals, block_size, n = self._totals, self.cache.block_size, self.num_samples
        for group in self._residents:
            num_kv = group.num_kv
            totals.blocks_unshared += n * -(-num_kv // block_size)
            unfilled = n * (-num_kv % block_size)
            totals.slots_unfilled += unfilled
            if not group.request.capped:
                totals.uncapped += n
                totals.unfilled_uncapped += unfilled
        totals.steps += 1
        totals.resident += len(self._residents)
        totals.sequences += n * len(self._residents)
        totals.blocks += self.cache.pool.num_blocks - self.cache.pool.num_free

    def _result(self) -> PagedResult:
        totals, block_size = self._totals, self.cache.block_size
        pool_slots = totals.steps * self.cache.pool.num_blocks * block_size
        taken = totals.blocks * block_size
        if self.num_samples == 1:
            assert totals.blocks == totals.blocks_unshared, "alone, a sequence takes ceil(tokens / B) blocks"
        shares = PoolShares(
            used=(taken - totals.slots_unfilled) / pool_slots,
            reservation=0.0,
            internal=totals.slots_unfilled / pool_slots,
            external=0.0,  # any free block serves any request
            free=1 - taken / pool_slots,
        )
        return PagedResult(
            shares=shares,
            waste=totals.slots_unfilled / taken,
            num_resident=totals.resident / totals.steps,
            waste_per_sequence=totals.unfilled_uncapped / totals.uncapped,
            blocks_per_sequence=totals.blocks_unshared / totals.sequences,
            saved_by_sharing=1 - totals.blocks / totals.blocks_unshared,
            num_finished=self._num_finished,
            num_preempted=self._num_preempted,
        )

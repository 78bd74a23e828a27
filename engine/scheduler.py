"""Decides what runs in a step, and who makes room when the pool is dry. It touches no tensor.

Decode rows come first, then prefill chunks, oldest first within a priority, under one token budget; then
waiting requests are admitted in the same order. One whose next block somebody else is computing waits for it.
When blocks run out: idle cached blocks go (the pages see to that), then idle branches are parked, least
recently used first and leased ones last, and then a running request is preempted, which is parking too. A
parked sequence comes back as a prompt of its own tokens.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import chain

from sortedcontainers import SortedKeyList

from ramet.engine.admission import Gate
from ramet.engine.block_changes import BlockChanges
from ramet.engine.errors import OutOfCapacity
from ramet.engine.preemption import choose_victim
from ramet.engine.sequence import Hold, Sequence
from ramet.engine.step import Row, Step
from ramet.radix.accounting import depth_first
from ramet.radix.prefix_cache import OutOfBlocks, PrefixCache, Reservation
from ramet.radix.tokens import TOKEN_BYTES, pack


class Pick:
    """One sequence's part of the step that is being put together: tokens [begin, end)."""

    __slots__ = ("begin", "end", "reservation", "sequence")

    def __init__(self, sequence: Sequence, begin: int, end: int) -> None:
        self.sequence = sequence
        self.begin = begin
        self.end = end
        self.reservation: Reservation | None = None

    @property
    def num_written(self) -> int:
        return max(0, self.end - self.sequence.num_computed)

    def row(self) -> Row:
        sequence = self.sequence
        assert sequence.run is not None, "a picked sequence runs"
        wanted = sequence.run.logits_from
        num_logits = 0 if wanted is None else max(0, self.end - max(wanted, self.begin))
        tokens = sequence.token_ids[self.begin : self.end]
        return Row(tokens, self.begin, self.num_written, num_logits, sequence.live_cursor.block_ids())


class Scheduled:
    """A step and whose it is: `picks[i]` is row i of the step."""

    def __init__(self, step: Step, picks: list[Pick], in_order: list[Pick]) -> None:
        self.step = step
        self.picks = picks
        self.in_order = in_order  # of admission, in which the rows are committed


class Scheduler:
    """Queues of sequences over one prefix cache."""

    def __init__(self, cache: PrefixCache, max_batch_tokens: int) -> None:
        self.cache = cache
        self.max_batch_tokens = max_batch_tokens
        self.waiting = SortedKeyList(key=lambda sequence: sequence.rank)
        self.running: dict[Sequence, None] = {}  # in order of admission
        # Live branches that nobody runs, least recently used first, by how fast they hold their blocks.
        self.idle: dict[Hold, dict[Sequence, None]] = {hold: {} for hold in Hold}
        self.refused: list[tuple[Sequence, OutOfCapacity]] = []  # can never fit; the engine tells them
        self.complete: list[Sequence] = []  # had nothing to compute: all of it was cached
        self.gate: Gate | None = None  # a benchmark's: who may start, beside what the pages say
        self.changes: BlockChanges | None = None  # of branches, if somebody wants to hear of them
        self.num_prompt_tokens = 0  # of all prompts, at their first admission
        self.num_cached_tokens = 0  # those of them that were found in the cache
        self.num_preemptions = 0
        self.num_parked_idle = 0

    # -- sequences come and go ---------------------------------------------------------------------

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence that has a run."""
        self._leave_idle(sequence)
        self.waiting.add(sequence)

    def start_now(self, sequence: Sequence) -> None:
        """Let a live fork of a running sequence run without waiting: it needs no block yet."""
        self._leave_idle(sequence)
        sequence.live_cursor.keep_row()
        self.running[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is."""
        if sequence in self.running:
            del self.running[sequence]
        elif not self._leave_idle(sequence):
            self.waiting.discard(sequence)

    def rest(self, sequence: Sequence) -> None:
        """The sequence's run has ended and its branch stays: it is the most recently used idle one."""
        self.remove(sequence)
        if sequence.num_computed >= sequence.num_given_up:
            sequence.num_given_up = 0
        if self.changes is not None:
            self.changes.rested(sequence)
        if sequence.is_live:
            sequence.live_cursor.row = None
            self.idle[sequence.hold][sequence] = None

    def hold(self, sequence: Sequence, hold: Hold) -> None:
        """From now on let a branch hold its blocks this fast while it is idle."""
        was_idle = self._leave_idle(sequence)
        sequence.hold = hold
        if was_idle:
            self.idle[hold][sequence] = None

    def park(self, sequence: Sequence) -> None:
        """Let an idle branch give up its blocks now, whatever holds them."""
        if self._leave_idle(sequence):
            self._park(sequence)

    def _leave_idle(self, sequence: Sequence) -> bool:
        """Whether it was idle; then it is not any more."""
        queue = self.idle[sequence.hold]
        if sequence not in queue:
            return False
        del queue[sequence]
        return True

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    # -- a step --------------------------------------------------------------------------------------

    def schedule(self) -> Scheduled | None:
        """The next step, with its blocks reserved; None if there is nothing to run."""
        picks = self._pick_running()
        while not self._reserve(picks):
            if not self._park_idle(None):
                self._preempt(picks)
                picks = self._pick_running()
        self._admit(picks)
        if not picks:
            return None
        order, shared = depth_first([p.sequence.live_cursor for p in picks], self.cache.block_size)
        rows = [picks[index] for index in order]
        return Scheduled(Step([pick.row() for pick in rows], shared), rows, picks)

    def commit(self, scheduled: Scheduled) -> None:
        """The step has run: its tokens have KV now, and full blocks are published."""
        for pick in scheduled.in_order:
            if pick.reservation is not None:
                sequence = pick.sequence
                written = sequence.token_ids[sequence.num_computed : pick.end]
                self.cache.commit(pick.reservation, pack(written))
                if sequence.stem is not None and sequence.num_computed >= sequence.stem.end:
                    sequence.stem.settle(sequence)

    def cancel(self, scheduled: Scheduled) -> None:
        """The step has not run: give its blocks back."""
        for pick in scheduled.in_order:
            if pick.reservation is not None:
                self.cache.cancel(pick.reservation)

    def _pick_running(self) -> list[Pick]:
        """What the running sequences compute next: first rows of one token, then chunks, oldest first."""
        budget = self.max_batch_tokens
        picks = []
        ready = [s for s in self.running if not s.is_held]
        for sequence in sorted(ready, key=lambda s: (len(s.token_ids) - _begin(s) > 1, s.rank)):
            if budget == 0:
                break
            pick = self._pick(sequence, budget)
            budget -= pick.end - pick.begin
            picks.append(pick)
        return picks

    def _pick(self, sequence: Sequence, budget: int) -> Pick:
        begin = _begin(sequence)
        return Pick(sequence, begin, min(len(sequence.token_ids), begin + budget))

    def _reserve(self, picks: list[Pick]) -> bool:
        """Take the blocks that `picks` write to, all or none."""
        writers = [pick for pick in picks if pick.num_written]
        if not writers:
            return True
        try:
            reserved = self.cache.reserve([(p.sequence.live_cursor, p.num_written) for p in writers])
        except OutOfBlocks:
            return False
        for pick, reservation in zip(writers, reserved, strict=True):
            pick.reservation = reservation
        if self.cache.copies or self.changes is not None:
            self._note(writers)
        return True

    def _note(self, writers: list[Pick]) -> None:
        """Count who copies a block, and tell who wants to hear of it what was reserved."""
        for pick in writers:
            sequence, tail = pick.sequence, pick.sequence.live_cursor.tail
            copy = tail.block if tail is not None and tail.block in self.cache.copies else None
            sequence.num_copies += copy is not None
            if self.changes is not None and pick.reservation is not None:
                self.changes.wrote(sequence, pick.end, pick.reservation.blocks, copy)

    # -- admission -----------------------------------------------------------------------------------

    def _admit(self, picks: list[Pick]) -> None:
        """Start waiting sequences, oldest first, as long as there are tokens in the budget and blocks."""
        budget = self.max_batch_tokens - sum(pick.end - pick.begin for pick in picks)
        claims = {self._claim(pick.sequence, pick.sequence.num_computed) for pick in picks}
        stems = {pick.sequence.stem for pick in picks}
        for sequence in list(self.waiting):
            if budget <= 0:
                return
            if sequence.is_held or (sequence.stem is not None and sequence.stem in stems):
                continue
            if self.gate is not None and not self.gate(sequence, self.running):
                return
            claim = self._next_block(sequence)
            if claim is not None and claim in claims:
                continue  # a sibling computes it; then it is a hit
            pick = self._start_or_make_room(sequence, budget, bool(picks))
            if pick is None:
                return
            if pick.begin == pick.end:
                self.complete.append(sequence)
                continue
            claims.add(claim)
            stems.add(sequence.stem)
            picks.append(pick)
            budget -= pick.end - pick.begin

    def _next_block(self, sequence: Sequence) -> Hashable:
        """What a waiting sequence would compute first, as `_claim` has it."""
        cached = self.cache.num_cached_blocks(sequence.namespace, pack(sequence.token_ids))
        if sequence.is_live:
            if sequence.num_computed < cached * self.cache.block_size:
                sequence.live_cursor.park()  # others have computed more of its tokens: it is placed again
            else:
                return self._claim(sequence, sequence.num_computed)
        return self._claim(sequence, cached * self.cache.block_size)

    def _claim(self, sequence: Sequence, position: int) -> Hashable:
        """The block that `position` lies in, by all tokens up to its end; None if they do not fill it."""
        end = (position // self.cache.block_size + 1) * self.cache.block_size
        if end > len(sequence.token_ids):
            return None
        return sequence.namespace, pack(sequence.token_ids[:end])

    def _start_or_make_room(self, sequence: Sequence, budget: int, others_run: bool) -> Pick | None:
        """Move a waiting sequence to those that run; None if there is no room for it yet, or ever."""
        while (pick := self._start(sequence, budget)) is None:
            if self._park_idle(sequence) or self._park_held():
                continue
            if others_run or self.running:
                return None  # what runs will make room
            if not self._park(sequence):
                self.waiting.remove(sequence)
                self._refuse(sequence)
                return None
        self.waiting.remove(sequence)
        self.running[sequence] = None
        return pick

    def _start(self, sequence: Sequence, budget: int) -> Pick | None:
        """Give a waiting sequence its cursor and the blocks of its first chunk; None if there is no room."""
        if not sequence.is_live:
            tokens = pack(sequence.token_ids)
            headroom = self._headroom(sequence)
            cursor = self.cache.admit(sequence.namespace, tokens, sequence.cursor, headroom=headroom)
            if cursor is None:
                return None
            sequence.cursor = cursor
            sequence.safe_until = len(sequence.token_ids) + headroom
            if self.changes is not None:
                self.changes.admitted(sequence)
            if sequence.num_cached_tokens is None:
                # The last token of a prompt always runs, so that there are logits.
                sequence.num_cached_tokens = min(cursor.length, len(tokens) // TOKEN_BYTES - 1)
                self.num_cached_tokens += sequence.num_cached_tokens
                self.num_prompt_tokens += len(tokens) // TOKEN_BYTES
        sequence.live_cursor.keep_row()
        assert sequence.run is not None, "a waiting sequence has a run"
        sequence.run.admitted(sequence)
        pick = self._pick(sequence, budget)
        return pick if self._reserve([pick]) else None

    def _headroom(self, sequence: Sequence) -> int:
        """Tokens that a sequence must be able to add at once: a block if it was preempted, so that each time
        it runs it gets further, and no more than it may add at all."""
        if sequence.cursor is None or sequence.run is None:
            return 0
        # The last token is sampled and not fed, so it needs no slot.
        return max(0, min(self.cache.block_size, sequence.run.num_tokens_left - 1))

    # -- making room -----------------------------------------------------------------------------------

    def _park_idle(self, wanting: Sequence | None) -> bool:
        """Park the least recently used idle branch, or else the youngest that waits with its blocks held."""
        for sequence in chain(self.idle[Hold.NONE], self.idle[Hold.LEASE]):
            self.num_parked_idle += 1
            return self._park(sequence)
        return any(self._park(sequence) for sequence in reversed(self.waiting) if sequence is not wanting)

    def _park_held(self) -> bool:
        """Park a sequence that rests until its reader has caught up; it queues again."""
        for sequence in self.running:
            if sequence.is_held:
                del self.running[sequence]
                self._park(sequence)
                self.waiting.add(sequence)
                return True
        return False

    def _park(self, sequence: Sequence) -> bool:
        """Turn a live branch's blocks into idle cache; False if it holds none."""
        if not sequence.is_live:
            return False
        if self.changes is not None:
            self.changes.parked(sequence)
        sequence.num_given_up = max(sequence.num_given_up, sequence.num_computed)
        sequence.live_cursor.park()
        self._leave_idle(sequence)
        return True

    def _preempt(self, picks: list[Pick]) -> None:
        """Park a running sequence, so that the first of `picks` that lacks blocks can go on."""
        needy, num_short = self._first_short(picks)
        victim = choose_victim(self.running, needy, num_short)
        del self.running[victim]
        self._park(victim)
        self.waiting.add(victim)
        self.num_preemptions += 1

    def _first_short(self, picks: list[Pick]) -> tuple[Sequence, int]:
        """The first of `picks`, by rank, for which the blocks do not suffice, and how many it lacks."""
        writes = []
        for pick in sorted(picks, key=lambda pick: pick.sequence.rank):
            if pick.num_written:
                writes.append((pick.sequence.live_cursor, pick.num_written))
                short = self.cache.num_needed(writes) - self.cache.num_available
                if short > 0:
                    return pick.sequence, short
        # The source of a queued copy, or a block taken over, made the difference: the last one waits.
        return max((pick.sequence for pick in picks), key=lambda sequence: sequence.rank), 1

    def _refuse(self, sequence: Sequence) -> None:
        needed = -(-len(sequence.token_ids) // self.cache.block_size)
        self.refused.append((sequence, OutOfCapacity(needed, self.cache.pool.num_blocks)))


def _begin(sequence: Sequence) -> int:
    """The first token that a sequence runs next."""
    assert sequence.run is not None, "a sequence in the scheduler has a run"
    wanted = sequence.run.logits_from
    # Tokens that have KV, but whose logits are wanted, run again as queries only.
    return sequence.num_computed if wanted is None else min(sequence.num_computed, wanted)

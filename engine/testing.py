"""What tests need to look inside an engine and to break it: invariants, scripted and tiny models, faults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from ramet.engine.llm import LLM
from ramet.engine.model_runner import ModelRunner
from ramet.engine.scripted import ScriptedModel, ScriptedRunner
from ramet.engine.step import Step
from ramet.engine.tiny_model import tiny_llama
from ramet.radix.accounting import check
from ramet.radix.prefix_cache import Copy, OutOfBlocks, Reservation

__all__ = [
    "ScriptedModel",
    "ScriptedRunner",
    "check_idle",
    "check_invariants",
    "delay_copies",
    "fail_forward",
    "fail_reservation",
    "tiny_llama",
]


def check_invariants(llm: LLM) -> None:
    """Assert every rule that must hold after each step, by a full recount."""
    engine = llm.engine
    check(engine.cache, [s.cursor for s in engine.sequences if s.cursor is not None])
    assert not engine.cache.reservations, "a reservation outlived its step"
    scheduler = engine.scheduler
    idle = [sequence for queue in scheduler.idle.values() for sequence in queue]
    assert all(one in scheduler.idle[one.hold] for one in idle), "an idle branch is in the wrong queue"
    for sequence in [*scheduler.running, *scheduler.waiting, *idle]:
        assert sequence in engine.sequences, "a released sequence is still scheduled"
    for sequence in engine.sequences:
        queued = (sequence in scheduler.running) + (sequence in scheduler.waiting)
        assert queued == (sequence.run is not None), "a run is in exactly one queue"
        assert not (sequence in idle and queued), "an idle branch is queued"
        assert sequence.num_computed <= len(sequence.token_ids), "KV without a token"
    if isinstance(engine.runner, ModelRunner):
        engine.runner.pool.check()


def check_idle(llm: LLM) -> None:
    """Assert that nothing runs and no block is in use: free + cached idle = pool."""
    check_invariants(llm)
    pages = llm.stats().pages
    assert not llm.engine.sequences, "somebody still holds a sequence"
    assert pages.num_in_use == 0, "blocks are in use"
    assert pages.num_free + pages.num_cached_idle == pages.num_blocks, "blocks are missing"


class _Faulty:
    """A runner that wraps another one; see the fault injections below."""

    def __init__(self, inner: ModelRunner | ScriptedRunner) -> None:
        self.inner = inner
        self.fail_in: set[int] = set()
        self.num_forwards = 0
        self.delayed: list[Copy] | None = None

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        if self.delayed is None:
            self.inner.copy_blocks(copies)
        else:
            self.delayed.extend(copies)

    def copy_late(self) -> None:
        if self.delayed:
            self.inner.copy_blocks(self.delayed)
            self.delayed.clear()

    def forward(self, step: Step) -> Tensor:
        index, self.num_forwards = self.num_forwards, self.num_forwards + 1
        self.copy_late()
        if index in self.fail_in:
            raise RuntimeError(f"injected failure of forward {index}")
        return self.inner.forward(step)


@contextmanager
def _wrapped(llm: LLM) -> Iterator[_Faulty]:
    inner = llm.engine.runner
    assert isinstance(inner, (ModelRunner, ScriptedRunner)), "one fault at a time"
    faulty = _Faulty(inner)
    llm.engine.runner = faulty
    try:
        yield faulty
    finally:
        llm.engine.runner = inner


@contextmanager
def fail_forward(llm: LLM, *indices: int) -> Iterator[None]:
    """Let the forwards with these indices, counted from 0 on entry, raise after the copies have run."""
    with _wrapped(llm) as faulty:
        faulty.fail_in = set(indices)
        yield


@contextmanager
def delay_copies(llm: LLM) -> Iterator[None]:
    """Run block copies as late as they may: right before the writes of their step."""
    with _wrapped(llm) as faulty:
        faulty.delayed = []
        yield
        faulty.copy_late()


@contextmanager
def fail_reservation(llm: LLM, *indices: int) -> Iterator[None]:
    """Let these calls of `reserve`, counted from 0 on entry, find no block, before any change."""
    cache = llm.engine.cache
    original = cache.reserve
    count = 0

    def reserve(writes: Sequence[tuple[object, int]]) -> list[Reservation]:
        nonlocal count
        index, count = count, count + 1
        if index in indices:
            raise OutOfBlocks(len(writes), 0)
        return original(writes)  # type: ignore[arg-type]

    cache.reserve = reserve  # type: ignore[method-assign]
    try:
        yield
    finally:
        cache.reserve = original  # type: ignore[method-assign]

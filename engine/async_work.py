"""One verb under way on the engine's thread: what the thread does with it, and what its caller holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ramet.engine.beam_search import BeamSearch
from ramet.engine.engine import Engine
from ramet.engine.operation import Operation
from ramet.engine.outputs import Delta
from ramet.engine.runs import FanOut, Generation, Run
from ramet.engine.stream_reader import StreamReader

if TYPE_CHECKING:
    from ramet.engine.async_llm import AsyncLLM

T = TypeVar("T")


class Task:
    """The thread's side: an operation that waits for its runs, and those who wait for it."""

    def __init__(
        self,
        operation: Operation[Any],
        future: Future[Any],
        max_unread: int | None,
        undo: Callable[[Any], object],
    ) -> None:
        self.operation = operation
        self.future = future
        self.max_unread = max_unread  # None: its tokens are not read while they come
        self.undo = undo
        self.runs: list[Run] = []
        self.reader: StreamReader | None = None
        self.waiting: Future[list[Delta]] | None = None
        self.ended = False
        self.result: Any = None

    def advance(self) -> bool:
        """Go on if all runs have finished, and tell those who wait; True when the operation has ended."""
        while not self.ended and all(run.finished for run in self.runs):
            error = next((run.error for run in self.runs if run.error is not None), None)
            try:
                waits_for = next(self.operation) if error is None else self.operation.throw(error)
            except StopIteration as stop:
                self.result = stop.value
                self._end(resolve, stop.value)
            except BaseException as failure:
                self._end(reject, failure)
            else:
                self._wait_for(list(waits_for))
        self.serve()
        return self.ended

    def serve(self) -> None:
        """Hand on what is new, and hold the generations while too much of them is unread."""
        if self.waiting is not None:
            deltas = [] if self.reader is None else self.reader.read()
            if deltas or self.ended:
                waiting, self.waiting = self.waiting, None
                resolve(waiting, deltas)
        if self.reader is not None and self.max_unread is not None:
            self.reader.hold(self.reader.num_unread >= self.max_unread)

    def cancel(self, engine: Engine) -> bool:
        """End what it generates now; the tokens so far stay, and the operation goes on with them."""
        if self.ended:
            return False
        runs = set(self.runs)
        for run in runs:
            if isinstance(run, BeamSearch):
                run.cancel(engine)
        for sequence in [one for one in engine.sequences if one.run in runs]:
            engine.abort(sequence)
        return True

    def close(self, error: BaseException) -> None:
        """Let go of everything, the result as well; whoever still waits for it gets `error`."""
        self.operation.close()
        if self.result is not None:
            self.undo(self.result)
        self._end(reject, error)
        self.serve()

    def _wait_for(self, runs: list[Run]) -> None:
        self.runs = runs
        if self.max_unread is not None and self.reader is None:
            generations: list[Generation] = []
            for run in runs:
                if isinstance(run, FanOut):
                    generations += run.generations
                elif isinstance(run, Generation) and run not in generations:
                    generations.append(run)
            self.reader = StreamReader(generations) if generations else None

    def _end(self, tell: Callable[[Future[Any], Any], None], what: Any) -> None:
        self.ended = True
        tell(self.future, what)


class Work(Generic[T]):
    """The caller's side of a verb: read its tokens while they come, wait for its result, or end it.

    As a context manager it is closed at the end.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        started: Future[Task],
        future: Future[Any],
        then: Callable[[Any], T] = lambda result: result,
    ) -> None:
        self._llm = llm
        self._started = started
        self._future = future
        self._then = then
        self._settled = False  # the result was taken, or let go of

    def __enter__(self) -> Work[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def started(self) -> None:
        """Return when the input was found good and the work is queued; raise what is wrong with it."""
        await _outcome(self._started)
        if self._future.done():
            await self.result()

    async def read(self) -> list[Delta]:
        """What came since the last time, one Delta a choice; nothing once all was read or the work failed."""
        task = await _outcome(self._started)
        future: Future[list[Delta]] = Future()

        def command() -> None:
            task.waiting = future
            task.serve()

        self._llm._send(command, future)
        return await _outcome(future)

    async def deltas(self) -> AsyncGenerator[Delta]:
        """All that comes, and in the end the error if there was one."""
        while deltas := await self.read():
            for delta in deltas:
                yield delta
        await _outcome(self._future)

    async def result(self) -> T:
        """What the verb gives. A caller that is cancelled closes the work itself."""
        result = await _outcome(self._future)
        self._settled = True
        return self._then(result)

    async def cancel(self) -> bool:
        """End what is generated now, keeping the tokens so far; the result comes as ever.

        Returns False if the work had ended before.
        """
        task = await _outcome(self._started)
        return await self._llm._call(lambda: task.cancel(self._llm._llm.engine))

    def close(self) -> None:
        """Let go of it, done or not: nothing stays behind but a result that was taken. Idempotent."""
        if not self._settled:
            self._settled = True
            self._llm._send(lambda: self._llm._close(self._started.result()))


async def _outcome(future: Future[T]) -> T:
    """What a future of the thread gives. Whoever waits may be cancelled; the future is not."""
    if future.done():
        await asyncio.sleep(0)  # what the thread told the loop before comes first
    else:
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def wake() -> None:
            if not done.done():
                done.set_result(None)

        # Half of what wrap_future and shield take, and each request waits here.
        future.add_done_callback(lambda _: _call_soon(loop, wake))
        await done
    return future.result()


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """From the engine's thread; a loop that has been closed has nobody left to tell."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function)


def no_undo(result: object) -> None:
    """For results that hold nothing."""


def resolve(future: Future[Any], value: Any) -> None:
    if not future.done() and future.set_running_or_notify_cancel():
        future.set_result(value)


def reject(future: Future[Any], error: BaseException) -> None:
    if not future.done() and future.set_running_or_notify_cancel():
        future.set_exception(error)

"""The same verbs for asyncio. One thread owns the engine and all of its state; everybody else sends messages.

A verb is an operation of `llm.py`, which the thread drives beside all others: whatever is asked at the same
time runs in the same batches. A caller that is cancelled leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence as Seq
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeAlias

from ramet.engine.arguments import Prompt
from ramet.engine.branch import Branch
from ramet.engine.checks import check_int, checked_list
from ramet.engine.engine import Stats
from ramet.engine.errors import RametError
from ramet.engine.llm import LLM
from ramet.engine.operation import Operation, T
from ramet.engine.outputs import Choice, Delta, Output, Score
from ramet.engine.runs import Run
from ramet.engine.sampling_params import SamplingParams
from ramet.engine.stream_reader import StreamReader

# What the thread is to do between two steps, and who is told if it never will.
Command: TypeAlias = tuple[Callable[[], None], "Future[Any] | None"]


class Closed(RametError):
    """The engine has been closed: nothing more can be asked of it."""


class _Task:
    """An operation that waits for its runs, and whoever waits for the operation."""

    def __init__(self, operation: Operation[Any], future: Future[Any]) -> None:
        self.operation = operation
        self.future = future
        self.runs: list[Run] = []
        self.result: Any = None

    def advance(self) -> bool:
        """Go on if all runs have finished; True when the operation has ended."""
        while all(run.finished for run in self.runs):
            error = next((run.error for run in self.runs if run.error is not None), None)
            try:
                waits_for = next(self.operation) if error is None else self.operation.throw(error)
            except StopIteration as stop:
                self.result = stop.value
                _resolve(self.future, stop.value)
                return True
            except BaseException as failure:
                _reject(self.future, failure)
                return True
            self.runs = list(waits_for)
        return False


class _Stream:
    """A stream that is being read: what it has to say, and who waits to hear it."""

    def __init__(self, reader: StreamReader, max_unread: int) -> None:
        self.reader = reader
        self.max_unread = max_unread
        self.waiting: Future[list[Delta]] | None = None
        self.error: BaseException | None = None  # why it was cut off

    def serve(self) -> None:
        """Hand on what is new, and hold the generation while too much of it is unread."""
        if self.waiting is not None:
            try:
                deltas = self.reader.read()
            except BaseException as failure:
                waiting, self.waiting = self.waiting, None
                _reject(waiting, failure)
                return
            if deltas or self.reader.done:
                waiting, self.waiting = self.waiting, None
                _resolve(waiting, deltas)
        self.reader.hold(self.reader.num_unread >= self.max_unread)


class AsyncLLM:
    """An LLM whose verbs are coroutines. All may be called from any number of tasks of one event loop."""

    def __init__(self, model: Any = "smollm2", tokenizer: Any = None, **settings: Any) -> None:
        """As LLM, which it may also be given: that one must not be used directly any more."""
        self._llm = model if isinstance(model, LLM) else LLM(model, tokenizer, **settings)
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._tasks: list[_Task] = []
        self._streams: list[_Stream] = []
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="ramet-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End everything that runs, each with an error, and stop the engine's thread. Idempotent."""
        if not self._closed:
            self._closed = True
            self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    # -- verbs ---------------------------------------------------------------------------------------

    async def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache: bool = True,
        **settings: Any,
    ) -> list[Output]:
        """See LLM.generate."""
        return await self._run(lambda: self._llm._generating(prompts, params, priority, cache, settings))

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        max_unread: int = 256,
        **settings: Any,
    ) -> AsyncGenerator[Delta]:
        """See LLM.stream. While `max_unread` tokens were not read yet the generation rests.

        What came since the last read is one Delta a choice, so a slow reader costs no memory.
        """
        check_int("max_unread", max_unread, 1, None)
        stream = await self._call(lambda: self._open(prompt, params, settings, max_unread))
        try:
            while True:
                for delta in await self._read(stream):
                    yield delta
                if stream.error is not None:
                    raise stream.error
                if stream.reader.all_read:
                    return
        finally:
            self._send(lambda: self._shut(stream))

    async def branch(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Seq[Mapping[str, Any]] | None = None,
        tools: Seq[Mapping[str, Any]] | None = None,
    ) -> AsyncBranch:
        """See LLM.branch."""
        return AsyncBranch(self, await self._run(lambda: self._llm._branching(prompt, messages, tools)))

    async def step(
        self,
        branches: Seq[AsyncBranch],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        **settings: Any,
    ) -> list[Choice]:
        """See LLM.step."""
        inner = _inner(branches)
        return await self._run(lambda: self._llm._stepping(inner, params, settings))

    async def expand(
        self,
        branches: Seq[AsyncBranch],
        n: int | None = None,
        *,
        params: SamplingParams | Seq[SamplingParams] | None = None,
        **settings: Any,
    ) -> list[list[AsyncBranch]]:
        """See LLM.expand."""
        inner = _inner(branches)
        families = await self._run(lambda: self._llm._expanding(inner, n, params, settings))
        return [[AsyncBranch(self, child) for child in family] for family in families]

    async def stats(self) -> Stats:
        """See LLM.stats."""
        return await self._call(self._llm.stats)

    # -- messages to the thread ------------------------------------------------------------------------

    def _send(self, command: Callable[[], None], future: Future[Any] | None = None) -> None:
        if self._closed:
            if future is not None:
                raise Closed("the engine has been closed")
            return  # what was to be let go is gone
        self._commands.put((command, future))

    async def _call(self, function: Callable[[], T]) -> T:
        """Run `function` between two steps and return what it returns."""
        future: Future[T] = Future()
        results: list[T] = []

        def command() -> None:
            try:
                results.append(function())
                _resolve(future, results[0])
            except BaseException as failure:
                _reject(future, failure)

        self._send(command, future)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._send(lambda: self._drop(results))
            raise

    async def _run(self, start: Callable[[], Operation[T]]) -> T:
        """Drive an operation beside all others; a caller that is cancelled closes it."""
        future: Future[T] = Future()
        tasks: list[_Task] = []

        def command() -> None:
            task = _Task(start(), future)
            tasks.append(task)
            if not future.cancelled() and not task.advance():
                self._tasks.append(task)

        def cancel() -> None:
            for task in tasks:
                if task in self._tasks:
                    self._tasks.remove(task)
                    task.operation.close()
                self._drop(task.result)

        self._send(command, future)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._send(cancel)
            raise

    async def _read(self, stream: _Stream) -> list[Delta]:
        future: Future[list[Delta]] = Future()

        def command() -> None:
            stream.waiting = future
            stream.serve()

        self._send(command, future)
        return await asyncio.wrap_future(future)

    # -- on the thread -----------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Serve until closed. A bug must not leave callers waiting for a thread that is gone."""
        try:
            self._loop()
            self._end(Closed("the engine has been closed"))
        except BaseException as failure:
            self._closed = True
            self._end(failure)
            raise

    def _loop(self) -> None:
        """Take messages, step, and tell those who wait; rest while there is nothing to do."""
        idle = True
        while True:
            while idle or not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    return
                command[0]()
                idle = False
            idle = not self._llm.engine.step()
            self._tasks = [task for task in self._tasks if not task.advance()]
            for stream in self._streams:
                stream.serve()

    def _open(
        self, prompt: Prompt, params: SamplingParams | None, settings: dict[str, Any], max_unread: int
    ) -> _Stream:
        stream = _Stream(self._llm._open_stream(prompt, params, settings), max_unread)
        self._streams.append(stream)
        return stream

    def _shut(self, stream: _Stream) -> None:
        if stream in self._streams:
            self._streams.remove(stream)
            stream.reader.close()

    def _drop(self, result: object) -> None:
        """Let go of what was made for a caller who was cancelled before it came."""
        if isinstance(result, Branch):
            result.prune()
        elif isinstance(result, _Stream):
            self._shut(result)
        elif isinstance(result, list):
            for one in result:
                self._drop(one)

    def _end(self, error: BaseException) -> None:
        """The thread stops: whoever still waits gets `error`, also those whose message was not taken."""
        for task in self._tasks:
            task.operation.close()
            _reject(task.future, error)
        for stream in list(self._streams):
            stream.error = error
            self._shut(stream)
            if stream.waiting is not None:
                _reject(stream.waiting, error)
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None and command[1] is not None:
                _reject(command[1], error)


class AsyncBranch:
    """A Branch whose verbs are coroutines. See Branch for what they do."""

    def __init__(self, llm: AsyncLLM, branch: Branch) -> None:
        self.llm = llm
        self._branch = branch

    def __repr__(self) -> str:
        return f"Async{self._branch!r}"

    async def __aenter__(self) -> AsyncBranch:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.prune()

    @property
    def id(self) -> int:
        return self._branch.id

    @property
    def output(self) -> Choice | None:
        """What the last generate, expand or step gave."""
        return self._branch.output

    @property
    def token_ids(self) -> list[int]:
        """A copy of all tokens, prompt and generated so far."""
        return self._branch.token_ids

    @property
    def text(self) -> str:
        return self._branch.text

    def __len__(self) -> int:
        return len(self._branch)

    async def fork(self, n: int = 1, *, at: int | None = None) -> list[AsyncBranch]:
        return self._wrap(await self.llm._call(lambda: self._branch.fork(n, at=at)))

    async def extend(self, text: Prompt) -> None:
        await self.llm._call(lambda: self._branch.extend(text))

    async def generate(self, params: SamplingParams | None = None, **settings: Any) -> Choice:
        return await self.llm._run(lambda: self._branch._generating(params, settings))

    async def expand(
        self,
        n: int | None = None,
        *,
        params: Seq[SamplingParams] | SamplingParams | None = None,
        **settings: Any,
    ) -> list[AsyncBranch]:
        return self._wrap(await self.llm._run(lambda: self._branch._expanding(n, params, settings)))

    async def score(self, candidates: Seq[Prompt]) -> list[Score]:
        return await self.llm._run(lambda: self._branch._scoring(candidates))

    async def truncate(self, position: int) -> None:
        await self.llm._call(lambda: self._branch.truncate(position))

    async def release(self) -> None:
        await self.llm._call(self._branch.release)

    async def prune(self) -> int:
        return await self.llm._call(self._branch.prune)

    async def promote(self) -> int:
        return await self.llm._call(self._branch.promote)

    def _wrap(self, branches: Iterable[Branch]) -> list[AsyncBranch]:
        return [AsyncBranch(self.llm, branch) for branch in branches]


def _inner(branches: object) -> list[Branch]:
    """The engine's own branches; what is none of ours is left for the engine to refuse."""
    many = checked_list("branches", branches, "branches")
    return [branch._branch if isinstance(branch, AsyncBranch) else branch for branch in many]


def _resolve(future: Future[Any], value: Any) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(value)


def _reject(future: Future[Any], error: BaseException) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)

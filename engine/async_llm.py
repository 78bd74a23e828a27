"""The same verbs for asyncio. One thread owns the engine and all of its state; everybody else sends messages.

A verb is an operation of `llm.py`, which the thread drives beside all others: whatever is asked at the same
time runs in the same batches. A caller that is cancelled leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Hashable, Iterable, Mapping, Sequence as Seq
from concurrent.futures import Future
from itertools import chain
from queue import SimpleQueue
from typing import Any, TypeAlias

from ramet.engine.arguments import Prompt
from ramet.engine.async_work import Task, Work, no_undo, reject, resolve
from ramet.engine.beam_params import BeamSearchParams
from ramet.engine.beam_search import OnProgress
from ramet.engine.block_changes import BlockChanges
from ramet.engine.branch import Branch, prune_all
from ramet.engine.checks import check_int, checked_list
from ramet.engine.config import EngineConfig
from ramet.engine.engine import LOCAL, Stats
from ramet.engine.errors import RametError
from ramet.engine.llm import LLM
from ramet.engine.look import BranchLook, TreeLook, look_at, look_at_all, look_at_changes
from ramet.engine.operation import Operation, T
from ramet.engine.outputs import Choice, Delta, NextToken, Output, Score
from ramet.engine.sampling_params import SamplingParams
from ramet.engine.scoring import Normalize
from ramet.engine.sequence import Hold
from ramet.engine.tokenizer import Tokenizer
from ramet.kernels import openmp

# What the thread is to do between two steps, and who is told if it never will.
Command: TypeAlias = tuple[Callable[[], None], tuple["Future[Any]", ...]]


class Closed(RametError):
    """The engine has been closed: nothing more can be asked of it."""


class AsyncLLM:
    """An LLM whose verbs are coroutines. All may be called from any number of tasks of one event loop."""

    def __init__(self, model: Any = "smollm2", tokenizer: Any = None, **settings: Any) -> None:
        """As LLM, which it may also be given: that one must not be used directly any more."""
        self._llm = model if isinstance(model, LLM) else LLM(model, tokenizer, **settings)
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._tasks: list[Task] = []
        self._closed = False
        openmp.dismiss_team()  # of the thread that loaded the model: another one computes from here on
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

    # -- what never changes, and may be read from any thread -------------------------------------------

    @property
    def config(self) -> EngineConfig:
        return self._llm.config

    @property
    def vocab_size(self) -> int:
        return self._llm.engine.vocab_size

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block, over all layers."""
        return self._llm.engine.block_nbytes

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The engine's own: others make a `copy` for their threads."""
        return self._llm.tokenizer

    @property
    def is_running(self) -> bool:
        """Whether the thread is there to do anything: not after `close`, nor after a bug."""
        return not self._closed and self._thread.is_alive()

    @property
    def has_changes(self) -> bool:
        """Whether `look_at_changes` has something to tell, as far as can be seen from any thread."""
        changes = self._llm.engine.scheduler.changes
        return changes is not None and bool(changes.of)

    # -- verbs ---------------------------------------------------------------------------------------

    async def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | BeamSearchParams | Seq[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache: bool = True,
        **settings: Any,
    ) -> list[Output]:
        """See LLM.generate."""
        with self.start(prompts, params, priority=priority, cache=cache, **settings) as work:
            return await work.result()

    def start(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | BeamSearchParams | Seq[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache: bool = True,
        namespace: Hashable = LOCAL,
        max_unread: int | None = None,
        on_progress: OnProgress | None = None,
        **settings: Any,
    ) -> Work[list[Output]]:
        """Begin to generate. With `max_unread` the tokens are read while they come, and while so many of a
        choice were not read yet it rests; what came since the last read is one Delta a choice, so a slow
        reader costs no memory. Prompts of another `namespace` share nothing. `on_progress` is called on the
        engine's thread after each step of a beam search."""
        operation = lambda: self._llm._generating(  # noqa: E731
            prompts, params, priority, cache, settings, namespace, max_unread is not None, on_progress
        )
        return self._start(operation, max_unread)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        max_unread: int = 256,
        **settings: Any,
    ) -> AsyncGenerator[Delta]:
        """See LLM.stream, and `start` for `max_unread`."""
        if not isinstance(prompt, str):  # a bare number would be the one token of a prompt
            prompt = checked_list("prompt", prompt, "token ids, or a text")
        with self.start([prompt], params, max_unread=max_unread, **settings) as work:
            async for delta in work.deltas():
                yield delta

    async def branch(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Seq[Mapping[str, Any]] | None = None,
        tools: Seq[Mapping[str, Any]] | None = None,
        namespace: Hashable = LOCAL,
        compute: bool = True,
    ) -> AsyncBranch:
        """See LLM.branch; branches of another `namespace` share nothing. Without `compute`, later."""
        operation = lambda: self._llm._branching(prompt, messages, tools, namespace, compute)  # noqa: E731
        return AsyncBranch(self, await self._run(operation, Branch.prune))

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
        families = await self._run(
            lambda: self._llm._expanding(inner, n, params, settings),
            lambda families: prune_all(chain.from_iterable(families)),
        )
        return [self._wrap(family) for family in families]

    async def beam_search(
        self,
        prompt: Prompt | None = None,
        params: BeamSearchParams | None = None,
        *,
        messages: Seq[Mapping[str, Any]] | None = None,
        tools: Seq[Mapping[str, Any]] | None = None,
        on_progress: OnProgress | None = None,
        **settings: Any,
    ) -> list[AsyncBranch]:
        """See LLM.beam_search; `on_progress` is called on the engine's thread."""
        with self.start_beam_search(
            prompt, params, messages=messages, tools=tools, on_progress=on_progress, **settings
        ) as work:
            return await work.result()

    def start_beam_search(
        self,
        prompt: Prompt | None = None,
        params: BeamSearchParams | None = None,
        *,
        messages: Seq[Mapping[str, Any]] | None = None,
        tools: Seq[Mapping[str, Any]] | None = None,
        namespace: Hashable = LOCAL,
        on_progress: OnProgress | None = None,
        **settings: Any,
    ) -> Work[list[AsyncBranch]]:
        """Begin a `beam_search`. Prompts of another `namespace` share nothing."""
        operation = lambda: self._llm._beam_searching(  # noqa: E731
            prompt, messages, tools, params, settings, on_progress, namespace
        )
        return self._start(operation, None, self._wrap, prune_all)

    async def stats(self) -> Stats:
        """See LLM.stats."""
        return await self._call(self._llm.stats)

    async def reset_prefix_cache(self, of: Callable[[Hashable], bool] = lambda namespace: True) -> int:
        """See LLM.reset_prefix_cache; `of` says of which namespaces. It is called on the engine's thread."""
        return await self._call(lambda: self._llm.engine.reset_prefix_cache(of))

    async def look(self, branches: Seq[AsyncBranch]) -> list[BranchLook]:
        """What each of these branches holds now, all at one moment."""
        inner = self._llm._checked(_inner(branches))
        return await self._call(lambda: [look_at(branch) for branch in inner])

    async def look_at_tree(self, branches: Seq[AsyncBranch]) -> TreeLook:
        """What these branches hold together, and how they share it."""
        inner = self._llm._checked(_inner(branches))
        return await self._call(lambda: look_at_all(inner))

    async def look_at_changes(
        self, trees: Seq[Seq[AsyncBranch]], always: Seq[bool]
    ) -> tuple[BlockChanges, list[TreeLook | None]]:
        """What happened to blocks since the last call, and how those of these trees are now that it concerns.

        Where `always` says so a tree is looked at in any case. What was before the first call is not known.
        """
        inner = [self._llm._checked(_inner(tree)) for tree in trees]
        scheduler = self._llm.engine.scheduler
        return await self._call(lambda: look_at_changes(scheduler, inner, always))

    def _wrap(self, branches: Iterable[Branch]) -> list[AsyncBranch]:
        return [AsyncBranch(self, branch) for branch in branches]

    # -- messages to the thread ------------------------------------------------------------------------

    def _send(self, command: Callable[[], None], *futures: Future[Any]) -> None:
        if self._closed:
            if futures:
                raise Closed("the engine has been closed")
            return  # what was to be let go is gone
        self._commands.put((command, futures))

    async def _call(self, function: Callable[[], T], undo: Callable[[T], object] = no_undo) -> T:
        """Run `function` between two steps and return what it returns; `undo` it if the caller has left."""
        future: Future[T] = Future()
        results: list[T] = []

        def command() -> None:
            try:
                results.append(function())
                resolve(future, results[0])
            except BaseException as failure:
                reject(future, failure)

        def take_back() -> None:
            for result in results:
                undo(result)

        self._send(command, future)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._send(take_back)
            raise

    def _start(
        self,
        start: Callable[[], Operation[Any]],
        max_unread: int | None = None,
        then: Callable[[Any], T] = lambda result: result,
        undo: Callable[[Any], object] = no_undo,
    ) -> Work[T]:
        """Have the thread drive an operation beside all others; `undo` lets go of a result nobody took."""
        if max_unread is not None:
            check_int("max_unread", max_unread, 1, None)
        future: Future[Any] = Future()
        started: Future[Task] = Future()

        def command() -> None:
            task = Task(start(), future, max_unread, undo)
            if not task.advance():
                self._tasks.append(task)
            resolve(started, task)

        self._send(command, started, future)
        return Work(self, started, future, then)

    async def _run(self, start: Callable[[], Operation[T]], undo: Callable[[T], object] = no_undo) -> T:
        """Drive an operation beside all others; a caller that is cancelled closes it."""
        work: Work[T] = self._start(start, undo=undo)
        with work:
            return await work.result()

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

    def _close(self, task: Task) -> None:
        """Let go of a task, or of a result that nobody took."""
        if task in self._tasks:
            self._tasks.remove(task)
        task.close(Closed("the work was closed before it had ended"))

    def _end(self, error: BaseException) -> None:
        """The thread stops: whoever still waits gets `error`, also those whose message was not taken."""
        for task in self._tasks:
            task.close(error)
        while not self._commands.empty():
            for future in (self._commands.get() or ((), ()))[1]:
                reject(future, error)


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
    def namespace(self) -> Hashable:
        return self._branch._sequence.namespace

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

    @property
    def position(self) -> int:
        """How many tokens there are, as a client's branch says it."""
        return len(self._branch)

    async def fork(self, n: int = 1, *, at: int | None = None) -> list[AsyncBranch]:
        return self.llm._wrap(await self.llm._call(lambda: self._branch.fork(n, at=at), prune_all))

    async def extend(self, text: Prompt) -> list[int]:
        return await self.llm._call(lambda: self._branch.extend(text))

    async def compute(
        self, text: Prompt = (), *, at: int | None = None, logprobs: bool = False
    ) -> list[float]:
        """`extend`, and compute all that the branch has to; a caller that is cancelled has changed nothing.

        With `at`, all but the first `at` tokens are forgotten before. With `logprobs`, returns those of the
        new tokens.
        """
        return await self.llm._run(lambda: self._branch._extending(text, at, logprobs))

    async def generate(self, params: SamplingParams | None = None, **settings: Any) -> Choice:
        with self.start_generate(params, **settings) as work:
            return await work.result()

    def start_generate(
        self, params: SamplingParams | None = None, *, max_unread: int | None = None, **settings: Any
    ) -> Work[Choice]:
        """Begin to `generate`; see AsyncLLM.start."""
        return self.llm._start(lambda: self._branch._generating(params, settings), max_unread)

    async def expand(
        self,
        n: int | None = None,
        *,
        params: Seq[SamplingParams] | SamplingParams | None = None,
        **settings: Any,
    ) -> list[AsyncBranch]:
        with self.start_expand(n, params=params, **settings) as work:
            return await work.result()

    def start_expand(
        self,
        n: int | None = None,
        *,
        params: Seq[SamplingParams] | SamplingParams | None = None,
        max_unread: int | None = None,
        born: Callable[[list[AsyncBranch]], None] | None = None,
        **settings: Any,
    ) -> Work[list[AsyncBranch]]:
        """Begin to `expand`; see AsyncLLM.start. `born` gets the children before any of their tokens is read:
        it is called on the engine's thread, and only if there are any. Whoever was told of them has them:
        once complete, they stay when the work is closed."""
        tell = None if born is None else lambda children: born(self.llm._wrap(children))
        operation = lambda: self._branch._expanding(n, params, settings, tell)  # noqa: E731
        return self.llm._start(operation, max_unread, self.llm._wrap, prune_all if born is None else no_undo)

    async def beam_search(
        self,
        params: BeamSearchParams | None = None,
        *,
        on_progress: OnProgress | None = None,
        **settings: Any,
    ) -> list[AsyncBranch]:
        """See Branch.beam_search; `on_progress` is called on the engine's thread."""
        with self.start_beam_search(params, on_progress=on_progress, **settings) as work:
            return await work.result()

    def start_beam_search(
        self,
        params: BeamSearchParams | None = None,
        *,
        on_progress: OnProgress | None = None,
        **settings: Any,
    ) -> Work[list[AsyncBranch]]:
        """Begin a `beam_search`."""
        operation = lambda: self._branch._beam_searching(params, settings, on_progress)  # noqa: E731
        return self.llm._start(operation, None, self.llm._wrap, prune_all)

    async def score(
        self, candidates: Seq[Prompt], *, suffix: Prompt | None = None, normalize: Normalize = "none"
    ) -> list[Score]:
        return await self.llm._run(lambda: self._branch._scoring(candidates, suffix, normalize, aside=True))

    async def next_tokens(self, labels: Seq[str | int], *, suffix: Prompt | None = None) -> list[NextToken]:
        return await self.llm._run(lambda: self._branch._naming(labels, suffix, aside=True))

    async def truncate(self, position: int) -> None:
        await self.llm._call(lambda: self._branch.truncate(position))

    async def hold(self, hold: Hold) -> None:
        await self.llm._call(lambda: self._branch.hold(hold))

    async def park(self) -> None:
        await self.llm._call(self._branch.park)

    async def cancel(self) -> None:
        await self.llm._call(self._branch.cancel)

    async def release(self) -> int:
        return await self.llm._call(self._branch.release)

    async def prune(self) -> int:
        return await self.llm._call(self._branch.prune)

    async def promote(self) -> int:
        return await self.llm._call(self._branch.promote)


def _inner(branches: object) -> list[Branch]:
    """The engine's own branches; what is none of ours is left for the engine to refuse."""
    many = checked_list("branches", branches, "branches")
    return [branch._branch if isinstance(branch, AsyncBranch) else branch for branch in many]

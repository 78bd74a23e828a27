"""The loop: schedule, compute, commit, sample. It owns all state and runs on one thread.

`step` is the table of contents of the whole engine.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ramet.engine.beam_search import Beam
from ramet.engine.checks import check_hashable
from ramet.engine.config import EngineConfig
from ramet.engine.contest import Contest
from ramet.engine.errors import BadLogits, OutOfCapacity, StepFailed
from ramet.engine.model_runner import Runner
from ramet.engine.runs import FanOut, Firsts, Generation, HeadScoring, Run, Scoring
from ramet.engine.sampler import logprobs_of, sample
from ramet.engine.sampling_params import SamplingParams, derive_seed
from ramet.engine.scheduler import Pick, Scheduled, Scheduler
from ramet.engine.sequence import Sequence
from ramet.engine.tokenizer import Tokenizer
from ramet.radix.accounting import PageStats, page_stats
from ramet.radix.prefix_cache import PrefixCache

LOCAL = ("local",)  # the namespace of in-process callers


@dataclass(frozen=True)
class Stats:
    """Counters since the start, and the pages as they are now."""

    pages: PageStats
    num_steps: int
    num_computed_tokens: int  # tokens that went through the model
    num_query_tokens: int  # those of them whose KV was there, and that ran for their logits alone
    num_prompt_tokens: int  # of prompts, each counted when it was first admitted
    num_cached_tokens: int  # those of them that were found in the cache
    num_generated_tokens: int
    num_preemptions: int
    num_parked_idle: int  # idle branches that gave up their blocks
    num_waiting: int
    num_running: int


class Engine:
    """Sequences over one prefix cache and one runner."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        *,
        vocab_size: int,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        block_nbytes: int,
    ) -> None:
        self.runner = runner
        self.block_nbytes = block_nbytes  # of one block, over all layers
        self.config = config
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.cache = PrefixCache(config.num_blocks, config.block_size, min_partial=config.min_partial)
        self.scheduler = Scheduler(self.cache, config.max_batch_tokens)
        self.sequences: dict[Sequence, None] = {}  # all that were not released
        self.listeners: list[Callable[[], object]] = []  # called after each step
        self.forgotten: list[Sequence] = []  # whose handles were collected: released with the next step
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.num_query_tokens = 0
        self.num_generated_tokens = 0
        self._seeds = np.random.Generator(np.random.PCG64(config.seed & (2**64 - 1)))
        self._arrivals = 0

    # -- sequences -----------------------------------------------------------------------------------

    def new_sequence(
        self, token_ids: list[int], *, keep: bool, namespace: Hashable = LOCAL, cache: bool = True
    ) -> Sequence:
        """A sequence without pages. Raises InvalidInput, or OutOfCapacity if it could never be held.

        Without `cache` it finds nothing that others computed, its pages serve nobody but its own forks, and
        they are freed when it goes.
        """
        check_hashable("namespace", namespace)
        self.check_length(len(token_ids))
        sequence = Sequence(token_ids, namespace if cache else object(), keep=keep)
        sequence.cacheable = cache
        return self._add(sequence)

    def fork(self, sequence: Sequence, at: int | None = None, *, keep: bool) -> Sequence:
        """Another sequence on the same pages, at any moment."""
        child = self._add(sequence.fork(at, keep=keep))
        if child.is_live:
            self.scheduler.rest(child)
        return child

    def release(self, sequence: Sequence, *, prune: bool = False) -> int:
        """Let go of a sequence, running or not; returns the blocks freed at once. Idempotent."""
        if sequence.run is not None:
            sequence.run.abort(sequence)
            self._detach(sequence)
        sequence.pruned = sequence.pruned or prune
        self.scheduler.remove(sequence)
        self.sequences.pop(sequence, None)
        sequence.leave_stem()
        cursor, sequence.cursor = sequence.cursor, None
        if cursor is None:
            return 0
        free = self.cache.pool.num_free
        if not sequence.cacheable:
            cursor.base = 0  # nobody else can ever find these pages
        if prune or not sequence.cacheable:
            return cursor.prune()
        cursor.release()
        return self.cache.pool.num_free - free

    def reset_prefix_cache(self, of: Callable[[Hashable], bool]) -> int:
        """Forget what was computed in these namespaces, as after a change of weights.

        Idle branches keep their tokens and compute them again. What runs keeps its blocks, and goes on.
        Returns the blocks freed.
        """
        free = self.cache.pool.num_free
        for sequence in self.sequences:
            if sequence.run is None and of(sequence.namespace):
                self.scheduler.park(sequence)
        for namespace in list(self.cache.tree.roots):
            if of(namespace):
                self.cache.forget(namespace)
        return self.cache.pool.num_free - free

    def check_length(self, num_tokens: int) -> None:
        """Raise OutOfCapacity if a sequence of so many tokens could never have KV for all of them."""
        config = self.config
        if num_tokens > config.max_model_len:
            raise OutOfCapacity(num_tokens, config.max_model_len, "tokens")
        if num_tokens > config.max_tokens:
            raise OutOfCapacity(-(-num_tokens // config.block_size), config.num_blocks)

    def allowance(self, sequence: Sequence, max_tokens: int | None) -> int:
        """How many tokens can be added to a sequence, of `max_tokens` that are wanted; None is all.

        The last one is not fed, so a sequence may end one token longer than the context or the pool. Raises
        OutOfCapacity if not one is left.
        """
        room = self.config.max_tokens - len(sequence.token_ids) + 1
        if room < 1:
            self.check_length(len(sequence.token_ids))
        return room if max_tokens is None else min(room, max_tokens)

    # -- runs ------------------------------------------------------------------------------------------

    def generation(self, sequence: Sequence, params: SamplingParams, seed: int, index: int = 0) -> Generation:
        """A run that continues `sequence`. Raises OutOfCapacity if not one token is left."""
        allowance = self.allowance(sequence, params.max_tokens)
        text = ""
        if params.echo and self.tokenizer is not None:
            text = self.tokenizer.decode_unchecked(sequence.token_ids, skip_special_tokens=True)
        return Generation(
            params,
            seed=seed,
            index=index,
            allowance=allowance,
            eos_token_ids=self.eos_token_ids,
            tokenizer=self.tokenizer,
            prompt_text=text,
        )

    def generations(self, sequence: Sequence, params: SamplingParams) -> list[Generation]:
        """The runs that continue `sequence` as `params` say, each with its own random stream."""
        seed = self.next_seed() if params.seed is None else params.seed
        count = params.num_sampled
        runs = [self.generation(sequence, params, derive_seed(seed, i), i) for i in range(count)]
        if count > params.n:
            contest = Contest(params)
            for run in runs:
                run.contest = contest
        return runs

    def next_seed(self) -> int:
        """A seed for a request that has none."""
        return int(self._seeds.integers(2**63))

    def submit(self, sequence: Sequence, run: Run, *, priority: int = 0) -> None:
        """Let `sequence` do `run`, after what was submitted before with this priority or a higher one."""
        assert sequence.run is None, "a sequence does one thing at a time"
        sequence.priority = priority
        self._arrivals += 1
        sequence.arrival = (self._arrivals,)
        sequence.run = run
        run.start(sequence)
        self.scheduler.submit(sequence)

    def run_now(self, fork: Sequence, run: Run, arrival: tuple[int, ...]) -> None:
        """Let a fork of a running sequence run from the next step on; a parked one has to wait."""
        assert fork.run is None, "a sequence does one thing at a time"
        fork.arrival = arrival
        fork.run = run
        if fork.is_live:
            self.scheduler.start_now(fork)
        else:
            self.scheduler.submit(fork)

    def abort(self, sequence: Sequence, run: Run | None = None) -> None:
        """End the run of a sequence now, or only if it is `run`; tokens generated so far stay. Idempotent."""
        if sequence.run is not None and run in (None, sequence.run):
            sequence.run.abort(sequence)
            self._end(sequence)

    def run(self, runs: Iterable[Run]) -> None:
        """Step until all `runs` have finished. Raises the error of the first that failed."""
        runs = list(runs)
        while not all(run.finished for run in runs):
            assert self.scheduler.has_work, "a run that is not finished is in the scheduler"
            self.step()
        for run in runs:
            if run.error is not None:
                raise run.error

    # -- the loop --------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one batch: what is decided, computed, committed, and made of the logits.

        Returns False if there was nothing to do.
        """
        while self.forgotten:
            self.release(self.forgotten.pop())
        self._run_copies()  # those of a step that was interrupted: until then they hold blocks
        scheduled = self.scheduler.schedule()
        ended = self._end_at_once()
        if scheduled is not None:
            logits = self._compute(scheduled)
            if logits is not None:
                self.scheduler.commit(scheduled)
                self._advance(scheduled, logits)
        for listener in tuple(self.listeners):  # which may take itself away
            listener()
        return ended or scheduled is not None

    def _compute(self, scheduled: Scheduled) -> Tensor | None:
        """Run the model; None, with every request of the step ended, if that failed."""
        try:
            self._run_copies()
            logits = self.runner.forward(scheduled.step)
        except BaseException as error:
            self.scheduler.cancel(scheduled)
            if not isinstance(error, Exception):
                raise
            for pick in scheduled.picks:
                if pick.sequence.run is not None:  # else it was released meanwhile
                    self.fail(pick.sequence, error)
            return None
        self.num_steps += 1
        self.num_computed_tokens += scheduled.step.num_tokens
        self.num_query_tokens += sum(len(row.token_ids) - row.num_written for row in scheduled.step.rows)
        return logits

    def _run_copies(self) -> None:
        """Let the device do the queued copies. If it fails they stay queued: branches count on them."""
        copies = self.cache.take_copies()
        if copies:
            self.runner.copy_blocks(copies)
            self.cache.copies_done()

    def _advance(self, scheduled: Scheduled, logits: Tensor) -> None:
        """Give each run its logits [R, V]: score, sample, and end what is complete."""
        draws: list[tuple[Sequence, Generation, int]] = []
        start = 0
        for pick, row in zip(scheduled.picks, scheduled.step.rows, strict=True):
            rows = range(start, start + row.num_logits)
            start += row.num_logits
            try:
                rows = self._score_prompt(pick, logits, rows)
                self._take_logits(pick, logits, rows, draws)
            except BadLogits as error:
                self.fail(pick.sequence, error)
        self._sample(logits, draws)
        runs = [pick.sequence.run for pick in scheduled.picks]
        for search in dict.fromkeys(run.search for run in runs if isinstance(run, Beam)):
            search.go_on(self)

    def _score_prompt(self, pick: Pick, logits: Tensor, rows: range) -> range:
        """Let the run score its prompt by its rows of the logits; returns the rows that are left."""
        run = pick.sequence.run
        if run is None or run.prompt_scores is None or not run.prompt_scores.num_left:
            return rows
        count = min(len(rows), run.prompt_scores.num_left)
        run.prompt_scores.accept(logits[rows.start : rows.start + count])
        run.logits_from = run.prompt_scores.logits_from
        return rows[count:]

    def _take_logits(
        self, pick: Pick, logits: Tensor, rows: range, draws: list[tuple[Sequence, Generation, int]]
    ) -> None:
        """What a sequence does with its rows of the logits; those to be sampled from go to `draws`."""
        sequence, run = pick.sequence, pick.sequence.run
        if isinstance(run, Generation):
            draws.extend((sequence, run, row) for row in rows)
        elif isinstance(run, FanOut) and rows:
            run.prepare_children(sequence)
            for index, generation in enumerate(run.generations):
                child = self._fork_running(sequence, generation, index, keep=run.keep)
                run.children.append(child)
                draws.append((child, generation, rows[0]))
            self.finish(sequence)
        elif isinstance(run, Beam) and rows:
            run.accept(logits[rows[0]])
        elif isinstance(run, Scoring):
            mine, targets = logits[rows.start : rows.stop], run.next_targets(len(rows))
            run.accept(logprobs_of(mine, targets), greedy=mine.argmax(-1).tolist() == targets)
            if len(run.token_logprobs) == len(run.targets):
                self.finish(sequence)
        elif isinstance(run, HeadScoring) and rows:
            run.firsts = _firsts(logits[rows[0]], [candidate[0] for candidate in run.candidates])
            if not run.rests:
                self.score_rests(sequence, run)
            self.finish(sequence)
        elif type(run) is Run and sequence.num_to_do == 0:
            self.finish(sequence)

    def score_rests(self, sequence: Sequence, run: HeadScoring) -> None:
        """Score what follows the first token of each candidate, on forks that are pruned afterwards.

        All tokens of `sequence` have KV: its own logits, for the first tokens, may come in the same step.
        """
        first = len(sequence.token_ids)
        for index, candidate in enumerate(run.candidates):
            if len(candidate) == 1:
                run.rests.append(None)
                continue
            rest = Scoring(first, candidate[1:])
            run.rests.append(rest)
            child = self._fork_running(sequence, rest, index, keep=False)
            child.token_ids += candidate[:-1]
            run.children.append(child)

    def _fork_running(self, sequence: Sequence, run: Run, index: int, *, keep: bool) -> Sequence:
        """A child that runs from the next step on, as old as its parent."""
        child = self.fork(sequence, keep=keep)
        self.run_now(child, run, (*sequence.arrival, index))
        return child

    def _sample(self, logits: Tensor, draws: list[tuple[Sequence, Generation, int]]) -> None:
        """Draw a token for each (sequence, run, row of the logits)."""
        if not draws:
            return
        rows = [generation.row_sampling(sequence) for sequence, generation, _ in draws]
        try:
            sampled = sample(logits[torch.tensor([row for _, _, row in draws])], rows)
        except BadLogits as error:
            bad = set(error.rows)
            for index in bad:
                self.fail(draws[index][0], error)
            self._sample(logits, [draw for index, draw in enumerate(draws) if index not in bad])
            return
        for (sequence, generation, _), drawn in zip(draws, sampled.draws(), strict=True):
            try:
                generation.accept(sequence, drawn)
            except Exception as error:  # one request's text must not end the others
                self.fail(sequence, error)
                continue
            self.num_generated_tokens += 1
            if generation.contest is not None:
                for loser in generation.contest.losers(generation, sequence):
                    self.release(loser, prune=True)
            if generation.finished and sequence.run is generation:
                self._end(sequence)

    # -- ends ------------------------------------------------------------------------------------------

    def finish(self, sequence: Sequence) -> None:
        assert sequence.run is not None, "only a run finishes"
        sequence.run.finished = True
        self._end(sequence)

    def fail(self, sequence: Sequence, error: Exception) -> None:
        assert sequence.run is not None, "only a run fails"
        failure = StepFailed(f"the step failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        sequence.run.fail(failure)
        if isinstance(error, BadLogits):
            self._forget_pages(sequence)
        self._end(sequence)

    def _forget_pages(self, sequence: Sequence) -> None:
        """Let nobody find what the sequence computed. Bad numbers spread to the tokens before them as well:
        hidden ones have weight 0, and 0 times infinity is no number."""
        cursor, sequence.cursor = sequence.cursor, None
        if cursor is not None:
            cursor.base = 0
            cursor.prune()

    def _end_at_once(self) -> bool:
        """End what the scheduler found to need no step, or to be beyond help; says if there was any."""
        ended = bool(self.scheduler.complete or self.scheduler.refused)
        for sequence in self.scheduler.complete:
            self.finish(sequence)
        self.scheduler.complete.clear()
        for sequence, error in self.scheduler.refused:
            assert sequence.run is not None, "only a run is refused"
            sequence.run.fail(error)
            self._end(sequence)
        self.scheduler.refused.clear()
        return ended

    def _end(self, sequence: Sequence) -> None:
        """A run leaves its sequence."""
        run = self._detach(sequence)
        if sequence.keep:
            self.scheduler.rest(sequence)
        else:
            self.release(sequence, prune=run is not None and run.leaves_nothing)

    def _detach(self, sequence: Sequence) -> Run | None:
        run, sequence.run = sequence.run, None
        if run is not None:
            run.keep_scores(sequence)
        return run

    # -- looking ---------------------------------------------------------------------------------------

    def _add(self, sequence: Sequence) -> Sequence:
        self.sequences[sequence] = None
        return sequence

    def stats(self) -> Stats:
        """Counters and the state of the pages. O(sequences)."""
        cursors = [s.cursor for s in self.sequences if s.cursor is not None]
        scheduler = self.scheduler
        return Stats(
            pages=page_stats(self.cache, cursors),
            num_steps=self.num_steps,
            num_computed_tokens=self.num_computed_tokens,
            num_query_tokens=self.num_query_tokens,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_parked_idle=scheduler.num_parked_idle,
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
        )


def _firsts(logits: Tensor, token_ids: list[int]) -> Firsts:
    """What one row of logits [V] says of each of these tokens. Raises BadLogits."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)[token_ids]
    if bool(logprobs.isnan().any()):
        raise BadLogits((0,))
    chosen = logits[token_ids]
    return Firsts(logprobs.tolist(), (chosen == logits.max()).tolist(), chosen.tolist())

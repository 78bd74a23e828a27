"""Beam search over branches: a beam is a sequence, and a step of the search forks, appends and releases.

Each running beam is one row of the engine's batches, beside whatever else runs. When all rows of a search
have their logits, beam.py says which candidates go on: the last one of a parent takes its place, the others
are forks, and a beam without any is let go with its blocks. One that is complete while others run is parked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ramet.engine.adjust import Adjustment, TokenCounts, adjustment_of
from ramet.engine.beam import Beams, Candidate, Finished, num_candidates
from ramet.engine.beam_candidates import best_candidates
from ramet.engine.beam_params import BeamSearchParams
from ramet.engine.errors import BadLogits, BranchReleased
from ramet.engine.growing_text import GrowingText
from ramet.engine.operation import Operation
from ramet.engine.outputs import BeamProgress, Choice, FinishReason
from ramet.engine.runs import Run
from ramet.engine.sampler import TokenLogprob, top_logprobs
from ramet.engine.sequence import Sequence
from ramet.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ramet.engine.engine import Engine

OnProgress: TypeAlias = Callable[[BeamProgress], object]


def beam_searching(
    engine: Engine,
    sequence: Sequence,
    params: BeamSearchParams,
    on_progress: OnProgress | None = None,
    priority: int = 0,
) -> Operation[list[tuple[Sequence, Choice]]]:
    """The best continuations of `sequence`, best first, each a sequence of its own.

    `on_progress` is called after each step. Raises OutOfCapacity, StepFailed, or BranchReleased if `sequence`
    is pruned, or let go before its first beams are there; then nothing is left.
    """
    search = BeamSearch(
        sequence,
        params,
        max_tokens=engine.allowance(sequence, params.max_tokens),
        eos_token_ids=engine.eos_token_ids,
        tokenizer=engine.tokenizer,
        on_progress=on_progress,
    )
    try:
        engine.submit(sequence, search.first, priority=priority)
        yield [search]
    except BaseException:
        search.close(engine)
        raise
    return search.results


class Trace(NamedTuple):
    """The last token of a beam, and the way to those before it: beams share it as they share their blocks."""

    before: Trace | None
    candidate: Candidate
    top: list[TokenLogprob] | None

    def path(self) -> list[Trace]:
        """From the first generated token to this one."""
        trace: Trace | None = self
        path = []
        while trace is not None:
            path.append(trace)
            trace = trace.before
        return path[::-1]


class Beam(Run):
    """One running beam: wants what comes after its last token, and rests until its whole search has that."""

    def __init__(
        self,
        search: BeamSearch,
        sequence: Sequence,
        counts: TokenCounts | None,
        text: GrowingText | None = None,
    ) -> None:
        super().__init__()
        self.search = search
        self.sequence = sequence
        self.trace: Trace | None = None  # until a token was generated
        self.counts = counts  # None without penalties
        self.text = text  # None without stop strings
        self.logits: Tensor | None = None  # [V]
        self.logits_from = len(sequence.token_ids) - 1

    @property
    def num_tokens_left(self) -> int:
        return self.search.num_tokens_left

    def accept(self, logits: Tensor) -> None:
        """Take the logits [V] of the next token."""
        self.logits = logits
        self.held = True

    def append(self, trace: Trace, text: GrowingText | None) -> None:
        """Go on with one token more."""
        token_id = trace.candidate.token_id
        self.sequence.token_ids.append(token_id)
        self.trace, self.text = trace, text
        self.logits_from = len(self.sequence.token_ids) - 1
        self.logits, self.held = None, False
        if self.counts is not None:
            self.counts.add(token_id)

    def fail(self, error: BaseException) -> None:
        """The search fails with its beam."""
        super().fail(error)
        self.search.fail(error)


class Way(NamedTuple):
    """What a candidate makes of its beam."""

    text: GrowingText | None
    stop_reason: int | str | None  # the token id or the string that ends it


class Complete(NamedTuple):
    """A complete beam and its branch."""

    sequence: Sequence
    trace: Trace
    way: Way
    finish_reason: FinishReason


class BeamSearch(Run):
    """One search. It runs on no sequence itself: the `Beam`s do, at first one on the prompt."""

    def __init__(
        self,
        sequence: Sequence,
        params: BeamSearchParams,
        *,
        max_tokens: int,
        eos_token_ids: frozenset[int],
        tokenizer: Tokenizer | None,
        on_progress: OnProgress | None,
    ) -> None:
        super().__init__()
        tokens = params.tokens
        self.params = params
        self.results: list[tuple[Sequence, Choice]] = []  # best first, once all is done
        self._on_progress = on_progress
        self._tokenizer = tokenizer
        self._ends = (frozenset() if tokens.ignore_eos else eos_token_ids) | frozenset(tokens.stop_token_ids)
        self._state = Beams(
            params.num_beams,
            max_tokens=max_tokens,
            length_exponent=params.length_exponent,
            early_stopping=params.early_stopping,
        )
        counts = None
        if tokens.repetition_penalty != 1.0:
            counts = TokenCounts(sequence.token_ids)
        elif tokens.presence_penalty or tokens.frequency_penalty:
            counts = TokenCounts()
        self._adjustment = adjustment_of(tokens, counts)
        self._early_adjustment = adjustment_of(tokens, counts, self._ends)
        text = GrowingText(tokenizer, tokens) if tokens.stops and tokenizer is not None else None
        self.first = Beam(self, sequence, counts, text)  # the prompt, of which all beams are forks
        self._beams = [self.first]  # running, best first
        self._complete: dict[Finished, Complete] = {}
        self._num_forks = 0

    @property
    def num_tokens_left(self) -> int:
        return self._state.max_tokens - self._state.num_tokens

    def fail(self, error: BaseException) -> None:
        if not self.finished:
            super().fail(error)

    def go_on(self, engine: Engine) -> None:
        """Make a step of the search, if every running beam has its logits."""
        if self.finished or any(beam.logits is None for beam in self._beams):
            return
        if self.first.sequence.pruned:
            self.fail(BranchReleased(self.first.sequence.id))
            return
        try:
            self._step(engine)
        except BadLogits as error:
            for row in error.rows:
                engine.fail(self._beams[row].sequence, error)
        except Exception as error:  # one search's text, or who listens to it, must not end the others
            super().fail(error)

    def cancel(self, engine: Engine) -> None:
        """End now: the running beams, as they are, are complete beside those that were. Idempotent."""
        if self.finished:
            return
        if self._beams == [self.first]:
            self.fail(BranchReleased(self.first.sequence.id))  # there are no beams yet
            return
        beams = {beam.trace.candidate: beam for beam in self._beams if beam.trace is not None}
        self._state.cut(list(beams))
        for finished in self._state.finished:
            if finished not in self._complete:
                beam = beams.pop(finished.candidate)
                assert beam.trace is not None, "only the first beam has no token"
                beam.sequence.keep = True
                engine.finish(beam.sequence)
                way = Way(beam.text, None)
                self._complete[finished] = Complete(beam.sequence, beam.trace, way, "abort")
        for beam in beams.values():
            engine.finish(beam.sequence)
        self._beams = []
        self._conclude(engine)

    def close(self, engine: Engine) -> None:
        """Leave nothing behind, whether the search is done or not."""
        for beam in self._beams:
            engine.abort(beam.sequence, beam)
        complete = [one.sequence for one in self._complete.values()]
        for sequence in (*complete, *(result for result, _ in self.results)):
            engine.release(sequence, prune=True)

    # -- a step ----------------------------------------------------------------------------------------

    def _step(self, engine: Engine) -> None:
        state = self._state
        logits = [beam.logits for beam in self._beams if beam.logits is not None]
        count = num_candidates(state.num_beams, len(self._ends))
        candidates = best_candidates(logits, state.scores, self._adjustments(), count)
        if not candidates:
            raise BadLogits(tuple(range(len(self._beams))))
        ways = self._ways(candidates)
        running = state.advance(candidates, [way.stop_reason is not None for way in ways.values()])
        self._keep_complete(engine, ways)
        self._grow(engine, [(self._trace(c), ways[c].text) for c in running])
        if state.done:
            self._conclude(engine)
        if self._on_progress is not None:
            self._on_progress(self._progress())

    def _adjustments(self) -> list[Adjustment | None]:
        early = self._state.num_tokens < self.params.min_tokens
        base = self._early_adjustment if early else self._adjustment
        return [base and base._replace(counts=beam.counts) for beam in self._beams]

    def _ways(self, candidates: Seq[Candidate]) -> dict[Candidate, Way]:
        """What each candidate does to its beam's text, and what ends it."""
        search = self._state.num_tokens >= self.params.min_tokens
        ways = {}
        for candidate in candidates:
            token_id, text = candidate.token_id, self._beams[candidate.beam].text
            stop: int | str | None = token_id if token_id in self._ends else None
            if text is not None:
                text = text.fork()
                if stop is None or self.params.include_stop_str_in_output:
                    stop = text.add(token_id, search=search) or stop
            ways[candidate] = Way(text, stop)
        return ways

    def _trace(self, candidate: Candidate) -> Trace:
        beam, count, top = self._beams[candidate.beam], self.params.logprobs, None
        if count is not None and beam.logits is not None:
            top = top_logprobs(torch.log_softmax(beam.logits.float(), -1), count, candidate.token_id)
        return Trace(beam.trace, candidate, top)

    def _keep_complete(self, engine: Engine, ways: Mapping[Candidate, Way]) -> None:
        """Branch off what is complete now, and drop what is not among the best any more."""
        kept = {}
        for finished in self._state.finished:
            complete = self._complete.pop(finished, None)
            if complete is None:
                candidate = finished.candidate
                sequence = self._fork(engine, self._beams[candidate.beam], keep=True)
                sequence.token_ids.append(candidate.token_id)
                engine.num_generated_tokens += 1
                way, trace = ways[candidate], self._trace(candidate)
                reason: FinishReason = "length" if way.stop_reason is None else "stop"
                complete = Complete(sequence, trace, way, reason)
            if not self._state.done:
                engine.scheduler.park(complete.sequence)  # the running beams need the blocks
            kept[finished] = complete
        for complete in self._complete.values():
            engine.release(complete.sequence, prune=True)
        self._complete = kept

    def _grow(self, engine: Engine, running: Seq[tuple[Trace, GrowingText | None]]) -> None:
        """Let these beams run, and no others."""
        parents = self._beams
        num_left = Counter(trace.candidate.beam for trace, _ in running)
        beams = []
        for trace, text in running:
            index = trace.candidate.beam
            num_left[index] -= 1
            in_place = num_left[index] == 0 and parents[index] is not self.first
            beam = parents[index] if in_place else self._start(engine, parents[index])
            beam.append(trace, text)
            beams.append(beam)
        self._beams = beams
        kept = set(beams)
        for parent in parents:
            if parent not in kept:
                engine.finish(parent.sequence)
        engine.num_generated_tokens += len(beams)

    def _start(self, engine: Engine, parent: Beam) -> Beam:
        """A fork of a beam that runs from the next step on."""
        sequence = self._fork(engine, parent, keep=False)
        beam = Beam(self, sequence, None if parent.counts is None else parent.counts.fork())
        beam.leaves_nothing = True
        self._num_forks += 1
        engine.run_now(sequence, beam, (*self.first.sequence.arrival, self._num_forks))
        return beam

    def _fork(self, engine: Engine, parent: Beam, *, keep: bool) -> Sequence:
        sequence = engine.fork(parent.sequence, keep=keep)
        if parent is not self.first and sequence.is_live:
            # All that comes after the prompt is the search's own, and goes with its last beam.
            sequence.live_cursor.base = parent.sequence.live_cursor.base
        return sequence

    def _conclude(self, engine: Engine) -> None:
        """The best are the result, and the others go."""
        best = self._state.finished[: self.params.num_returned]
        self.results = [self._result(index, one) for index, one in enumerate(best)]
        for finished, complete in self._complete.items():
            if finished not in best:
                engine.release(complete.sequence, prune=True)
        self._complete = {}
        self.finished = True

    # -- what comes out --------------------------------------------------------------------------------

    def _result(self, index: int, finished: Finished) -> tuple[Sequence, Choice]:
        sequence, trace, (text, stop_reason), finish_reason = self._complete[finished]
        path = trace.path()
        token_ids = [one.candidate.token_id for one in path]
        if text is not None:
            stop_reason = text.finish() or stop_reason
            shown = text.text
        else:
            hidden = stop_reason is not None and not self.params.include_stop_str_in_output
            shown = self._decoded(token_ids[:-1] if hidden else token_ids)
        choice = Choice(
            index=index,
            text=shown,
            token_ids=token_ids,
            token_logprobs=[one.candidate.logprob for one in path],
            logprobs=None if self.params.logprobs is None else [one.top or [] for one in path],
            finish_reason=finish_reason if stop_reason is None else "stop",
            stop_reason=stop_reason,
            score=finished.score,
            beam_indices=[one.candidate.beam for one in path],
        )
        return sequence, choice

    def _progress(self) -> BeamProgress:
        if self.results:
            choice = self.results[0][1]
            token_ids, text = choice.token_ids, choice.text
        else:
            trace = self._beams[0].trace
            assert trace is not None, "the prompt runs no longer"
            token_ids = [one.candidate.token_id for one in trace.path()]
            text = self._decoded(token_ids)
        state = self._state
        return BeamProgress(state.num_tokens, len(self._beams), len(state.finished), token_ids, text)

    def _decoded(self, token_ids: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode_unchecked(token_ids, self.params.skip_special_tokens)

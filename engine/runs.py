"""What a sequence can be asked to do: compute its tokens, generate, fan out into children, or be scored.

A run says from which position on it needs logits, and what it does with them. It decides nothing about
batches or blocks.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from ramet.engine.errors import BranchReleased
from ramet.engine.outputs import Choice, FinishReason, Score
from ramet.engine.sampler import RowSampling, TokenLogprob
from ramet.engine.sampling_params import SamplingParams
from ramet.engine.sequence import Sequence
from ramet.engine.tokenizer import IncrementalDetokenizer, StopChecker, Tokenizer


class Run:
    """Compute what the sequence has to do; nothing is sampled."""

    def __init__(self) -> None:
        self.logits_from: int | None = None  # the first position whose logits are still needed
        self.finished = False
        self.held = False  # rests until whoever reads its results has caught up
        self.error: BaseException | None = None

    @property
    def num_tokens_left(self) -> int:
        """How many tokens the run may still add to its sequence."""
        return 0

    def start(self, sequence: Sequence) -> None:
        """The sequence is submitted with this run."""

    def fail(self, error: BaseException) -> None:
        """The run cannot go on: whoever waits for it gets `error`."""
        self.error = error
        self.finished = True

    def abort(self, sequence: Sequence) -> None:
        """`sequence` is let go before the run is done. Part of a result is none, so this is an error."""
        self.fail(BranchReleased(sequence.id))


class Generation(Run):
    """Sample one token after another until a stop, the end of the allowance, or an abort."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        index: int,
        allowance: int,
        eos_token_ids: frozenset[int],
        tokenizer: Tokenizer | None,
    ) -> None:
        super().__init__()
        self.params = params
        self.seed = seed
        self.allowance = allowance  # tokens that may be generated
        self.choice = Choice(index, logprobs=None if params.logprobs is None else [])
        self._ends = (frozenset() if params.ignore_eos else eos_token_ids) | frozenset(params.stop_token_ids)
        self._detokenizer = IncrementalDetokenizer(tokenizer) if tokenizer is not None else None
        self._stops = StopChecker(params.stops)

    @property
    def num_tokens_left(self) -> int:
        return self.allowance - len(self.choice.token_ids)

    def start(self, sequence: Sequence) -> None:
        self.logits_from = len(sequence.token_ids) - 1

    def row_sampling(self, sequence: Sequence) -> RowSampling:
        """How the next token is drawn: from the branch's own stream, at the token's own position."""
        p = self.params
        position = len(sequence.token_ids)
        return RowSampling(p.temperature, p.top_k, p.top_p, self.seed, position, p.logprobs)

    def accept(
        self, sequence: Sequence, token_id: int, logprob: float, top: list[TokenLogprob] | None
    ) -> None:
        """Append a sampled token; sets `finished` if it was the last."""
        choice = self.choice
        sequence.token_ids.append(token_id)
        self.logits_from = len(sequence.token_ids) - 1
        choice.token_ids.append(token_id)
        choice.token_logprobs.append(logprob)
        if choice.logprobs is not None and top is not None:
            choice.logprobs.append(top)
        if token_id in self._ends:
            self.finish("stop", token_id)
            return
        if self._detokenizer is not None:
            shown = self._stops.add(self._detokenizer.add(token_id))
            choice.text += shown.text
            if shown.stop is not None:
                self._detokenizer = None  # the text has ended, whatever is still held
                self.finish("stop", shown.stop)
                return
        if len(choice.token_ids) >= self.allowance:
            self.finish("length")

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End the choice, with the text that was held back. Idempotent."""
        if self.finished:
            return
        if self._detokenizer is not None:
            rest = self._stops.add(self._detokenizer.flush())
            self.choice.text += rest.text
            if rest.stop is not None:
                reason, stop_reason = "stop", rest.stop
            else:
                self.choice.text += self._stops.finish()
        self.choice.finish_reason = reason
        self.choice.stop_reason = stop_reason
        self.finished = True

    def abort(self, sequence: Sequence) -> None:
        """The tokens generated so far stay."""
        self.finish("abort")


class FanOut(Run):
    """Compute the logits of the last token once and let each of several children sample from them."""

    def __init__(self, generations: Seq[Generation], *, keep: bool) -> None:
        super().__init__()
        self.generations = list(generations)
        self.keep = keep  # whether the children outlive their runs
        self.children: list[Sequence] = []

    def start(self, sequence: Sequence) -> None:
        self.logits_from = len(sequence.token_ids) - 1

    def fail(self, error: BaseException) -> None:
        """There are no children yet: nobody else could end their generations."""
        super().fail(error)
        for generation in self.generations:
            generation.fail(error)

    def abort(self, sequence: Sequence) -> None:
        """As if each child had been aborted before its first token."""
        self.finished = True
        for generation in self.generations:
            generation.abort(sequence)


class Scoring(Run):
    """Collect the log-probability of each of `targets`, the tokens that follow position `first`."""

    def __init__(self, first: int, targets: list[int]) -> None:
        super().__init__()
        self.first = first
        self.logits_from = first
        self.targets = targets
        self.token_logprobs: list[float] = []

    def next_targets(self, count: int) -> list[int]:
        """The targets of the next `count` rows of logits."""
        done = len(self.token_logprobs)
        return self.targets[done : done + count]

    def accept(self, logprobs: list[float]) -> None:
        """Take the log-probabilities of the next targets; a long continuation comes in chunks."""
        self.token_logprobs += logprobs
        self.logits_from = self.first + len(self.token_logprobs)


class HeadScoring(Run):
    """Score several continuations of a sequence.

    Their first tokens are scored by its own last logits, the rest of each on a fork that is thrown away.
    """

    def __init__(self, candidates: list[list[int]]) -> None:
        super().__init__()
        self.candidates = candidates
        self.first_logprobs: list[float] = []
        self.rests: list[Scoring | None] = []
        self.children: list[Sequence] = []  # forks that compute the rests

    def start(self, sequence: Sequence) -> None:
        self.logits_from = len(sequence.token_ids) - 1

    def scores(self) -> list[Score]:
        """One for each candidate, once all is done."""
        return [
            Score(ids, [first, *(rest.token_logprobs if rest is not None else ())])
            for ids, first, rest in zip(self.candidates, self.first_logprobs, self.rests, strict=True)
        ]

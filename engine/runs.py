"""What a sequence can be asked to do: compute its tokens, generate, fan out into children, or be scored.

A run says from which position on it needs logits, and what it does with them. It decides nothing about
batches or blocks.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from ramet.engine.adjust import TokenCounts, adjustment_of
from ramet.engine.contest import Contest
from ramet.engine.errors import BranchReleased
from ramet.engine.growing_text import GrowingText
from ramet.engine.outputs import Choice, FinishReason, Score
from ramet.engine.prompt_scores import PromptScores
from ramet.engine.sampler import Draw, RowSampling, TokenLogprob
from ramet.engine.sampling_params import SamplingParams
from ramet.engine.sequence import Sequence
from ramet.engine.tokenizer import Tokenizer


class Run:
    """Compute what the sequence has to do; nothing is sampled."""

    leaves_nothing = False  # whether what its sequence computed is of no use to others, so that it is pruned

    def __init__(self) -> None:
        self.logits_from: int | None = None  # the first position whose logits are still needed
        self.prompt_scores: PromptScores | None = None  # what is wanted of the prompt's own tokens
        self.finished = False
        self.held = False  # rests until whoever reads its results has caught up
        self.error: BaseException | None = None

    @property
    def num_tokens_left(self) -> int:
        """How many tokens the run may still add to its sequence."""
        return 0

    @property
    def prompt_logprobs(self) -> list[list[TokenLogprob] | None] | None:
        """The prompt's log-probabilities, if they were asked for; the first token has none."""
        return None if self.prompt_scores is None else self.prompt_scores.entries

    def start(self, sequence: Sequence) -> None:
        """The sequence is submitted with this run."""

    def admitted(self, sequence: Sequence) -> None:
        """The sequence has its place in the pages: what they know of the prompt need not be computed."""
        if self.prompt_scores is not None and self.prompt_scores.num_left:
            self.prompt_scores.recall(sequence.live_cursor)
            self.logits_from = self.prompt_scores.logits_from

    def keep_scores(self, sequence: Sequence) -> None:
        """The run has ended: leave with the pages what it knows of their tokens."""
        if self.prompt_scores is not None and sequence.is_live:
            self.prompt_scores.keep(sequence.live_cursor)

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
        prompt_text: str = "",
    ) -> None:
        """`prompt_text` is what the choice's text begins with; it is searched for no stop string."""
        super().__init__()
        self.params = params
        self.seed = seed
        self.allowance = allowance  # tokens that may be generated
        self.choice = Choice(
            index,
            prompt_text,
            logprobs=None if params.logprobs is None else [],
            named_logprobs=[] if params.logprob_token_ids else None,
            entropies=[] if params.return_entropy else None,
        )
        self.contest: Contest | None = None  # in which only the best are wanted
        self._ends = (frozenset() if params.ignore_eos else eos_token_ids) | frozenset(params.stop_token_ids)
        self._text = None if tokenizer is None else GrowingText(tokenizer, params, prompt_text)
        self._counts: TokenCounts | None = None
        self.prepare(None)

    @property
    def num_tokens_left(self) -> int:
        return self.allowance - len(self.choice.token_ids)

    @property
    def counts_prompt(self) -> bool:
        """Whether the tokens that the branch holds at the start matter to what is drawn."""
        return self.params.repetition_penalty != 1.0

    def start(self, sequence: Sequence) -> None:
        self.logits_from = len(sequence.token_ids) - 1
        if self.counts_prompt:
            self.prepare(TokenCounts(sequence.token_ids))

    def prepare(self, prompt: TokenCounts | None) -> None:
        """Begin with these tokens held. What is counted belongs to this run alone from now on."""
        p = self.params
        if prompt is None and (p.presence_penalty or p.frequency_penalty):
            prompt = TokenCounts()  # these two see the output only
        self._counts = prompt
        self._adjustment = adjustment_of(p, prompt)
        self._early_adjustment = adjustment_of(p, prompt, self._ends) if p.min_tokens else None

    def row_sampling(self, sequence: Sequence) -> RowSampling:
        """How the next token is drawn: from the branch's own stream, at the token's own position."""
        p = self.params
        position = len(sequence.token_ids)
        early = len(self.choice.token_ids) < p.min_tokens
        return RowSampling(
            temperature=p.temperature,
            top_k=p.top_k,
            top_p=p.top_p,
            seed=self.seed,
            position=position,
            logprobs=p.logprobs,
            min_p=p.min_p,
            adjustment=self._early_adjustment if early else self._adjustment,
            named=tuple(p.logprob_token_ids),
            entropy=p.return_entropy,
        )

    def accept(self, sequence: Sequence, draw: Draw) -> None:
        """Append a sampled token; sets `finished` if it was the last."""
        token_id = draw.token_id
        sequence.token_ids.append(token_id)
        self.logits_from = len(sequence.token_ids) - 1
        if self._counts is not None:
            self._counts.add(token_id)
        self.choice.add(draw)
        ends = token_id in self._ends
        stop = None
        if self._text is not None and (not ends or self.params.include_stop_str_in_output):
            stop = self._text.add(token_id, search=len(self.choice.token_ids) > self.params.min_tokens)
            self.choice.text = self._text.text
        if ends or stop is not None:
            self.finish("stop", token_id if stop is None else stop)
        elif self.num_tokens_left <= 0:
            self.finish("length")

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End the choice, with the text that was held back. Idempotent."""
        if self.finished:
            return
        if self._text is not None:
            stop = self._text.finish()
            if stop is not None:
                reason, stop_reason = "stop", stop
            self.choice.text = self._text.text
        self.choice.finish_reason = reason
        self.choice.stop_reason = stop_reason
        self.finished = True

    def abort(self, sequence: Sequence) -> None:
        """The tokens generated so far stay."""
        self.finish("abort")

    def keep_scores(self, sequence: Sequence) -> None:
        """The prompt's, and those of the tokens generated: they are known as well."""
        if self.prompt_scores is not None and sequence.is_live:
            self.prompt_scores.keep(sequence.live_cursor, self.choice.token_logprobs)


class FanOut(Run):
    """Compute the logits of the last token once and let each of several children sample from them."""

    def __init__(self, generations: Seq[Generation], *, keep: bool) -> None:
        super().__init__()
        self.generations = list(generations)
        self.keep = keep  # whether the children outlive their runs
        self.children: list[Sequence] = []

    def start(self, sequence: Sequence) -> None:
        self.logits_from = len(sequence.token_ids) - 1

    def prepare_children(self, sequence: Sequence) -> None:
        """Let each child know which tokens the prompt holds; they are counted once."""
        if any(generation.counts_prompt for generation in self.generations):
            counts = TokenCounts(sequence.token_ids)
            for generation in self.generations:
                if generation.counts_prompt:
                    generation.prepare(counts.fork())

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

    leaves_nothing = True

    def __init__(self, first: int, targets: list[int]) -> None:
        super().__init__()
        self.first = first
        self.logits_from = first
        self.targets = targets
        self.token_logprobs: list[float] = []
        self.is_greedy = True

    def next_targets(self, count: int) -> list[int]:
        """The targets of the next `count` rows of logits."""
        done = len(self.token_logprobs)
        return self.targets[done : done + count]

    def accept(self, logprobs: list[float], *, greedy: bool) -> None:
        """Take the log-probabilities of the next targets; a long continuation comes in chunks."""
        self.token_logprobs += logprobs
        self.is_greedy = self.is_greedy and greedy
        self.logits_from = self.first + len(self.token_logprobs)


class Firsts(NamedTuple):
    """What one row of logits says of several tokens that may come next."""

    logprobs: list[float]
    greedy: list[bool]
    logits: list[float]


class HeadScoring(Run):
    """Score several continuations of a sequence.

    Their first tokens are scored by its own last logits, the rest of each on a fork that is thrown away.
    """

    def __init__(self, candidates: list[list[int]]) -> None:
        super().__init__()
        self.candidates = candidates
        self.firsts = Firsts([], [], [])
        self.rests: list[Scoring | None] = []
        self.children: list[Sequence] = []  # forks that compute the rests

    def start(self, sequence: Sequence) -> None:
        self.logits_from = len(sequence.token_ids) - 1

    def scores(self) -> list[Score]:
        """One for each candidate, once all is done."""
        scores = []
        for ids, logprob, greedy, logit, rest in zip(self.candidates, *self.firsts, self.rests, strict=True):
            logprobs = [logprob, *(rest.token_logprobs if rest is not None else ())]
            is_greedy = greedy and (rest is None or rest.is_greedy)
            scores.append(Score(ids, logprobs, is_greedy, logit, sum(logprobs)))
        return scores

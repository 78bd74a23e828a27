"""A branch as Python users hold it: the verbs of the tree."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ramet.engine.arguments import Prompt, beam_params_of, check_count, checked_params, fields_of, params_of
from ramet.engine.beam_params import BeamSearchParams
from ramet.engine.beam_search import OnProgress, beam_searching
from ramet.engine.checks import check_bool, checked_list
from ramet.engine.errors import BranchReleased, InvalidInput
from ramet.engine.operation import Operation
from ramet.engine.outputs import Choice, NextToken, Score
from ramet.engine.runs import FanOut, Generation, Run, Scoring
from ramet.engine.sampling_params import SamplingParams
from ramet.engine.scoring import Normalize, check_normalize, normalized, scoring
from ramet.engine.sequence import Hold, Sequence
from ramet.engine.token_bytes import TokenBytes
from ramet.engine.tokenizer import validate_token_ids
from ramet.radix.cursor import BlockTable

if TYPE_CHECKING:
    from ramet.engine.llm import LLM


class Branch:
    """One branch of a tree: a past that it shares with its relatives, and a future of its own.

    Made by `LLM.branch`, `fork` and `expand`. A branch that runs out of pages keeps its tokens and computes
    them again when it is used. As a context manager it is pruned at the end.
    """

    def __init__(self, llm: LLM, sequence: Sequence, parent: Branch | None) -> None:
        self.llm = llm
        self.parent = parent
        self._children: dict[Branch, None] = {}
        self.output: Choice | None = None  # what the last generate, expand or step gave
        self._sequence = sequence
        self._released = False
        if parent is not None:
            parent._children[self] = None

    def __del__(self) -> None:
        # A handle that was forgotten may go at any moment, also in the middle of a step.
        if not self._released:
            self.llm.engine.forgotten.append(self._sequence)

    def __enter__(self) -> Branch:
        return self

    def __exit__(self, *_: object) -> None:
        self.prune()

    def __repr__(self) -> str:
        state = "released" if self._released else "live" if self._sequence.is_live else "parked"
        return f"<Branch {self.id}: {len(self._sequence.token_ids)} tokens, {state}>"

    # -- looking -------------------------------------------------------------------------------------

    @property
    def id(self) -> int:
        return self._sequence.id

    @property
    def children(self) -> list[Branch]:
        """The branches forked from this one that were not released, or have such children themselves."""
        return list(self._children)

    @property
    def token_ids(self) -> list[int]:
        """A copy of all tokens, prompt and generated."""
        return list(self._sequence.token_ids)

    def __len__(self) -> int:
        return len(self._sequence.token_ids)

    @property
    def text(self) -> str:
        """The decoded tokens, without control tokens."""
        return self.llm._tokenizer("text").decode(self._sequence.token_ids)

    @property
    def released(self) -> bool:
        return self._released

    @property
    def block_table(self) -> BlockTable:
        """(block ids, slots filled in the last block) of the tokens that have KV now."""
        self._check_live()
        return self._sequence.live_cursor.block_table if self._sequence.is_live else BlockTable([], 0)

    # -- the verbs -----------------------------------------------------------------------------------

    def fork(self, n: int = 1, *, at: int | None = None) -> list[Branch]:
        """`n` branches with the same past, or with its first `at` tokens. Copies nothing until they part.

        All or nothing: raises InvalidInput before the first is made.
        """
        self._check_live()
        check_count("n", n)
        position = self._position("at", len(self) if at is None else at, 1)
        return [
            Branch(self.llm, self.llm.engine.fork(self._sequence, position, keep=True), self)
            for _ in range(n)
        ]

    def extend(self, text: Prompt) -> list[int]:
        """Append a text or token ids, a tool's result say. They are computed with the next run.

        Control tokens in a text stay text: pass ids to append real ones. Returns the ids that were appended.
        Raises InvalidInput or OutOfCapacity.
        """
        new = self._new_tokens(text, len(self))
        self._sequence.token_ids += new
        return new

    def _new_tokens(self, text: Prompt, position: int) -> list[int]:
        """What is to be appended at `position`, checked."""
        self._check_unused()
        new = self._encode(text, "text")
        self.llm.engine.check_length(position + len(new))
        return new

    def _encode(self, text: Prompt, field: str) -> list[int]:
        """The tokens of what comes after others: control tokens in a text stay text."""
        if isinstance(text, str):
            return self.llm._tokenizer(field).encode(text, add_special_tokens=False, control_tokens=False)
        return validate_token_ids(text, self.llm.engine.vocab_size, field)

    def _extending(self, text: Prompt, at: int | None, logprobs: bool) -> Operation[list[float]]:
        """Go back to `at`, append, and compute it now; with `logprobs`, give those of the new tokens.

        All or nothing.
        """
        check_bool("logprobs", logprobs)
        start, sequence = self._position("at", len(self) if at is None else at, 1), self._sequence
        new = self._new_tokens(text, start)
        dropped = sequence.token_ids[start:]
        sequence.truncate(start)
        scoring = Scoring(start - 1, new)
        try:
            if logprobs and new:
                sequence.token_ids += new[:-1]
                yield from self._doing(scoring)
                sequence.token_ids += new[-1:]
            else:
                sequence.token_ids += new
            yield from self._doing(Run())
        except BaseException:
            sequence.truncate(start)
            sequence.token_ids += dropped
            raise
        return scoring.token_logprobs

    def _doing(self, run: Run) -> Operation[None]:
        """Do one run on this branch; it is ended if nobody waits for it any more."""
        self.llm.engine.submit(self._sequence, run)
        try:
            yield [run]
        finally:
            self.llm.engine.abort(self._sequence, run)

    def generate(self, params: SamplingParams | None = None, **settings: Any) -> Choice:
        """Continue this branch; the tokens are appended to it. `settings` are fields of SamplingParams.

        Raises as `LLM.step` does.
        """
        return self.llm._drive(self._generating(params, settings))

    def _generating(self, params: SamplingParams | None, settings: dict[str, Any]) -> Operation[Choice]:
        self._check_unused()
        return (yield from self.llm._continuing([self], [params_of(params, settings)]))[0]

    def expand(
        self,
        n: int | None = None,
        *,
        params: Seq[SamplingParams] | SamplingParams | None = None,
        **settings: Any,
    ) -> list[Branch]:
        """`n` new children that each generate, in one batch; `params` may give each its own settings.

        What the branch still has to compute is computed once, for all of them. The children's choices are
        their `output`; of `best_of` the best are left, best first. Raises as `LLM.step` does, and then leaves
        no child.
        """
        return self.llm._drive(self._expanding(n, params, settings))

    def _expanding(
        self,
        n: int | None,
        params: Seq[SamplingParams] | SamplingParams | None,
        settings: dict[str, Any],
        born: Callable[[list[Branch]], None] | None = None,
    ) -> Operation[list[Branch]]:
        """`born` is told of the children as soon as they are there: the first to be done need not wait."""
        self._check_unused()
        generations = self._child_generations(n, params, settings)
        contest = generations[0].contest
        if contest is not None and born is not None:
            raise InvalidInput("best_of", "must be None where children are told of while they grow")
        run = FanOut(generations, keep=True)
        try:
            yield from self._doing(run)
            if not run.children:
                raise BranchReleased(self.id)  # by a listener, or it was cancelled before its first token
        except BaseException:
            for sequence in run.children:
                self.llm.engine.release(sequence, prune=True)
            raise
        children = []
        for sequence, generation in zip(run.children, generations, strict=True):
            child = Branch(self.llm, sequence, self)
            child.output = generation.choice
            children.append(child)
        try:
            if born is not None:
                born(children)
            yield generations
        except BaseException as error:
            # Whoever asked may just have left: then children that were told of, and are complete, are in use.
            in_use = born is not None and isinstance(error, GeneratorExit)
            for child, generation in zip(children, generations, strict=True):
                if not (in_use and generation.finished):
                    child.prune()
            raise
        if contest is None:
            return children
        child_of = dict(zip(generations, children, strict=True))
        best = [child_of.pop(generation) for generation in contest.winners(generations)]
        prune_all(child_of.values())
        return best

    def _child_generations(
        self, n: int | None, params: Seq[SamplingParams] | SamplingParams | None, settings: dict[str, Any]
    ) -> list[Generation]:
        engine = self.llm.engine
        if params is None or isinstance(params, SamplingParams):
            if n is not None:
                check_count("n", n)
            each = params_of(params, settings)
            if n is not None:
                each = SamplingParams(**{**fields_of(each), "n": n})
            self.llm._check_params(each, of_branch=True)
            return engine.generations(self._sequence, each)
        each_params = checked_list("params", params, "SamplingParams")
        if settings or (n is not None and n != len(each_params)):
            raise InvalidInput("params", "give each child its own settings, and so decide how many there are")
        generations = []
        for index, own in enumerate(each_params):
            self.llm._check_params(checked_params(own), of_branch=True)
            if own.num_sampled != 1:
                raise InvalidInput("n", "and best_of must be 1 in each child's params", own.num_sampled)
            generation = engine.generations(self._sequence, own)[0]
            generation.choice.index = index
            generations.append(generation)
        if not generations:
            raise InvalidInput("params", "must name at least one child")
        return generations

    def beam_search(
        self,
        params: BeamSearchParams | None = None,
        *,
        on_progress: OnProgress | None = None,
        **settings: Any,
    ) -> list[Branch]:
        """The best continuations of this branch as new children, best first; `output` says what each is.

        `settings` are fields of BeamSearchParams. `on_progress` is called after each token. There are fewer
        children than asked for only where no more continuations are possible at all.
        Raises as `LLM.step` does, and then leaves no child.
        """
        return self.llm._drive(self._beam_searching(params, settings, on_progress))

    def _beam_searching(
        self,
        params: BeamSearchParams | None,
        settings: dict[str, Any],
        on_progress: OnProgress | None = None,
    ) -> Operation[list[Branch]]:
        self._check_unused()
        params = beam_params_of(params, settings)
        self.llm._check_params(params.tokens, of_branch=True)
        found = yield from beam_searching(self.llm.engine, self._sequence, params, on_progress)
        children = []
        for sequence, choice in found:
            child = Branch(self.llm, sequence, self)
            child.output = choice
            children.append(child)
        return children

    def score(
        self, candidates: Seq[Prompt], *, suffix: Prompt | None = None, normalize: Normalize = "none"
    ) -> list[Score]:
        """The log-probabilities of candidate continuations, in one batch; the branch does not change.

        With `suffix` they are those after it: a question about the branch, say, that is thrown away again.
        `normalize` makes each `score` the log-probability a token or a byte, or the share ("softmax") of the
        candidate. Control tokens in a text stay text, as in `extend`. The branch's own tokens are not
        computed again. Raises InvalidInput or OutOfCapacity; StepFailed if the model failed.
        """
        self._check_unused()
        return self.llm._drive(self._scoring(candidates, suffix, normalize))

    def next_tokens(self, labels: Seq[str | int], *, suffix: Prompt | None = None) -> list[NextToken]:
        """How likely each of these tokens, ids or texts of one token, is to come next. See `score`."""
        self._check_unused()
        return self.llm._drive(self._naming(labels, suffix))

    def _naming(
        self, labels: Seq[str | int], suffix: Prompt | None = None, *, aside: bool = False
    ) -> Operation[list[NextToken]]:
        candidates = []
        for label in checked_list("labels", labels, "tokens"):
            token_ids = self._encode(label if isinstance(label, str) else [label], "labels")
            if len(token_ids) != 1:
                limit = f"must be one token each, and one is {len(token_ids)}; see score()"
                raise InvalidInput("labels", limit, label)
            candidates.append(token_ids)
        scores = yield from self._scoring(candidates, suffix, aside=aside)
        return [NextToken(one.token_ids[0], one.first_logit, one.logprob, one.is_greedy) for one in scores]

    def _scoring(
        self,
        candidates: Seq[Prompt],
        suffix: Prompt | None = None,
        normalize: Normalize = "none",
        *,
        aside: bool = False,
    ) -> Operation[list[Score]]:
        self._check_live()
        check_normalize(normalize)
        in_bytes = TokenBytes(self.llm._tokenizer("normalize")) if normalize == "bytes" else None
        listed = checked_list("candidates", candidates, "texts or token ids")
        many = [self._encode(one, "candidates") for one in listed]
        after = [] if suffix is None else self._encode(suffix, "suffix")
        if not all(many):
            raise InvalidInput("candidates", "must hold at least one token each")
        if suffix is not None and not after:
            raise InvalidInput("suffix", "must hold at least one token")
        engine = self.llm.engine
        for token_ids in many:
            engine.check_length(len(self) + len(after) + len(token_ids) - 1)
        if not many:
            return []
        scores = yield from scoring(engine, self._sequence, many, after, aside=aside)
        lengths = [len(ids) if in_bytes is None else sum(len(in_bytes[i]) for i in ids) for ids in many]
        values = normalized(normalize, [one.logprob for one in scores], lengths)
        return [replace(one, score=value) for one, value in zip(scores, values, strict=True)]

    def truncate(self, position: int) -> None:
        """Forget all but the first `position` tokens, at least one. Children keep what they share."""
        self._check_unused()
        self._sequence.truncate(self._position("position", position, 1))
        self.output = None

    def hold(self, hold: Hold) -> None:
        """Say how fast the branch keeps its blocks while it is idle and others lack some."""
        self._check_live()
        if not isinstance(hold, Hold):
            raise InvalidInput("hold", "must be a Hold", hold)
        self.llm.engine.scheduler.hold(self._sequence, hold)

    def park(self) -> None:
        """Give up the blocks of an idle branch: they stay cached until they are needed, the tokens stay."""
        self._check_unused()
        self.llm.engine.scheduler.park(self._sequence)

    def release(self) -> int:
        """Let go of the branch. Its pages stay cached until they are needed. Idempotent.

        Returns the blocks freed at once: an open block of its own, which nobody could find again.
        """
        return self._let_go(prune=False)

    def cancel(self) -> None:
        """End what runs on the branch now; the tokens generated so far stay."""
        self.llm.engine.abort(self._sequence)

    def prune(self) -> int:
        """Release this branch and all its descendants and free at once what nobody else uses.

        A beam search of one of them ends with its next step. Returns the number of blocks freed. Idempotent.
        """
        family = [self]
        for branch in family:  # grows as it goes: parents before children
            family.extend(branch._children)
        return sum(branch._let_go(prune=True) for branch in reversed(family))

    def _let_go(self, *, prune: bool) -> int:
        freed = 0
        if not self._released:
            self._released = True
            freed = self.llm.engine.release(self._sequence, prune=prune)
        branch: Branch | None = self
        while branch is not None and branch._released and not branch._children:
            if branch.parent is not None:
                branch.parent._children.pop(branch, None)
            branch = branch.parent
        return freed

    def promote(self) -> int:
        """Keep this branch and prune its siblings; returns the blocks freed."""
        self._check_live()
        if self.parent is None:
            return 0
        return sum(sibling.prune() for sibling in self.parent.children if sibling is not self)

    # -- checks --------------------------------------------------------------------------------------

    def _check_live(self) -> None:
        if self._released:
            raise BranchReleased(self.id)

    def _check_unused(self) -> None:
        """While a branch runs, listeners may look at it, fork it and release it, but not change it."""
        self._check_live()
        if self._sequence.run is not None:
            raise InvalidInput("branch", "is in use: wait until what runs on it has ended")

    def _position(self, field: str, value: object, least: int) -> int:
        try:
            position = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            raise InvalidInput(field, "must be a whole number", value) from None
        if isinstance(value, bool) or not least <= position <= len(self):
            raise InvalidInput(field, f"must be between {least} and {len(self)}, the branch's length", value)
        return position


def prune_all(branches: Iterable[Branch]) -> None:
    for branch in branches:
        branch.prune()

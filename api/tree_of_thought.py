"""Breadth-first tree of thought on the Game of 24: every legal move is rated, the best few become branches.

The ratings alone decide what is kept: nothing here knows which hand leads to 24. The checker is asked at the
end, about the last moves that were kept.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ramet.api.puzzle import TARGET, Move, Table, check, moves, table_of, values
from ramet.engine.branch import Branch
from ramet.engine.llm import LLM

PROMPT = """Make 24 with + - * / and each number once.

4 6 8 8
8 / 8 = 1
4 * 1 = 4
6 * 4 = 24

1 2 5 7
7 + 5 = 12
2 * 1 = 2
12 * 2 = 24

3 5 7 9
9 + 7 = 16
5 + 3 = 8
16 + 8 = 24

"""
FACTORS = "24 = 4 * 6\n24 = 12 * 2\n24 = 3 * 8\n24 ="

State = Literal["kept", "pruned", "solved", "wrong"]


@dataclass(eq=False)
class Thought:
    """One state of the search, on a branch of its own."""

    branch: Branch
    table: Table
    parent: Thought | None = None
    move: Move | None = None
    score: float = 0.0  # a log-probability
    state: State = "kept"
    length: int = 0  # tokens of the branch
    blocks: list[int] = field(default_factory=list)  # of its table, when it was last looked at
    children: list[Thought] = field(default_factory=list)
    dropped: list[tuple[float, Move]] = field(default_factory=list)  # moves that were rated and not kept

    @property
    def expression(self) -> str:
        return self.table[0].expression

    @property
    def own_blocks(self) -> list[int]:
        """Blocks that it does not share with its parent."""
        shared = set(self.parent.blocks) if self.parent is not None else set()
        return [block for block in self.blocks if block not in shared]

    def look(self) -> None:
        """Note the blocks of all branches from here on, for a picture that outlives them."""
        if not self.branch.released:
            self.blocks = self.branch.block_table.blocks
        for child in self.children:
            child.look()


class Scorer(Protocol):
    """Says how promising each move is: the higher, the better."""

    num_candidates: int  # texts that were scored
    resend_tokens: int  # what computing each of them from its first token would take

    def rate(self, thought: Thought, candidates: Sequence[Move]) -> list[float]: ...
    def close(self) -> None: ...


class ModelScorer:
    """The model's own opinion, as log-probabilities.

    Three numbers left: how readily the model writes each of them as a factor, "24 = 8 *"; the mean.
    Two left: on the branch itself, how likely 24 is after each equation of the two, "8 * 3 ="; the best.
    One left: how likely 24 is after the equation that made it. The true result is never shown to the model.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._factors = llm.branch(FACTORS)
        self._factor_scores: dict[int, float] = {}
        self._tail = self._encode(f" {TARGET}\n")
        self.num_candidates = 0
        self.resend_tokens = len(self._factors)

    def rate(self, thought: Thought, candidates: Sequence[Move]) -> list[float]:
        match len(thought.table):
            case 2:
                return self._chances(thought.branch, [move.equation for move in candidates])
            case 3:
                return self._best_endings(thought.branch, candidates)
        return self._factor_means(candidates)

    def close(self) -> None:
        self._factors.prune()

    def _factor_means(self, candidates: Sequence[Move]) -> list[float]:
        unknown = {value for move in candidates for value in values(move.left)} - self._factor_scores.keys()
        numbers = sorted(unknown)
        scores = self._score(self._factors, [self._encode(f" {number} *") for number in numbers])
        self._factor_scores |= {n: sum(logprobs) for n, logprobs in zip(numbers, scores, strict=True)}
        return [
            sum(self._factor_scores[value] for value in values(move.left)) / len(move.left)
            for move in candidates
        ]

    def _best_endings(self, branch: Branch, candidates: Sequence[Move]) -> list[float]:
        endings = [(i, last.equation) for i, move in enumerate(candidates) for last in moves(move.left)]
        chances = self._chances(branch, [f"{candidates[i].text}\n{equation}" for i, equation in endings])
        best = [-math.inf] * len(candidates)
        for (i, _), chance in zip(endings, chances, strict=True):
            best[i] = max(best[i], chance)
        return best

    def _chances(self, branch: Branch, texts: Sequence[str]) -> list[float]:
        """How likely the target is after each text."""
        scores = self._score(branch, [self._encode(text) + self._tail for text in texts])
        return [sum(logprobs[-len(self._tail) :]) for logprobs in scores]

    def _score(self, branch: Branch, candidates: Sequence[list[int]]) -> list[list[float]]:
        self.num_candidates += len(candidates)
        self.resend_tokens += sum(len(branch) + len(candidate) for candidate in candidates)
        return [score.token_logprobs for score in branch.score(candidates)]

    def _encode(self, text: str) -> list[int]:
        return self._llm.encode(text, add_special_tokens=False)


class Dice:
    """Ratings that know nothing, to see what the model's are worth."""

    num_candidates = 0
    resend_tokens = 0

    def __init__(self, seed: int) -> None:
        self._stream = random.Random(seed)

    def rate(self, thought: Thought, candidates: Sequence[Move]) -> list[float]:
        return [math.log(1 - self._stream.random()) for _ in candidates]

    def close(self) -> None:
        """Nothing is held."""


class Search:
    """One hand, searched level by level; `on_change` is called whenever there is something new to see."""

    def __init__(
        self,
        llm: LLM,
        cards: tuple[int, ...],
        width: int,
        *,
        dice: int | None = None,
    ) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.llm = llm
        self.cards = cards
        self.width = width
        self.status = "reading the examples"
        self.answer: Thought | None = None
        self.place = 0  # of the answer among the last moves that were kept, from 1
        self.num_made = self.num_pruned = 0
        self.num_blocks_freed = 0  # by pruning while the search went on
        self.first_score_s: float | None = None
        self.seconds = 0.0
        self.by_dice = dice is not None
        self.missed = False
        self._dice = dice
        self._start = time.perf_counter()
        self.root: Thought | None = None
        self.scorer: Scorer | None = None

    def run(self) -> None:
        """Search, check, and release everything, also after an error or an interrupt."""
        try:
            branch = self.llm.branch(PROMPT + " ".join(map(str, self.cards)) + "\n")
            self.num_made += 1
            self.root = Thought(branch, table_of(self.cards), length=len(branch))
            self.scorer = ModelScorer(self.llm) if self._dice is None else Dice(self._dice)
            level = [self.root]
            for _ in self.cards[1:]:
                level = self._next_level(level, self.scorer)
            self._check(level)
        finally:
            self.seconds = time.perf_counter() - self._start
            self._release()

    def _next_level(self, level: Sequence[Thought], scorer: Scorer) -> list[Thought]:
        """Rate every move of every thought, keep the best, and prune thoughts that none of those is from."""
        rated: list[tuple[float, Thought, Move]] = []
        seen: set[tuple[int, ...]] = set()
        for done, thought in enumerate(level):
            numbers = " ".join(map(str, values(thought.table)))
            self.status = f"rating what {numbers} can become ({done + 1} of {len(level)})"
            self._changed()
            # The same numbers on two branches are one thought: the better rated parent has it.
            found = moves(thought.table)
            new = [move for move in found if len(move.left) == 1 or values(move.left) not in seen]
            seen.update(values(move.left) for move in new)
            scores = scorer.rate(thought, new)
            if self.first_score_s is None:
                self.first_score_s = time.perf_counter() - self._start
            rated += [(score, thought, move) for score, move in zip(scores, new, strict=True)]
        rated.sort(key=lambda entry: -entry[0])
        kept = [self._grow(*entry) for entry in rated[: self.width]]
        for score, thought, move in rated[self.width :]:
            thought.dropped.append((score, move))
        self._prune(thought for thought in level if not thought.children)
        return kept

    def _grow(self, score: float, parent: Thought, move: Move) -> Thought:
        branch = parent.branch.fork()[0]
        branch.extend(move.text + "\n")
        self.num_made += 1
        thought = Thought(branch, move.left, parent, move, score, length=len(branch))
        parent.children.append(thought)
        return thought

    def _check(self, last: Sequence[Thought]) -> None:
        """Ask the checker about the last thoughts, best first, until one is an answer."""
        for place, thought in enumerate(last, 1):
            self.status = f"checking {thought.expression}"
            if check(thought.expression, self.cards):
                thought.state, self.answer, self.place = "solved", thought, place
                break
            thought.state = "wrong"
        self.missed = self.answer is None
        self.status = "a miss: none of the last moves gives 24" if self.missed else "solved"
        self._changed()

    def _prune(self, thoughts: Iterable[Thought]) -> None:
        """Give these branches up, and the branches above that have nothing else left."""
        for thought in thoughts:
            at: Thought | None = thought
            while at is not None and not at.branch.children and at.parent is not None:
                self.num_blocks_freed += at.branch.prune()
                self.num_pruned += 1
                if at.state == "kept":
                    at.state = "pruned"
                at = at.parent
        self._changed()

    def _changed(self) -> None:
        if self.root is not None:
            self.root.look()
        self.on_change()

    def _release(self) -> None:
        if self.scorer is not None:
            self.scorer.close()
        if self.root is not None:
            self.root.branch.prune()

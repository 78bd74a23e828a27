"""What Python users talk to: an LLM, and the branches of its tree of thoughts.

Everything here blocks until it is done; several branches that are asked in one call run in one batch. A verb
that has to wait is an *operation*: a generator that yields the runs it waits for. Here it is driven at once;
`async_llm.py` drives many of them side by side.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ramet.engine.config import EngineConfig
from ramet.engine.engine import Engine, Stats
from ramet.engine.errors import BranchReleased, InvalidInput
from ramet.engine.outputs import Choice, Delta, Output, Score
from ramet.engine.prompt_scores import PromptScores
from ramet.engine.runs import FanOut, Generation, HeadScoring, Run
from ramet.engine.sampler import TokenLogprob
from ramet.engine.sampling_params import SamplingParams
from ramet.engine.sequence import Sequence
from ramet.engine.tokenizer import Tokenizer, validate_token_ids
from ramet.radix.cursor import BlockTable

if TYPE_CHECKING:
    import torch

Prompt: TypeAlias = str | Seq[int]
_LISTS_OF_TOKENS = ("stop_token_ids", "allowed_token_ids", "banned_token_ids", "logprob_token_ids")

T = TypeVar("T")
# Yields the runs that must have finished before it goes on; closed early, it leaves nothing behind.
Operation: TypeAlias = Generator[Iterable[Run], None, T]


class LLM:
    """A model with an engine around it.

    Args:
        model: "smollm2" (the embedded default), a hub id, a folder, a .gguf file, or a transformers model.
        tokenizer: instead of the one that comes with the weights.
        device: "auto" or "cpu"; other devices come later.
        dtype: "auto" is bfloat16 where the processor multiplies it fast, else float32.
        block_size: token slots of a block.
        num_blocks: blocks in the pool; None sizes it from the memory that is free.
        max_model_len: a context limit below the model's own.
        max_batch_tokens: token budget of a step.
        min_partial: tokens that a prefix hit inside a block must have to be used; 1 is exact to the token,
            None a quarter of a block.
        seed: where requests without a seed get theirs from.
        cache_dir: where the embedded model's converted weights are kept, instead of the user's cache.

    Raises InvalidInput, ModelNotFound or UnsupportedModel.
    """

    def __init__(
        self,
        model: Any = "smollm2",
        tokenizer: Any = None,
        *,
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
        block_size: int = 16,
        num_blocks: int | None = None,
        max_model_len: int | None = None,
        max_batch_tokens: int = 512,
        min_partial: int | None = None,
        seed: int = 0,
        cache_dir: str | Path | None = None,
    ) -> None:
        from ramet.engine.build import build_engine

        self.engine: Engine = build_engine(
            model,
            tokenizer,
            device=device,
            dtype=dtype,
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            max_batch_tokens=max_batch_tokens,
            min_partial=min_partial,
            seed=seed,
            cache_dir=cache_dir,
        )

    @property
    def config(self) -> EngineConfig:
        return self.engine.config

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.engine.tokenizer

    def stats(self) -> Stats:
        """Counters since the start, and what the pages hold now."""
        return self.engine.stats()

    def on_step(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after each step of the engine, for progress bars and live views.

        Returns a function that ends this.
        """
        self.engine.listeners.append(listener)
        return lambda: self.engine.listeners.remove(listener)

    # -- whole prompts -----------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache: bool = True,
        **settings: Any,
    ) -> list[Output]:
        """Generate from one or several prompts, each a text or a list of token ids.

        `params` is one for all or one for each; `settings` are the fields of SamplingParams, instead. A
        higher `priority` is served first. Without `cache` nothing cached is used and nothing stays cached.
        All prompts are checked before anything runs. Raises InvalidInput or OutOfCapacity; StepFailed if the
        model failed.
        """
        return self._drive(self._generating(prompts, params, priority, cache, settings))

    def _generating(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None,
        priority: int,
        cache: bool,
        settings: dict[str, Any],
    ) -> Operation[list[Output]]:
        many = [self.encode(prompt) for prompt in _prompts(prompts)]
        each = _each(params, settings, len(many))
        _check_int("priority", priority)
        requests: list[Request] = []
        try:
            for token_ids, own in zip(many, each, strict=True):
                requests.append(self._request(token_ids, own, cache=cache))
            for sequence, run, _ in requests:
                self.engine.submit(sequence, run, priority=priority)
            yield [choice for _, run, choices in requests for choice in (run, *choices)]
        finally:
            self._release_all(requests)
        return [
            Output(
                ids, sequence.num_cached_tokens or 0, [g.choice for g in generations], _prompt_logprobs(run)
            )
            for ids, (sequence, run, generations) in zip(many, requests, strict=True)
        ]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **settings: Any
    ) -> Generator[Delta]:
        """Generate from one prompt and yield each choice's text as it comes.

        The input is checked at once, the request starts with the first `next`; `close` aborts it.
        Raises InvalidInput or OutOfCapacity; the iterator StepFailed.
        """
        params = _params(params, settings)
        token_ids = self.encode(prompt)
        self._check_params(params)
        self.engine.check_length(len(token_ids))
        return self._streaming(token_ids, params)

    def _streaming(self, token_ids: list[int], params: SamplingParams) -> Generator[Delta]:
        reader = self._open_stream(token_ids, params, {})
        try:
            while not reader.all_read:
                # Whoever else runs while this rests at a yield makes the steps of this request, too.
                if not reader.done:
                    self.engine.step()
                yield from reader.read()
        finally:
            reader.close()

    def _open_stream(
        self, prompt: Prompt, params: SamplingParams | None, settings: dict[str, Any]
    ) -> StreamReader:
        """Submit a request whose tokens are read while they come."""
        request = self._request(self.encode(prompt), _params(params, settings))
        self.engine.submit(request[0], request[1])
        return StreamReader(request[2], lambda: self._release_all([request]))

    def _request(self, token_ids: list[int], params: SamplingParams, *, cache: bool = True) -> Request:
        self._check_params(params)
        sequence = self.engine.new_sequence(list(token_ids), keep=False, cache=cache)
        generations = self.engine.generations(sequence, params)
        run: Run = generations[0] if len(generations) == 1 else FanOut(generations, keep=False)
        if params.prompt_logprobs is not None:
            scores = PromptScores(token_ids, params.prompt_logprobs)
            for one in (run, *generations):
                one.prompt_scores = scores
        return sequence, run, generations

    def _release_all(self, requests: Seq[Request]) -> None:
        """After an error or an interrupt nothing of a request stays behind; else this finds nothing."""
        for sequence, run, _ in requests:
            if isinstance(run, FanOut):
                for child in run.children:
                    self.engine.release(child)
            self.engine.release(sequence)

    # -- branches ------------------------------------------------------------------------------------

    def branch(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Seq[Mapping[str, Any]] | None = None,
        tools: Seq[Mapping[str, Any]] | None = None,
    ) -> Branch:
        """A branch at the end of a prompt, or of `messages` through the chat template; computed now.

        Raises InvalidInput or OutOfCapacity; StepFailed if the model failed.
        """
        return self._drive(self._branching(prompt, messages, tools))

    def _branching(
        self,
        prompt: Prompt | None,
        messages: Seq[Mapping[str, Any]] | None,
        tools: Seq[Mapping[str, Any]] | None,
    ) -> Operation[Branch]:
        if (prompt is None) == (messages is None):
            raise InvalidInput("prompt", "or messages must be given, and not both")
        if messages is not None:
            token_ids = self._tokenizer("messages").apply_chat_template(messages, tools=tools)
        else:
            assert prompt is not None, "one of the two is given"
            token_ids = self.encode(prompt)
        sequence = self.engine.new_sequence(token_ids, keep=True)
        branch = Branch(self, sequence, None)
        run = Run()
        self.engine.submit(sequence, run)
        try:
            yield [run]
        except BaseException:
            branch.release()
            raise
        return branch

    def step(
        self,
        branches: Seq[Branch],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        **settings: Any,
    ) -> list[Choice]:
        """Continue several branches in one batch, by one token unless the settings say more.

        `params` is one for all or one for each. Each branch is extended by what it generated.
        Raises InvalidInput, or OutOfCapacity if a branch has no room for one token more, before anything
        runs; StepFailed if the model failed: the branches keep what they had generated until then.
        """
        return self._drive(self._stepping(branches, params, settings))

    def _stepping(
        self,
        branches: Seq[Branch],
        params: SamplingParams | Seq[SamplingParams] | None,
        settings: dict[str, Any],
    ) -> Operation[list[Choice]]:
        if not branches:
            return []
        if len(set(branches)) < len(branches):
            raise InvalidInput("branches", "must not name a branch twice")
        if any(branch.llm is not self for branch in branches):
            raise InvalidInput("branches", "must be branches of this LLM")
        _check_either(params, settings)
        if params is None:
            params = _params(None, {"max_tokens": 1, **settings})
        each = [params] * len(branches) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(branches):
            raise InvalidInput("params", f"must be one or {len(branches)}", len(each))
        return (yield from self._continuing(branches, each))

    def _continuing(self, branches: Seq[Branch], params: Seq[SamplingParams]) -> Operation[list[Choice]]:
        runs = []
        for branch, own in zip(branches, params, strict=True):
            branch._check_unused()
            self._check_params(own, of_branch=True)
            if own.n != 1:
                raise InvalidInput("n", "must be 1 where a branch itself goes on; use expand()", own.n)
            runs.append(self.engine.generations(branch._sequence, own)[0])
        try:
            for branch, run in zip(branches, runs, strict=True):
                self.engine.submit(branch._sequence, run)
            yield runs
        finally:
            for branch in branches:
                self.engine.abort(branch._sequence)
        for branch, run in zip(branches, runs, strict=True):
            branch.output = run.choice
        return [run.choice for run in runs]

    def _drive(self, operation: Operation[T]) -> T:
        """Step the engine until an operation is done."""
        try:
            runs = next(operation)
            while True:
                try:
                    self.engine.run(runs)
                except BaseException as error:
                    runs = operation.throw(error)
                else:
                    runs = next(operation)
        except StopIteration as stop:
            result: T = stop.value
            return result

    # -- checks --------------------------------------------------------------------------------------

    def encode(self, prompt: Prompt, field: str = "prompt", *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a prompt, checked. Raises InvalidInput, which names `field`."""
        if isinstance(prompt, str):
            token_ids = self._tokenizer(field).encode(prompt, add_special_tokens=add_special_tokens)
        else:
            token_ids = validate_token_ids(prompt, self.engine.vocab_size, field)
        if not token_ids:
            raise InvalidInput(field, "must hold at least one token")
        return token_ids

    def _tokenizer(self, field: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidInput(field, "must be token ids: this model has no tokenizer")
        return self.tokenizer

    def _check_params(self, params: SamplingParams, *, of_branch: bool = False) -> None:
        """What SamplingParams cannot know: the vocabulary, the tokenizer, and whether there is a prompt."""
        self._check_tokens(params)
        if params.stops:
            self._tokenizer("stop")
        if params.echo:
            self._tokenizer("echo")
        if of_branch and params.echo:
            raise InvalidInput("echo", "must be false for a branch: Branch.text has all of it")
        if of_branch and params.prompt_logprobs is not None:
            raise InvalidInput("prompt_logprobs", "must be None for a branch; see Branch.score")

    def _check_tokens(self, params: SamplingParams) -> None:
        """Every token is in the vocabulary, and one is left that can be chosen."""
        vocab_size = self.engine.vocab_size
        for field in _LISTS_OF_TOKENS:
            validate_token_ids(getattr(params, field) or (), vocab_size, field)
        validate_token_ids((token_id for token_id, _ in params.biases), vocab_size, "logit_bias")
        forbidden = set(params.banned_token_ids)
        if params.min_tokens:
            forbidden.update(params.stop_token_ids, () if params.ignore_eos else self.engine.eos_token_ids)
        allowed = params.allowed_token_ids
        num_left = vocab_size - len(forbidden) if allowed is None else len(set(allowed) - forbidden)
        if num_left <= 0:
            field = "banned_token_ids" if allowed is None else "allowed_token_ids"
            raise InvalidInput(field, "must leave a token that can be chosen")


class StreamReader:
    """Reads several generations while they grow."""

    def __init__(self, generations: list[Generation], close: Callable[[], None]) -> None:
        self.close = close  # release the request, finished or not; idempotent
        self._generations = generations
        self._shown = [(0, 0)] * len(generations)  # characters and tokens of each that were read

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return all(generation.finished for generation in self._generations)

    @property
    def num_unread(self) -> int:
        """Tokens that have come and were not read, of the generation that has most."""
        return max(
            len(generation.choice.token_ids) - num_tokens
            for generation, (_, num_tokens) in zip(self._generations, self._shown, strict=True)
        )

    @property
    def all_read(self) -> bool:
        return self.done and self.num_unread == 0 and not any(g.error for g in self._generations)

    def hold(self, held: bool) -> None:
        """Let the generations rest, or go on."""
        for generation in self._generations:
            generation.held = held

    def read(self) -> list[Delta]:
        """What is new, one Delta a generation. Raises the error of one that failed."""
        deltas: list[Delta] = []
        first = not any(num_tokens for _, num_tokens in self._shown)
        for index, generation in enumerate(self._generations):
            choice, (num_chars, num_tokens) = generation.choice, self._shown[index]
            if generation.error is not None:
                raise generation.error
            if len(choice.token_ids) > num_tokens:
                self._shown[index] = len(choice.text), len(choice.token_ids)
                new = choice.token_ids[num_tokens:]
                scores = _prompt_logprobs(generation) if first and not deltas else None
                deltas.append(Delta(choice.index, choice.text[num_chars:], new, choice.finish_reason, scores))
        return deltas


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
        _check_count("n", n)
        position = self._position("at", len(self) if at is None else at, 1)
        return [
            Branch(self.llm, self.llm.engine.fork(self._sequence, position, keep=True), self)
            for _ in range(n)
        ]

    def extend(self, text: Prompt) -> None:
        """Append a text or token ids, a tool's result say. They are computed with the next run.

        Control tokens in a text stay text: pass ids to append real ones.
        Raises InvalidInput or OutOfCapacity.
        """
        self._check_unused()
        if isinstance(text, str):
            new = self.llm._tokenizer("text").encode(text, add_special_tokens=False, control_tokens=False)
        else:
            new = validate_token_ids(text, self.llm.engine.vocab_size, "text")
        self.llm.engine.check_length(len(self) + len(new))
        self._sequence.token_ids += new

    def generate(self, params: SamplingParams | None = None, **settings: Any) -> Choice:
        """Continue this branch; the tokens are appended to it. `settings` are fields of SamplingParams.

        Raises as `LLM.step` does.
        """
        return self.llm._drive(self._generating(params, settings))

    def _generating(self, params: SamplingParams | None, settings: dict[str, Any]) -> Operation[Choice]:
        self._check_unused()
        return (yield from self.llm._continuing([self], [_params(params, settings)]))[0]

    def expand(
        self,
        n: int | None = None,
        *,
        params: Seq[SamplingParams] | SamplingParams | None = None,
        **settings: Any,
    ) -> list[Branch]:
        """`n` new children that each generate, in one batch; `params` may give each its own settings.

        What the branch still has to compute is computed once, for all of them. The children's choices are
        their `output`. Raises as `LLM.step` does, and then leaves no child.
        """
        return self.llm._drive(self._expanding(n, params, settings))

    def _expanding(
        self, n: int | None, params: Seq[SamplingParams] | SamplingParams | None, settings: dict[str, Any]
    ) -> Operation[list[Branch]]:
        self._check_unused()
        generations = self._child_generations(n, params, settings)
        run = FanOut(generations, keep=True)
        engine = self.llm.engine
        try:
            engine.submit(self._sequence, run)
            yield [run, *generations]
            if not run.children:
                raise BranchReleased(self.id)  # by a listener
        except BaseException:
            engine.abort(self._sequence)
            for sequence in run.children:
                engine.release(sequence, prune=True)
            raise
        children = []
        for sequence, generation in zip(run.children, generations, strict=True):
            child = Branch(self.llm, sequence, self)
            child.output = generation.choice
            children.append(child)
        return children

    def _child_generations(
        self, n: int | None, params: Seq[SamplingParams] | SamplingParams | None, settings: dict[str, Any]
    ) -> list[Generation]:
        engine = self.llm.engine
        if params is None or isinstance(params, SamplingParams):
            if n is not None:
                _check_count("n", n)
            each = _params(params, settings)
            if n is not None:
                each = SamplingParams(**{**_fields(each), "n": n})
            self.llm._check_params(each, of_branch=True)
            return engine.generations(self._sequence, each)
        if settings or (n is not None and n != len(params)):
            raise InvalidInput("params", "give each child its own settings, and so decide how many there are")
        generations = []
        for index, own in enumerate(params):
            self.llm._check_params(own, of_branch=True)
            if own.n != 1:
                raise InvalidInput("n", "must be 1 in each child's params", own.n)
            generation = engine.generations(self._sequence, own)[0]
            generation.choice.index = index
            generations.append(generation)
        if not generations:
            raise InvalidInput("params", "must name at least one child")
        return generations

    def score(self, candidates: Seq[Prompt]) -> list[Score]:
        """The log-probabilities of candidate continuations, in one batch; the branch does not change.

        The branch's own tokens are not computed again. Raises InvalidInput or OutOfCapacity; StepFailed if
        the model failed.
        """
        return self.llm._drive(self._scoring(candidates))

    def _scoring(self, candidates: Seq[Prompt]) -> Operation[list[Score]]:
        self._check_unused()
        if isinstance(candidates, str):
            raise InvalidInput("candidates", "must be a list of texts or token ids", candidates)
        many = [self.llm.encode(c, "candidates", add_special_tokens=False) for c in candidates]
        engine = self.llm.engine
        for token_ids in many:
            engine.check_length(len(self) + len(token_ids) - 1)
        if not many:
            return []
        run = HeadScoring(many)
        try:
            engine.submit(self._sequence, run)
            yield [run]
            yield [rest for rest in run.rests if rest is not None]
        finally:
            engine.abort(self._sequence)
            for sequence in run.children:
                engine.release(sequence, prune=True)
        return run.scores()

    def truncate(self, position: int) -> None:
        """Forget all but the first `position` tokens, at least one. Children keep what they share."""
        self._check_unused()
        self._sequence.truncate(self._position("position", position, 1))
        self.output = None

    def release(self) -> None:
        """Let go of the branch. Its pages stay cached until they are needed. Idempotent."""
        self._let_go(prune=False)

    def prune(self) -> int:
        """Release this branch and all its descendants and free at once what nobody else uses.

        Returns the number of blocks freed. Idempotent.
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


Request: TypeAlias = tuple[Sequence, Run, list[Generation]]


def _prompt_logprobs(run: Run) -> list[list[TokenLogprob] | None] | None:
    return None if run.prompt_scores is None else run.prompt_scores.entries


def _params(params: SamplingParams | None, settings: dict[str, Any]) -> SamplingParams:
    _check_either(params, settings)
    try:
        return SamplingParams(**settings) if params is None else params
    except TypeError:
        known = SamplingParams.__dataclass_fields__
        unknown = sorted(set(settings) - set(known))
        raise InvalidInput(", ".join(unknown), f"is no setting; there are {', '.join(known)}") from None


def _check_either(params: object, settings: dict[str, Any]) -> None:
    if params is not None and settings:
        raise InvalidInput("params", f"cannot be given together with {', '.join(sorted(settings))}")


def _each(
    params: SamplingParams | Seq[SamplingParams] | None, settings: dict[str, Any], count: int
) -> list[SamplingParams]:
    """The settings of each of `count` prompts or branches."""
    if params is None or isinstance(params, SamplingParams):
        return [_params(params, settings)] * count
    if settings or len(params) != count:
        raise InvalidInput("params", f"must be one for all or {count}, and without settings beside them")
    return list(params)


def _check_int(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**31) <= value < 2**31:
        raise InvalidInput(field, "must be a whole number of 32 bits", value)


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}


def _prompts(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """One prompt, or several, as a list: a list of numbers is one prompt of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    many = list(prompts)
    if many and not all(isinstance(one, (str, Seq)) for one in many):
        return [many]  # type: ignore[list-item]
    return many  # type: ignore[return-value]


def _check_count(field: str, n: object) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= 1 << 16:
        raise InvalidInput(field, f"must be between 1 and {1 << 16}", n)

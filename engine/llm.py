"""What Python users talk to: an LLM, and the branches of its tree of thoughts.

Everything here blocks until it is done; several branches that are asked in one call run in one batch. A verb
that has to wait is an *operation*: a generator that yields the runs it waits for. Here it is driven at once;
`async_llm.py` drives many of them side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence as Seq
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ramet.engine.arguments import Prompt, check_either, check_int32, params_of, params_of_each, prompts_of
from ramet.engine.beam_params import BeamSearchParams
from ramet.engine.beam_search import OnProgress, beam_searching
from ramet.engine.branch import Branch, prune_all
from ramet.engine.checks import check_bool, checked_list
from ramet.engine.config import EngineConfig
from ramet.engine.engine import LOCAL, Engine, Stats
from ramet.engine.errors import InvalidInput
from ramet.engine.operation import Operation, T, together
from ramet.engine.outputs import Choice, Delta, Output
from ramet.engine.prompt_scores import PromptScores
from ramet.engine.runs import FanOut, Generation, Run
from ramet.engine.sampling_params import SamplingParams
from ramet.engine.sequence import Sequence
from ramet.engine.stream_reader import StreamReader
from ramet.engine.tokenizer import Tokenizer, validate_token_ids

if TYPE_CHECKING:
    import torch

_LISTS_OF_TOKENS = ("stop_token_ids", "allowed_token_ids", "banned_token_ids", "logprob_token_ids")

Request: TypeAlias = tuple[Sequence, Run, list[Generation]]


class LLM:
    """A model with an engine around it.

    Args:
        model: "smollm2" (the embedded default), a hub id, a folder, a .gguf file, or a transformers model.
        tokenizer: instead of the one that comes with the weights.
        device: "auto" (the first GPU, or else the CPU), "cpu", "cuda" or "cuda:1".
        dtype: "auto" is bfloat16 where the processor multiplies it fast, else float32.
        block_size: token slots of a block; on a GPU a power of two.
        num_blocks: blocks in the pool; None sizes it from the memory that is free.
        max_model_len: a context limit below the model's own.
        max_batch_tokens: token budget of a step; on a GPU at most 32,768.
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

    def reset_prefix_cache(self) -> int:
        """Forget what was computed so far, as after a change of weights; returns the blocks freed.

        Idle branches keep their tokens and compute them again. What runs keeps its blocks, and goes on.
        """
        return self.engine.reset_prefix_cache(lambda namespace: True)

    def on_step(self, listener: Callable[[], object]) -> Callable[[], None]:
        """Call `listener` after each step of the engine, for progress bars and live views.

        Returns a function that ends this.
        """
        self.engine.listeners.append(listener)
        return lambda: self.engine.listeners.remove(listener)

    # -- whole prompts -----------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | BeamSearchParams | Seq[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache: bool = True,
        **settings: Any,
    ) -> list[Output]:
        """Generate from one or several prompts, each a text or a list of token ids.

        `params` is one for all or one for each; `settings` are the fields of SamplingParams, instead. With
        BeamSearchParams the choices are the best beams; see `beam_search` for branches that go on. A higher
        `priority` is served first. Without `cache` nothing cached is used and nothing stays cached.
        All prompts are checked before anything runs. Raises InvalidInput or OutOfCapacity; StepFailed if the
        model failed.
        """
        return self._drive(self._generating(prompts, params, priority, cache, settings))

    def _generating(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | BeamSearchParams | Seq[SamplingParams] | None,
        priority: int,
        cache: bool,
        settings: dict[str, Any],
        namespace: Hashable = LOCAL,
        streamed: bool = False,
        on_progress: OnProgress | None = None,
    ) -> Operation[list[Output]]:
        many = [self.encode(prompt) for prompt in prompts_of(prompts)]
        check_int32("priority", priority)
        check_bool("cache", cache)
        if isinstance(params, BeamSearchParams):
            check_either(params, settings)
            if streamed:
                raise InvalidInput("params", "must be SamplingParams where tokens are read while they come")
            return (yield from self._beam_generating(many, params, priority, cache, namespace, on_progress))
        each = params_of_each(params, settings, len(many))
        if streamed:
            _check_streamed(each)
        requests: list[Request] = []
        try:
            for token_ids, own in zip(many, each, strict=True):
                requests.append(self._request(token_ids, own, cache=cache, namespace=namespace))
            for sequence, run, _ in requests:
                self.engine.submit(sequence, run, priority=priority)
            yield [one for _, run, choices in requests for one in dict.fromkeys((run, *choices))]
        finally:
            self._release_all(requests)
        return [
            Output(ids, sequence.num_cached_tokens or 0, _choices(generations), run.prompt_logprobs)
            for ids, (sequence, run, generations) in zip(many, requests, strict=True)
        ]

    def _beam_generating(
        self,
        prompts: list[list[int]],
        params: BeamSearchParams,
        priority: int,
        cache: bool,
        namespace: Hashable,
        on_progress: OnProgress | None,
    ) -> Operation[list[Output]]:
        self._check_params(params.tokens, of_branch=True)
        engine, sequences = self.engine, list[Sequence]()
        try:
            for ids in prompts:
                sequences.append(engine.new_sequence(list(ids), keep=False, namespace=namespace, cache=cache))
            found = yield from together(
                [beam_searching(engine, one, params, on_progress, priority) for one in sequences],
                lambda beams: [engine.release(beam, prune=True) for beam, _ in beams],
            )
        finally:
            for sequence in sequences:
                engine.release(sequence)
        for beam, _ in chain.from_iterable(found):
            engine.release(beam)
        return [
            Output(ids, sequence.num_cached_tokens or 0, [choice for _, choice in beams])
            for ids, sequence, beams in zip(prompts, sequences, found, strict=True)
        ]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **settings: Any
    ) -> Generator[Delta]:
        """Generate from one prompt and yield each choice's text as it comes.

        The input is checked at once, the request starts with the first `next`; `close` aborts it.
        Raises InvalidInput or OutOfCapacity; the iterator StepFailed.
        """
        params = params_of(params, settings)
        token_ids = self.encode(prompt)
        self._check_params(params)
        _check_streamed([params])
        self.engine.check_length(len(token_ids))
        return self._streaming(token_ids, params)

    def _streaming(self, token_ids: list[int], params: SamplingParams) -> Generator[Delta]:
        request = self._request(token_ids, params)
        self.engine.submit(request[0], request[1])
        reader = StreamReader(request[2])
        try:
            while not reader.done or reader.has_news:
                # Whoever else runs while this rests at a yield makes the steps of this request, too.
                if not reader.done:
                    self.engine.step()
                if reader.error is not None:
                    raise reader.error
                yield from reader.read()
            if reader.error is not None:  # of a step that somebody else made, while this rested
                raise reader.error
        finally:
            self._release_all([request])

    def _request(
        self,
        token_ids: list[int],
        params: SamplingParams,
        *,
        cache: bool = True,
        namespace: Hashable = LOCAL,
    ) -> Request:
        self._check_params(params)
        sequence = self.engine.new_sequence(list(token_ids), keep=False, namespace=namespace, cache=cache)
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
        compute: bool = True,
    ) -> Branch:
        """A branch at the end of a prompt, or of `messages` through the chat template.

        It is computed now, or without `compute` together with what it is first used for.
        Raises InvalidInput or OutOfCapacity; StepFailed if the model failed.
        """
        return self._drive(self._branching(prompt, messages, tools, compute=compute))

    def _branching(
        self,
        prompt: Prompt | None,
        messages: Seq[Mapping[str, Any]] | None,
        tools: Seq[Mapping[str, Any]] | None,
        namespace: Hashable = LOCAL,
        compute: bool = True,
    ) -> Operation[Branch]:
        check_bool("compute", compute)
        token_ids = self._prompt_ids(prompt, messages, tools)
        sequence = self.engine.new_sequence(token_ids, keep=True, namespace=namespace)
        branch = Branch(self, sequence, None)
        if not compute:
            return branch
        run = Run()
        self.engine.submit(sequence, run)
        try:
            yield [run]
        except BaseException:
            branch.release()
            raise
        return branch

    def beam_search(
        self,
        prompt: Prompt | None = None,
        params: BeamSearchParams | None = None,
        *,
        messages: Seq[Mapping[str, Any]] | None = None,
        tools: Seq[Mapping[str, Any]] | None = None,
        on_progress: OnProgress | None = None,
        **settings: Any,
    ) -> list[Branch]:
        """The best continuations of a prompt, or of `messages`, best first. See Branch.beam_search."""
        return self._drive(self._beam_searching(prompt, messages, tools, params, settings, on_progress))

    def _beam_searching(
        self,
        prompt: Prompt | None,
        messages: Seq[Mapping[str, Any]] | None,
        tools: Seq[Mapping[str, Any]] | None,
        params: BeamSearchParams | None,
        settings: dict[str, Any],
        on_progress: OnProgress | None = None,
        namespace: Hashable = LOCAL,
    ) -> Operation[list[Branch]]:
        token_ids = self._prompt_ids(prompt, messages, tools)
        # Nobody goes on from the prompt itself: it gives up its blocks to the first beams.
        root = Branch(self, self.engine.new_sequence(token_ids, keep=False, namespace=namespace), None)
        try:
            return (yield from root._beam_searching(params, settings, on_progress))
        finally:
            root.release()

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
        branches = self._checked(branches)
        check_either(params, settings)
        if params is None:
            params = params_of(None, {"max_tokens": 1, **settings})
        return (yield from self._continuing(branches, params_of_each(params, {}, len(branches))))

    def expand(
        self,
        branches: Seq[Branch],
        n: int | None = None,
        *,
        params: SamplingParams | Seq[SamplingParams] | None = None,
        **settings: Any,
    ) -> list[list[Branch]]:
        """`Branch.expand` for several branches in one batch: the new children of each.

        `params` is one for all or one for each branch, and its `n`, or `n`, says how many children.
        """
        return self._drive(self._expanding(branches, n, params, settings))

    def _expanding(
        self,
        branches: Seq[Branch],
        n: int | None,
        params: SamplingParams | Seq[SamplingParams] | None,
        settings: dict[str, Any],
    ) -> Operation[list[list[Branch]]]:
        branches = self._checked(branches)
        each = params_of_each(params, settings, len(branches))
        return (
            yield from together(
                [branch._expanding(n, own, {}) for branch, own in zip(branches, each, strict=True)],
                prune_all,
            )
        )

    def _continuing(self, branches: Seq[Branch], params: Seq[SamplingParams]) -> Operation[list[Choice]]:
        runs = []
        lengths = [len(branch) for branch in branches]
        for branch, own in zip(branches, params, strict=True):
            branch._check_unused()
            self._check_params(own, of_branch=True)
            if own.num_sampled != 1:
                limit = "and best_of must be 1 where a branch itself goes on; use expand()"
                raise InvalidInput("n", limit, own.num_sampled)
            runs.append(self.engine.generations(branch._sequence, own)[0])
        try:
            for branch, run in zip(branches, runs, strict=True):
                self.engine.submit(branch._sequence, run)
            yield runs
        except GeneratorExit:  # whoever asked does not want it any more
            for branch, length in zip(branches, lengths, strict=True):
                self.engine.abort(branch._sequence)
                branch._sequence.truncate(length)
            raise
        finally:
            for branch, run in zip(branches, runs, strict=True):
                self.engine.abort(branch._sequence, run)
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

    def _checked(self, branches: object) -> list[Branch]:
        many = checked_list("branches", branches, "branches")
        if not all(isinstance(branch, Branch) and branch.llm is self for branch in many):
            raise InvalidInput("branches", "must be branches of this LLM")
        if len(set(many)) < len(many):
            raise InvalidInput("branches", "must not name a branch twice")
        return many

    def _prompt_ids(
        self,
        prompt: Prompt | None,
        messages: Seq[Mapping[str, Any]] | None,
        tools: Seq[Mapping[str, Any]] | None,
    ) -> list[int]:
        if (prompt is None) == (messages is None):
            raise InvalidInput("prompt", "or messages must be given, and not both")
        if messages is not None:
            return self._tokenizer("messages").apply_chat_template(messages, tools=tools)
        assert prompt is not None, "one of the two is given"
        return self.encode(prompt)

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


def _check_streamed(each: Seq[SamplingParams]) -> None:
    for params in each:
        if params.num_sampled > params.n:
            raise InvalidInput("best_of", "must be None or n where the tokens are read while they come")


def _choices(generations: list[Generation]) -> list[Choice]:
    """All, or of a contest the best."""
    contest = generations[0].contest
    return [one.choice for one in (generations if contest is None else contest.winners(generations))]

"""Random use of branches on tiny pools against a naive model: a token list for each branch, and no cache.

The scripted model's logits are a hash of the whole past, which it reads back through the block table, so one
wrong page changes everything after it. What should be generated comes from an engine that is made for one
prompt alone, with a pool that never runs dry.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from ramet import LLM, BeamSearchParams, Branch, OutOfCapacity, SamplingParams, StepFailed
from ramet.engine.outputs import Choice, Delta
from ramet.radix.prefix_cache import Copy
from ramet.testing import (
    ScriptedModel,
    check_idle,
    check_invariants,
    delay_copies,
    fail_forward,
    fail_reservation,
)

VOCABULARY = 6  # few, so that branches often meet again; the last one ends a generation
EOS = VOCABULARY - 1
MOST_BRANCHES = 12
PICK = st.integers(0, 1 << 16)
TEXT = st.lists(st.integers(0, 1), min_size=1, max_size=20)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 1.0, 3.0]),
    top_k=st.sampled_from([0, 2]),
    seed=st.integers(0, 3),
    max_tokens=st.one_of(st.integers(1, 24), st.none()),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (), (2,)]),
)
BEAMS = st.builds(
    BeamSearchParams,
    num_beams=st.integers(1, 4),
    max_tokens=st.integers(1, 12),
    length_penalty=st.sampled_from([0.0, 1.0, -1.0]),
    early_stopping=st.sampled_from([False, True, "never"]),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (2,)]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
)


@contextmanager
def interrupt(llm: LLM, at: int) -> Iterator[None]:
    """Let Ctrl-C come after the step with this index, counted from 0 on entry."""
    first = llm.engine.num_steps

    def listener() -> None:
        if llm.engine.num_steps > first + at:
            raise KeyboardInterrupt

    llm.engine.listeners.append(listener)
    try:
        yield
    finally:
        llm.engine.listeners.remove(listener)


@contextmanager
def interrupt_copies(llm: LLM, at: int) -> Iterator[None]:
    """Let Ctrl-C come right before block copies, the at-th time that there are any."""
    runner = llm.engine.runner
    original, left = runner.copy_blocks, at

    def copy_blocks(copies: Sequence[Copy]) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        original(copies)

    runner.copy_blocks = copy_blocks  # type: ignore[method-assign]
    try:
        yield
    finally:
        del runner.copy_blocks


FAULT = st.sampled_from([None, None, None, None, fail_forward, fail_reservation, interrupt, interrupt_copies])
ENDED = (StepFailed, KeyboardInterrupt)  # what a fault may raise
MAY_RAISE = (fail_forward, interrupt, interrupt_copies)


def logits_after(past: list[int]) -> list[float]:
    """What comes next: half of the time one of the first two tokens, now and then the end."""
    bits = zlib.crc32(bytes(past))
    logits = [float((bits >> (4 * token)) & 15) for token in range(VOCABULARY)]
    logits[0] += 4
    logits[1] += 4
    logits[EOS] -= 7
    return logits


MODEL = ScriptedModel(logits_after, vocab_size=VOCABULARY, eos_token_ids=frozenset([EOS]))


def alone(past: list[int], params: SamplingParams, room: int) -> list[Choice]:
    """The choices of an engine that does nothing else; `room` tokens of one sequence can have KV."""
    llm = LLM(MODEL, num_blocks=-(-room // 16) + 40, max_model_len=room)
    return llm.generate(past, params)[0].choices


def beams_alone(past: list[int], params: BeamSearchParams, room: int) -> list[Choice]:
    llm = LLM(MODEL, num_blocks=-(-room // 16) + 40, max_model_len=room)
    return llm.generate(past, params)[0].choices


def logprobs_after(past: list[int], continuation: list[int]) -> list[float]:
    found = []
    for index, token in enumerate(continuation):
        logits = torch.tensor(logits_after(past + continuation[:index]))
        found.append(float(torch.log_softmax(logits, dim=-1)[token]))
    return found


class Branches(RuleBasedStateMachine):
    block_size = 4

    @initialize(
        num_blocks=st.integers(6, 40),
        max_batch_tokens=st.sampled_from([1, 2, 5, 17, 512]),
        min_partial=st.sampled_from([None, 1]),
        delayed=st.booleans(),
    )
    def start(self, num_blocks: int, max_batch_tokens: int, min_partial: int | None, delayed: bool) -> None:
        num_blocks = min(num_blocks, 160 // self.block_size)  # tiny, so that it is often dry
        self.llm = LLM(
            MODEL,
            num_blocks=num_blocks,
            block_size=self.block_size,
            max_batch_tokens=max_batch_tokens,
            min_partial=min_partial,
        )
        self.llm.on_step(self.after_step)
        self.num_computed = 0
        self.room = num_blocks * self.block_size
        self.past: dict[Branch, list[int]] = {}
        self.family: dict[Branch, Branch | None] = {}
        self.delayed = delayed
        self.streams: dict[Generator[Delta], tuple[list[list[int]], list[Choice]]] = {}
        self.num_faults = 0

    def after_step(self) -> None:
        check_invariants(self.llm)
        before, self.num_computed = self.num_computed, self.llm.engine.num_computed_tokens
        assert self.num_computed - before <= self.llm.config.max_batch_tokens

    # -- helpers ---------------------------------------------------------------------------------------

    def pick(self, pick: int) -> Branch | None:
        branches = list(self.past)
        return branches[pick % len(branches)] if branches else None

    def add(self, branch: Branch, past: list[int], parent: Branch | None) -> None:
        self.past[branch] = past
        self.family[branch] = parent

    def late(self) -> AbstractContextManager[None]:
        return delay_copies(self.llm) if self.delayed else nullcontext()

    def fault(self, kind: Callable[..., AbstractContextManager[None]] | None, at: int) -> Any:
        self.num_faults += kind is not None
        return self.late() if kind is None else kind(self.llm, at)

    def expected(self, past: list[int], params: SamplingParams) -> list[Choice] | None:
        """What must be generated after `past`; None if there is no room for one token."""
        return alone(past, params, self.room) if len(past) <= self.room else None

    def agree(self, found: Iterable[Choice], expected: Iterable[Choice]) -> None:
        for one, other in zip(found, expected, strict=True):
            assert one.token_ids == other.token_ids
            assert one.finish_reason == other.finish_reason
            assert one.stop_reason == other.stop_reason
            assert one.token_logprobs == pytest.approx(other.token_logprobs, abs=1e-5)

    def after_failure(self, branches: Iterable[Branch]) -> None:
        """A step failed: a branch keeps what it had, and what it has generated since is right."""
        for branch in branches:
            past = self.past[branch]
            assert branch.token_ids[: len(past)] == past
            self.past[branch] = branch.token_ids

    def descendants(self, branch: Branch) -> list[Branch]:
        found = [branch]
        for one in found:
            found += [child for child, parent in self.family.items() if parent is one]
        return found

    # -- rules -----------------------------------------------------------------------------------------

    @rule(text=TEXT, fault=FAULT, at=st.integers(0, 2))
    def branch(self, text: list[int], fault: Any, at: int) -> None:
        if len(self.past) >= MOST_BRANCHES:
            return
        try:
            with self.fault(fault, at):
                self.add(self.llm.branch(text), list(text), None)
        except ENDED:
            assert fault in MAY_RAISE or self.streams
        except OutOfCapacity:
            assert len(text) > self.room

    @rule(pick=PICK, text=TEXT)
    def branch_again(self, pick: int, text: list[int]) -> None:
        """A prompt that shares its past with a branch."""
        branch = self.pick(pick)
        if branch is not None and len(self.past) < MOST_BRANCHES:
            past = self.past[branch]
            prompt = past[: pick % (len(past) + 1)] + text
            if len(prompt) <= self.room:
                self.add(self.llm.branch(prompt), prompt, None)

    @rule(pick=PICK, n=st.integers(1, 3), at=st.none() | PICK)
    def fork(self, pick: int, n: int, at: int | None) -> None:
        branch = self.pick(pick)
        if branch is None or len(self.past) + n > MOST_BRANCHES:
            return
        past = self.past[branch]
        position = len(past) if at is None else 1 + at % len(past)
        in_use = self.llm.stats().pages.num_in_use
        for child in branch.fork(n, at=None if at is None else position):
            self.add(child, past[:position], branch)
        assert self.llm.stats().pages.num_in_use == in_use, "a fork takes no block"

    @rule(pick=PICK, text=TEXT)
    def extend(self, pick: int, text: list[int]) -> None:
        branch = self.pick(pick)
        if branch is not None:
            try:
                branch.extend(text)
                self.past[branch] = self.past[branch] + text
            except OutOfCapacity:
                assert len(self.past[branch]) + len(text) > self.room

    @rule(pick=PICK, position=PICK)
    def truncate(self, pick: int, position: int) -> None:
        branch = self.pick(pick)
        if branch is not None:
            position = 1 + position % len(self.past[branch])
            branch.truncate(position)
            self.past[branch] = self.past[branch][:position]

    @rule(pick=PICK, params=PARAMS, fault=FAULT, at=st.integers(0, 4))
    def generate(self, pick: int, params: SamplingParams, fault: Any, at: int) -> None:
        branch = self.pick(pick)
        if branch is None:
            return
        expected = self.expected(self.past[branch], params)
        try:
            with self.fault(fault, at):
                choice = branch.generate(params)
        except OutOfCapacity:
            assert expected is None
        except ENDED:
            assert fault in MAY_RAISE or self.streams
            self.after_failure([branch])
        else:
            assert expected is not None
            self.agree([choice], expected)
            self.past[branch] = self.past[branch] + choice.token_ids

    @rule(first=PICK, count=st.integers(1, 6), data=st.data(), fault=FAULT, at=st.integers(0, 4))
    def step(self, first: int, count: int, data: st.DataObject, fault: Any, at: int) -> None:
        all_of_them = [b for b, past in self.past.items() if len(past) <= self.room]
        branches = [all_of_them[(first + i) % len(all_of_them)] for i in range(min(count, len(all_of_them)))]
        each = [data.draw(PARAMS) for _ in branches]
        try:
            with self.fault(fault, at):
                choices = self.llm.step(branches, each)
        except ENDED:
            assert fault in MAY_RAISE or self.streams
            self.after_failure(branches)
            return
        for branch, params, choice in zip(branches, each, choices, strict=True):
            self.agree([choice], alone(self.past[branch], params, self.room))
            self.past[branch] = self.past[branch] + choice.token_ids

    @rule(pick=PICK, n=st.integers(1, 4), params=PARAMS, fault=FAULT, at=st.integers(0, 4))
    def expand(self, pick: int, n: int, params: SamplingParams, fault: Any, at: int) -> None:
        branch = self.pick(pick)
        if branch is None or len(self.past) + n > MOST_BRANCHES:
            return
        params = SamplingParams(**{**vars(params), "n": n})
        expected = self.expected(self.past[branch], params)
        try:
            with self.fault(fault, at):
                children = branch.expand(params=params)
        except OutOfCapacity:
            assert expected is None
        except ENDED:
            assert fault in MAY_RAISE or self.streams
        else:
            assert expected is not None
            self.check_children(branch, children, expected)

    @rule(pick=PICK, data=st.data(), n=st.integers(1, 4))
    def expand_each(self, pick: int, data: st.DataObject, n: int) -> None:
        branch = self.pick(pick)
        if branch is None or len(self.past) + n > MOST_BRANCHES or len(self.past[branch]) > self.room:
            return
        each = [data.draw(PARAMS) for _ in range(n)]
        with self.late():
            children = branch.expand(params=each)
        expected = [alone(self.past[branch], params, self.room)[0] for params in each]
        self.check_children(branch, children, expected)

    @rule(pick=PICK, params=BEAMS, fault=FAULT, at=st.integers(0, 6))
    def beam_search(self, pick: int, params: BeamSearchParams, fault: Any, at: int) -> None:
        branch = self.pick(pick)
        if branch is None or len(self.past) + params.num_returned > MOST_BRANCHES:
            return
        past = self.past[branch]
        expected = beams_alone(past, params, self.room) if len(past) <= self.room else None
        try:
            with self.fault(fault, at):
                children = branch.beam_search(params)
        except OutOfCapacity:
            assert expected is None
        except ENDED:
            assert fault in MAY_RAISE or self.streams
            assert set(branch.children) <= set(self.past), "beams of a search that failed are gone"
        else:
            assert expected is not None
            assert [child.output.score for child in children if child.output] == [c.score for c in expected]
            self.check_children(branch, children, expected)

    def check_children(self, branch: Branch, children: list[Branch], expected: list[Choice]) -> None:
        self.agree([child.output for child in children if child.output], expected)
        for child, choice in zip(children, expected, strict=True):
            self.add(child, self.past[branch] + choice.token_ids, branch)

    @rule(pick=PICK, candidates=st.lists(TEXT, min_size=1, max_size=4), fault=FAULT, at=st.integers(0, 2))
    def score(self, pick: int, candidates: list[list[int]], fault: Any, at: int) -> None:
        branch = self.pick(pick)
        if branch is None:
            return
        past = self.past[branch]
        longest = max(len(candidate) for candidate in candidates)
        try:
            with self.fault(fault, at):
                scores = branch.score(candidates)
        except OutOfCapacity:
            assert len(past) + longest - 1 > self.room
        except ENDED:
            assert fault in MAY_RAISE or self.streams
        else:
            for score, candidate in zip(scores, candidates, strict=True):
                assert score.token_logprobs == pytest.approx(logprobs_after(past, candidate), abs=1e-4)

    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        branch = self.pick(pick)
        if branch is not None:
            branch.release()
            del self.past[branch]

    @rule(pick=PICK)
    def prune(self, pick: int) -> None:
        branch = self.pick(pick)
        if branch is not None:
            free = self.llm.stats().pages.num_free
            assert branch.prune() == self.llm.stats().pages.num_free - free
            for one in self.descendants(branch):
                self.past.pop(one, None)

    @rule(pick=PICK)
    def promote(self, pick: int) -> None:
        branch = self.pick(pick)
        if branch is not None:
            branch.promote()
            parent = self.family[branch]
            for sibling, its_parent in list(self.family.items()):
                if parent is not None and its_parent is parent and sibling is not branch:
                    for one in self.descendants(sibling):
                        self.past.pop(one, None)

    @rule(prompts=st.lists(TEXT, min_size=1, max_size=4), params=PARAMS, n=st.integers(1, 3), pick=PICK)
    def generate_from_prompts(
        self, prompts: list[list[int]], params: SamplingParams, n: int, pick: int
    ) -> None:
        branch = self.pick(pick)
        if branch is not None:
            past = self.past[branch]
            prompts = [past[: pick % (len(past) + 1)] + prompt for prompt in prompts]
        params = SamplingParams(**{**vars(params), "n": n})
        held = len(self.llm.engine.sequences)
        try:
            with self.late():
                outputs = self.llm.generate(prompts, params)
        except OutOfCapacity:
            assert any(len(prompt) > self.room for prompt in prompts)
        else:
            for prompt, output in zip(prompts, outputs, strict=True):
                assert output.prompt_token_ids == prompt
                assert 0 <= output.num_cached_tokens < len(prompt)
                self.agree(output.choices, alone(prompt, params, self.room))
        assert self.streams or len(self.llm.engine.sequences) == held

    @rule(prompt=TEXT, params=PARAMS, n=st.integers(1, 3))
    def open_stream(self, prompt: list[int], params: SamplingParams, n: int) -> None:
        params = SamplingParams(**{**vars(params), "n": n})
        if len(prompt) <= self.room and len(self.streams) < 3:
            self.streams[self.llm.stream(prompt, params)] = (
                [[] for _ in range(n)],
                alone(prompt, params, self.room),
            )

    @rule(pick=PICK, count=st.integers(1, 12), close=st.booleans())
    def read_stream(self, pick: int, count: int, close: bool) -> None:
        """Streams go on beside whatever else runs, until they end, are closed, or a step of theirs fails."""
        if not self.streams:
            return
        stream = list(self.streams)[pick % len(self.streams)]
        parts, expected = self.streams[stream]
        try:
            for _ in range(count):
                delta = next(stream)
                part = parts[delta.index]
                part += delta.token_ids
                assert expected[delta.index].token_ids[: len(part)] == part
        except StopIteration:
            assert parts == [choice.token_ids for choice in expected]
            del self.streams[stream]
        except StepFailed:
            assert self.num_faults
            del self.streams[stream]
        else:
            if close:
                stream.close()
                del self.streams[stream]

    # -- what always holds --------------------------------------------------------------------------------

    @invariant()
    def everything_is_counted(self) -> None:
        check_invariants(self.llm)
        for branch, past in self.past.items():
            assert branch.token_ids == past
            blocks, filled = branch.block_table
            held = (len(blocks) - 1) * self.block_size + filled if blocks else 0
            assert held <= len(past)
        if not self.streams:
            assert len(self.llm.engine.sequences) == len(self.past)

    def teardown(self) -> None:
        if hasattr(self, "llm"):
            for stream in self.streams:
                stream.close()
            for branch in list(self.past):
                branch.release()
            self.llm.engine.step()  # interrupted copies are done, and let go of their blocks
            check_idle(self.llm)
            self.llm.generate([0] * self.room, max_tokens=1)  # the whole pool can still be had
            check_idle(self.llm)


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_random_use_of_branches(block_size: int) -> None:
    run(block_size, max_examples=10)


def run(block_size: int, max_examples: int) -> None:
    machine = type("BranchesOfSize", (Branches,), {"block_size": block_size})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )

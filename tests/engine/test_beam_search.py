"""Beam search in the engine: what it gives, what it costs, and that it leaves nothing behind.

F1 to F3 are faults that other engines' users have reported. On real models: test_beam_parity.py.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from ramet import (
    LLM,
    AsyncLLM,
    BeamProgress,
    BeamSearchParams,
    Branch,
    InvalidInput,
    OutOfCapacity,
    SamplingParams,
)
from ramet.engine.beam_search import BeamSearch
from ramet.engine.branch import prune_all
from ramet.engine.errors import BranchReleased, StepFailed
from ramet.engine.operation import Operation, together
from ramet.engine.outputs import Choice
from ramet.testing import ScriptedModel, check_idle, check_invariants, fail_forward, fail_reservation

MakeLLM = Callable[..., LLM]
A, B, C, END, START = range(5)
PROMPT = [START]


def tokens(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"beam search {seed}").choices(range(512), k=length)


def scripted(script: Callable[[list[int]], Mapping[int, float]], **settings: Any) -> LLM:
    """A model of five tokens; `script` gives the probabilities after what follows the start."""

    def next_token(past: list[int]) -> dict[int, float]:
        return {token: math.log(p) for token, p in script(past[1:]).items()}

    model = ScriptedModel(next_token, vocab_size=5, eos_token_ids=frozenset([END]))
    llm = LLM(model, **{"block_size": 4, "num_blocks": 64, **settings})
    llm.on_step(lambda: check_invariants(llm))
    return llm


def search(llm: LLM, prompt: list[int], **settings: Any) -> list[Choice]:
    """The choices of a search that then leaves nothing behind."""
    found = llm.beam_search(prompt, **settings)
    choices = [beam.output for beam in found if beam.output is not None]
    assert [beam.token_ids[len(prompt) :] for beam in found] == [choice.token_ids for choice in choices]
    for beam in found:
        beam.release()
    check_idle(llm)
    return choices


# -- what other engines got wrong ------------------------------------------------------------------------


def three_ways(output: list[int]) -> Mapping[int, float]:
    return {
        (): {A: 0.5, B: 0.4, C: 0.1},
        (A,): {A: 0.36, B: 0.34, END: 0.30},
        (B,): {END: 0.9, A: 0.1},
    }.get(tuple(output), {END: 1.0})


@pytest.mark.parametrize(
    ("num_beams", "expected"),
    [
        (1, {(A, A, END): 0.5 * 0.36}),
        (2, {(B, END): 0.4 * 0.9, (A, A, END): 0.5 * 0.36}),
        (3, {(B, END): 0.4 * 0.9, (A, A, END): 0.5 * 0.36, (A, B, END): 0.5 * 0.34}),
    ],
)
def test_f1_beams_keep_their_own_parents(num_beams: int, expected: dict[tuple[int, ...], float]) -> None:
    found = search(scripted(three_ways), PROMPT, num_beams=num_beams, length_penalty=0, max_tokens=4)
    assert [tuple(choice.token_ids) for choice in found] == list(expected)
    for choice, probability in zip(found, expected.values(), strict=True):
        assert choice.cumulative_logprob == pytest.approx(math.log(probability), abs=1e-4)
        assert choice.score == pytest.approx(math.log(probability), abs=1e-4)
        assert (choice.finish_reason, choice.stop_reason) == ("stop", END)


def test_f1_beams_are_distinct_and_their_log_probabilities_are_those_of_teacher_forcing(
    make_tiny: MakeLLM,
) -> None:
    llm = make_tiny(num_blocks=128)
    prompt = tokens(21)
    choices = search(llm, prompt, num_beams=4, max_tokens=40)
    assert len({tuple(choice.token_ids) for choice in choices}) == 4
    forced = make_tiny(num_blocks=128).branch(prompt).score([choice.token_ids for choice in choices])
    for choice, score in zip(choices, forced, strict=True):
        assert choice.token_logprobs == pytest.approx(score.token_logprobs, abs=1e-4)
        assert choice.score == pytest.approx(score.logprob / 40, abs=1e-4)


@pytest.mark.parametrize(
    ("length_penalty", "early_stopping", "best", "score"),
    [
        (1, False, [A] * 10, (math.log(0.60) + 9 * math.log(0.95)) / 10),
        (1, True, [END], math.log(0.35)),
        (0, False, [A] * 10, math.log(0.60) + 9 * math.log(0.95)),
    ],
)
def test_f2_a_search_stops_when_no_running_beam_can_win(
    length_penalty: float, early_stopping: bool, best: list[int], score: float
) -> None:
    def script(output: list[int]) -> Mapping[int, float]:
        if not output:
            return {A: 0.60, END: 0.35, B: 0.05}
        return {END: 1.0} if output[-1] == B else {A: 0.95, END: 0.05}

    settings = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    found = search(scripted(script), PROMPT, num_beams=2, max_tokens=10, **settings)
    assert found[0].token_ids == best
    assert found[0].score == pytest.approx(score, abs=1e-4)


STOP = [33203, 23960, 57, 58]  # "DEFGHIJ" in the default tokenizer


def spelling(past: list[int]) -> dict[int, float]:
    """Spells the stop string, or a text that only begins like it; other beams go on and on."""
    output = past[1:]
    if not output:
        return {STOP[0]: math.log(0.5), 260: math.log(0.3), 253: math.log(0.2)}
    if output == STOP[: len(output)] and len(output) < len(STOP):
        return {STOP[len(output)]: math.log(0.9), 260: math.log(0.1)}
    return {260: math.log(0.6), 253: math.log(0.4)}


@pytest.mark.model
def test_f3_a_stop_string_ends_the_beam_that_completes_it(smollm2: LLM) -> None:
    """Its token ids keep what completed it, and its text does not."""
    llm = LLM(ScriptedModel(spelling, vocab_size=49152), smollm2.tokenizer, block_size=4, num_blocks=64)
    found = search(llm, [1], num_beams=3, max_tokens=6, stop="DEFGHIJ", length_penalty=0)
    first, *others = found
    assert (first.token_ids, first.text) == (STOP, "")
    assert (first.finish_reason, first.stop_reason) == ("stop", "DEFGHIJ")
    assert first.score == pytest.approx(math.log(0.5 * 0.9**3), abs=1e-4)
    assert len(others) == 2
    for choice in others:
        assert choice.finish_reason == "length"
        assert len(choice.token_ids) == 6
        assert smollm2.tokenizer is not None
        assert choice.text == smollm2.tokenizer.decode(choice.token_ids), (
            "what was held back is shown at the end"
        )
    late = search(llm, [1], num_beams=3, max_tokens=6, min_tokens=5, stop="DEFGHIJ", length_penalty=0)
    assert all(choice.finish_reason == "length" for choice in late)
    assert late[0].text.startswith("DEFGHIJ")


def test_f3_one_token_and_fewer_ends_than_results() -> None:
    llm = scripted(three_ways)
    found = search(llm, PROMPT, num_beams=3, max_tokens=1)
    assert [choice.token_ids for choice in found] == [[A], [B], [C]]
    assert [choice.finish_reason for choice in found] == ["length"] * 3
    found = search(llm, PROMPT, num_beams=3, max_tokens=2, length_penalty=0)
    assert [choice.token_ids for choice in found] == [[B, END], [A, A], [A, B]]
    assert [choice.finish_reason for choice in found] == ["stop", "length", "length"]


# -- what it costs -----------------------------------------------------------------------------------------


class Meter:
    """What each step of an engine runs, and the most blocks that were ever in use."""

    def __init__(self, llm: LLM) -> None:
        self.rows: list[list[int]] = []  # of each step: how many tokens each row has
        self.peak = 0
        self.copies = llm.engine.cache.num_copies
        runner, self.llm = llm.engine.runner, llm
        forward = runner.forward

        def measured(step: Any) -> Any:
            self.rows.append([len(row.token_ids) for row in step.rows])
            self.peak = max(self.peak, llm.stats().pages.num_in_use)
            return forward(step)

        runner.forward = measured  # type: ignore[method-assign]

    @property
    def num_copies(self) -> int:
        return self.llm.engine.cache.num_copies - self.copies


@pytest.mark.parametrize("num_beams", [1, 2, 8, 32])
def test_a_step_is_one_row_a_beam_and_its_blocks_are_the_prompt_and_a_tail_each(
    make_tiny: MakeLLM, num_beams: int
) -> None:
    block_size, num_tokens, prompt = 4, 14, tokens(22)
    llm = make_tiny(block_size=block_size, num_blocks=256)
    meter = Meter(llm)
    found = llm.beam_search(prompt, num_beams=num_beams, max_tokens=num_tokens)
    assert meter.rows == [[22], *[[1] * num_beams] * (num_tokens - 1)]
    shared = len(prompt) // block_size
    # The last token of each beam is not fed.
    tail = -(-(len(prompt) + num_tokens - 1) // block_size) - shared
    assert meter.peak <= shared + num_beams * tail
    # The blocks that are left are those of the beams returned.
    in_use = {block for beam in found for block in beam.block_table.blocks}
    assert llm.stats().pages.num_in_use == len(in_use)
    # The token at each place inside a block is written by num_beams beams, of which one writes in place.
    inside = [place for place in range(len(prompt), len(prompt) + num_tokens - 1) if place % block_size]
    assert meter.num_copies <= len(inside) * (num_beams - 1)
    for beam in found:
        beam.release()
    check_idle(llm)


def test_copies_are_made_only_where_beams_part_inside_a_block() -> None:
    """Two beams that part once, at a known place, and go their ways."""

    def script(output: list[int]) -> Mapping[int, float]:
        if len(output) == part:
            return {A: 0.6, B: 0.4}
        return {C: 1.0}

    for part, num_copies in [(0, 1), (1, 1), (2, 1), (3, 0), (4, 1)]:
        llm = scripted(script)
        meter = Meter(llm)
        found = search(llm, PROMPT, num_beams=2, max_tokens=9)  # a start, then 9 tokens in blocks of 4
        assert [choice.token_ids[part] for choice in found] == [A, B]
        assert meter.num_copies == num_copies, part


def test_blocks_of_beams_that_fell_out_are_free_at_once() -> None:
    """After the search only the prompt's two blocks are left, and what is returned."""
    llm = scripted(lambda output: {A: 0.4, B: 0.35, C: 0.25})
    prompt = [START] * 8
    found = llm.beam_search(prompt, num_beams=8, num_return_sequences=1, max_tokens=12)
    pages = llm.stats().pages
    assert pages.num_in_use == len(found[0].block_table.blocks)
    assert pages.num_cached_idle == 0
    found[0].prune()
    assert llm.stats().pages.num_cached_idle == 2
    check_idle(llm)


# -- beside others, and in too little room -----------------------------------------------------------------


def test_a_search_gives_the_same_beside_others(make_tiny: MakeLLM) -> None:
    prompt, settings = tokens(21), {"num_beams": 5, "max_tokens": 12}
    alone = [choice.token_ids for choice in search(make_tiny(), prompt, **settings)]
    greedy = make_tiny().generate(tokens(30, 1), temperature=0, max_tokens=20)[0].choices[0].token_ids
    llm = make_tiny(num_blocks=128)
    other = llm.engine.new_sequence(tokens(30, 1), keep=False)
    run = llm.engine.generations(other, SamplingParams(temperature=0, max_tokens=20))[0]
    llm.engine.submit(other, run)
    meter = Meter(llm)
    found = llm.beam_search(prompt, **settings)  # type: ignore[arg-type]
    assert [beam.token_ids[21:] for beam in found] == alone
    assert [1] * 6 in meter.rows, "one batch holds the five beams and the other request"
    llm.engine.run([run])
    assert run.choice.token_ids == greedy


@pytest.mark.parametrize(
    "settings", [{"num_blocks": 9}, {"num_blocks": 12}, {"max_batch_tokens": 3}, {"max_batch_tokens": 1}]
)
def test_too_little_room_changes_nothing(make_tiny: MakeLLM, settings: dict[str, int]) -> None:
    """Beams are preempted, or a step of the search takes several of the engine."""
    prompt, search_settings = tokens(11), {"num_beams": 6, "max_tokens": 12}
    expected = search(make_tiny(), prompt, **search_settings)
    llm = make_tiny(block_size=4, **settings)
    found = search(llm, prompt, **search_settings)
    assert [choice.token_ids for choice in found] == [choice.token_ids for choice in expected]
    assert [c.score for c in found] == pytest.approx([c.score for c in expected], abs=1e-4)
    if "num_blocks" in settings:
        assert llm.stats().num_preemptions > 0


def test_two_searches_of_one_tree_at_once(make_tiny: MakeLLM) -> None:
    llm = make_tiny(num_blocks=128)
    root = llm.branch(tokens(13))
    expected = [beam.token_ids for beam in root.beam_search(num_beams=3, max_tokens=6)]
    kids = root.fork(2)
    both = llm._drive(
        together(
            [kid._beam_searching(None, {"num_beams": 3, "max_tokens": 6}) for kid in kids],
            prune_all,
        )
    )
    assert [[beam.token_ids for beam in beams] for beams in both] == [expected, expected]


# -- results are branches ----------------------------------------------------------------------------------


def test_results_go_on_as_branches_and_the_branch_itself_does_not_change(make_tiny: MakeLLM) -> None:
    llm = make_tiny(num_blocks=128)
    root = llm.branch(tokens(13))
    before = root.token_ids
    found = root.beam_search(num_beams=3, max_tokens=6)
    assert root.token_ids == before
    assert root.children == found
    for beam in found:
        past = beam.token_ids
        new = beam.generate(temperature=0, max_tokens=5).token_ids
        assert new == make_tiny().generate(past, temperature=0, max_tokens=5)[0].choices[0].token_ids
    assert found[1].promote() >= 0
    assert [beam.released for beam in found] == [True, False, True]
    root.prune()
    check_idle(llm)


def test_beams_that_ended_early_go_on_as_well() -> None:
    """They were parked while others ran, so their open block is computed again."""
    llm = scripted(three_ways)
    found = llm.beam_search(PROMPT, num_beams=3, max_tokens=4, length_penalty=0)
    assert found[0].token_ids == [START, B, END]
    found[0].extend([A, A])
    assert found[0].generate(max_tokens=1, temperature=0).token_ids == [END]


def test_a_search_from_messages(make_smollm2: MakeLLM) -> None:
    llm = make_smollm2()
    messages = [{"role": "user", "content": "Say hi."}]
    found = llm.beam_search(messages=messages, num_beams=2, max_tokens=4)
    branch = llm.branch(messages=messages)
    assert [beam.token_ids for beam in branch.beam_search(num_beams=2, max_tokens=4)] == [
        beam.token_ids for beam in found
    ]
    assert all(beam.output and beam.output.text for beam in found)


def test_log_probabilities_of_others_are_those_that_a_greedy_run_reports(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    choice = search(llm, tokens(9), num_beams=1, max_tokens=5, logprobs=3)[0]
    greedy = llm.generate(tokens(9), temperature=0, max_tokens=5, logprobs=3)[0].choices[0]
    assert choice.token_ids == greedy.token_ids
    assert choice.token_logprobs == pytest.approx(greedy.token_logprobs, abs=1e-4)
    assert choice.logprobs is not None
    assert greedy.logprobs is not None
    for mine, other in itertools.zip_longest(choice.logprobs, greedy.logprobs):
        assert [one.token_id for one in mine] == [one.token_id for one in other]


def test_raw_scores_are_sums() -> None:
    raw = search(scripted(three_ways), PROMPT, num_beams=3, max_tokens=4, scoring="raw", length_penalty=2.0)
    sums = search(scripted(three_ways), PROMPT, num_beams=3, max_tokens=4, length_penalty=0.0)
    assert [(c.token_ids, c.score) for c in raw] == [(c.token_ids, c.score) for c in sums]
    assert all(c.score == pytest.approx(c.cumulative_logprob) for c in raw)


def test_generate_with_beams_gives_outputs_and_keeps_nothing_but_cache(make_tiny: MakeLLM) -> None:
    llm = make_tiny(num_blocks=128)
    prompts = [tokens(21), tokens(40, 1), tokens(21)]
    params = BeamSearchParams(num_beams=3, num_return_sequences=2, max_tokens=6)
    outputs = llm.generate(prompts, params)
    check_idle(llm)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = search(make_tiny(), prompt, num_beams=3, num_return_sequences=2, max_tokens=6)
        assert output.prompt_token_ids == prompt
        assert [choice.token_ids for choice in output.choices] == [choice.token_ids for choice in expected]
        assert [choice.index for choice in output.choices] == [0, 1]
    assert llm.generate(prompts[1], params)[0].num_cached_tokens >= 32
    llm.generate(prompts[1], params, cache=False)
    for bad in ([[1], []], [[1], [512]]):
        with pytest.raises(InvalidInput, match="prompt"):
            llm.generate(bad, params)
    with pytest.raises(OutOfCapacity):
        llm.generate([[1], [2] * 5000], params)
    with pytest.raises(StepFailed), fail_forward(llm, 2):
        llm.generate(prompts, params)
    with pytest.raises(InvalidInput, match="params"):
        llm.generate(prompts, params, max_tokens=3)
    check_idle(llm)


# -- progress, errors and ends -----------------------------------------------------------------------------


def test_progress_is_told_after_each_token() -> None:
    heard: list[BeamProgress] = []
    found = scripted(three_ways).beam_search(
        PROMPT, num_beams=3, max_tokens=4, length_penalty=0, on_progress=heard.append
    )
    assert [(one.num_tokens, one.num_running, one.num_finished) for one in heard] == [
        (1, 3, 0),
        (2, 3, 1),
        (3, 0, 3),
    ]
    assert [one.token_ids for one in heard] == [[A], [A, A], [B, END]]
    assert found[0].output is not None


@pytest.mark.parametrize("when", [1, 2, 3])
def test_whoever_hears_of_progress_may_fail_and_ends_its_search_only(when: int) -> None:
    llm = scripted(three_ways)

    def hear(progress: BeamProgress) -> None:
        if progress.num_tokens == when:
            raise LookupError("heard enough")

    with pytest.raises(LookupError):
        llm.beam_search(PROMPT, num_beams=3, max_tokens=4, length_penalty=0, on_progress=hear)
    check_idle(llm)


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_text_that_fails_ends_the_search_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    calls = itertools.count(1)

    def fail(search: BeamSearch, token_ids: list[int]) -> str:
        if next(calls) == call:
            raise LookupError("no such text")
        return ""

    monkeypatch.setattr(BeamSearch, "_decoded", fail)
    llm = scripted(three_ways)
    with pytest.raises(LookupError):
        llm.beam_search(PROMPT, num_beams=3, max_tokens=4, length_penalty=0)
    check_idle(llm)


@pytest.mark.parametrize("index", [0, 1, 4])
def test_a_step_that_fails_ends_the_search_and_leaves_nothing(make_tiny: MakeLLM, index: int) -> None:
    llm = make_tiny()
    with fail_forward(llm, index), pytest.raises(StepFailed):
        llm.beam_search(tokens(9), num_beams=4, max_tokens=8)
    check_idle(llm)
    root = llm.branch(tokens(9))
    with fail_forward(llm, index), pytest.raises(StepFailed):
        root.beam_search(num_beams=4, max_tokens=8)
    assert root.children == []
    assert len(root.beam_search(num_beams=4, max_tokens=8)) == 4
    with fail_reservation(llm, 3):
        assert len(root.beam_search(num_beams=4, max_tokens=8)) == 4


def test_logits_that_are_no_numbers_fail_the_search() -> None:
    model = ScriptedModel(lambda past: [math.nan if past[-1] == B else 0.0] * 5, vocab_size=5)
    llm = LLM(model, block_size=4, num_blocks=32)
    with pytest.raises(StepFailed, match="not finite"):
        llm.beam_search([A], num_beams=3, max_tokens=4)
    check_idle(llm)


def test_a_model_that_allows_nothing_fails_the_search() -> None:
    llm = scripted(lambda output: {A: 1.0} if not output else {B: 1.0})
    with pytest.raises(StepFailed):
        llm.beam_search(PROMPT, num_beams=2, max_tokens=4, banned_token_ids=[B])
    check_idle(llm)


def test_a_branch_that_is_released_while_its_prompt_is_computed(make_tiny: MakeLLM) -> None:
    llm = make_tiny(max_batch_tokens=4)
    root = llm.branch(tokens(3))
    root.extend(tokens(9))
    undo = llm.on_step(root.release)
    with pytest.raises(Exception, match="released"):
        root.beam_search(num_beams=2, max_tokens=4)
    undo()
    check_idle(llm)


def test_a_closed_search_leaves_nothing(make_tiny: MakeLLM) -> None:
    for num_steps in range(7):
        llm = make_tiny()
        operation = llm._beam_searching(tokens(9), None, None, None, {"num_beams": 4, "max_tokens": 4})
        next(operation)
        for _ in range(num_steps):
            llm.engine.step()
        operation.close()
        check_idle(llm)


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("num_beams", {"num_beams": 10**6}),
        ("num_beans", {"num_beans": 2}),
        ("tokens", {"tokens": SamplingParams()}),
        ("stop", {"stop": "x"}),  # without a tokenizer
        ("stop_token_ids", {"stop_token_ids": [512]}),
        ("banned_token_ids", {"banned_token_ids": list(range(512))}),
        ("params", {"params": SamplingParams()}),
        ("params", {"params": 3}),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    make_tiny: MakeLLM, field: str, settings: dict[str, Any]
) -> None:
    llm = make_tiny()
    with pytest.raises(InvalidInput) as raised:
        llm.beam_search([1, 2], **settings)
    assert raised.value.field == field
    check_idle(llm)
    assert llm.stats().num_steps == 0


def test_a_search_needs_room_and_is_bounded_by_it(make_tiny: MakeLLM) -> None:
    llm = make_tiny(max_model_len=12)
    assert {len(c.token_ids) for c in search(llm, tokens(9), num_beams=2, max_tokens=None)} == {4}
    with pytest.raises(OutOfCapacity):
        llm.beam_search(tokens(13), num_beams=2)
    root: Branch = llm.branch(tokens(12))
    assert len(root.beam_search(num_beams=2, max_tokens=3)[0].token_ids) == 13


# -- asynchronous, and cancelled ---------------------------------------------------------------------------


def started(llm: LLM, num_steps: int, **settings: Any) -> tuple[Operation[list[Branch]], BeamSearch]:
    """A search after some steps."""
    operation = llm._beam_searching(PROMPT, None, None, None, settings)
    (run,) = next(operation)
    assert isinstance(run, BeamSearch)
    for _ in range(num_steps):
        llm.engine.step()
    return operation, run


def test_a_cancelled_search_gives_the_beams_that_ran_beside_those_that_were_complete() -> None:
    llm = scripted(lambda output: {A: 0.5, B: 0.3, END: 0.2})
    operation, run = started(llm, 2, num_beams=3, max_tokens=10, length_penalty=0)
    run.cancel(llm.engine)
    run.cancel(llm.engine)
    with pytest.raises(StopIteration) as stopped:
        next(operation)
    found = stopped.value.value
    # Of nine ways of two tokens those that ended after the first are one.
    expected = {(A, A): 0.25, (END,): 0.2, (A, B): 0.15}
    assert {tuple(beam.output.token_ids): beam.output.score for beam in found} == pytest.approx(
        {way: math.log(p) for way, p in expected.items()}, abs=1e-4
    )
    assert [beam.output.finish_reason for beam in found] == ["abort", "stop", "abort"]
    assert found[0].generate(max_tokens=1, temperature=0).token_ids == [A]
    prune_all(found)
    check_idle(llm)


def test_a_search_that_is_cancelled_before_its_first_token_has_no_result() -> None:
    llm = scripted(three_ways)
    operation, run = started(llm, 0, num_beams=2)
    run.cancel(llm.engine)
    assert run.error is not None
    with pytest.raises(type(run.error)):
        operation.throw(run.error)
    check_idle(llm)


@pytest.mark.parametrize("pruned", [True, False])
def test_a_search_ends_where_its_branch_is_pruned_and_not_where_it_is_released(
    make_tiny: MakeLLM, pruned: bool
) -> None:
    llm = make_tiny(num_blocks=128)
    root = llm.branch(tokens(9))
    (asked,) = root.fork()

    def hear(progress: BeamProgress) -> None:
        if progress.num_tokens == 3:
            (root.prune if pruned else asked.release)()

    if pruned:
        with pytest.raises(BranchReleased):
            asked.beam_search(num_beams=4, max_tokens=8, on_progress=hear)
    else:
        found = asked.beam_search(num_beams=4, max_tokens=8, on_progress=hear)
        assert [len(beam) for beam in found] == [17] * 4
        prune_all([*found, root])
    check_idle(llm)


def test_the_asynchronous_twins_do_the_same_and_a_caller_who_leaves_leaves_nothing(
    make_tiny: MakeLLM,
) -> None:
    prompt: list[int] = tokens(13)
    settings: dict[str, Any] = {"num_beams": 3, "max_tokens": 6}
    expected = [choice.token_ids for choice in search(make_tiny(), prompt, **settings)]
    inner = make_tiny(num_blocks=128)

    async def run() -> None:
        heard: list[BeamProgress] = []
        async with AsyncLLM(inner) as llm:
            root = await llm.branch(prompt)
            several = await asyncio.gather(
                llm.beam_search(prompt, **settings),
                root.beam_search(on_progress=heard.append, **settings),
            )
            for beams in several:
                assert [beam.token_ids[13:] for beam in beams] == expected
                assert [beam.token_ids for beam in await beams[0].fork(2)] == [beams[0].token_ids] * 2
                for beam in beams:
                    await beam.prune()
            assert [one.num_tokens for one in heard] == [1, 2, 3, 4, 5, 6]
            leaving = asyncio.create_task(root.beam_search(num_beams=3, max_tokens=500))
            while (await llm.stats()).num_running != 3:
                await asyncio.sleep(0)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            with llm.start_beam_search(prompt, num_beams=3, max_tokens=500) as work:
                while (await llm.stats()).num_running != 3:
                    await asyncio.sleep(0)
                assert await work.cancel()
                cut = await work.result()
                assert [beam.output.finish_reason for beam in cut if beam.output] == ["abort"] * 3
            await root.prune()
            for beam in cut:
                await beam.prune()
            assert (await llm.stats()).num_running == 0

    asyncio.run(run())
    check_idle(inner)

"""Beam search equals that of transformers: the same model, the same beams, the same scores."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from ramet import LLM
from ramet.testing import check_idle, check_invariants, tiny_llama

MakeLLM = Callable[..., LLM]
VOCAB_SIZE = 32  # so few that beams run into the end tokens
PROMPT = random.Random("beams").choices(range(VOCAB_SIZE), k=21)
ENDS = ([9], [9, 3])
WIDTHS = (1, 2, 4, 8)
LENGTH_PENALTIES = (0.0, 0.6, 1.0, 2.0, -1.0)
EARLY_STOPPING = (False, True, "never")


class Theirs(NamedTuple):
    """What transformers returns, best first: generated tokens up to the end token, scores, beam indices."""

    token_ids: list[list[int]]
    scores: list[float]
    beam_indices: list[list[int]]


@pytest.fixture(scope="module")
def plain() -> Any:
    """A tiny random llama as transformers runs it."""
    return tiny_llama(vocab_size=VOCAB_SIZE, weight_std=0.2)


@pytest.fixture(scope="module")
def make_llm(plain: Any) -> MakeLLM:
    """Engines over the same weights."""
    module = copy.deepcopy(plain)
    return lambda **settings: checked(LLM(module, **{"num_blocks": 128, **settings}))


def checked(llm: LLM) -> LLM:
    llm.on_step(lambda: check_invariants(llm))
    return llm


def generate(
    model: Any, prompt: list[int], *, num_beams: int, max_new_tokens: int, **settings: Any
) -> Theirs:
    """`model.generate` with `num_beams` beams, all of them returned."""
    pad = -1  # no token, so that the ends of shorter beams show
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=num_beams,
        num_return_sequences=num_beams,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=pad,
        return_dict_in_generate=True,
        output_scores=True,
        **settings,
    )
    rows = output.sequences[:, len(prompt) :].tolist()
    if num_beams == 1:  # a greedy search, which reports no such scores
        return Theirs(rows, [], [])
    indices = [[i for i in row if i >= 0] for row in output.beam_indices.tolist()]
    lengths = map(len, indices)
    return Theirs(
        [row[:n] for row, n in zip(rows, lengths, strict=True)], output.sequences_scores.tolist(), indices
    )


def compare(llm: LLM, theirs: Theirs, prompt: list[int], **settings: Any) -> None:
    branches = llm.beam_search(prompt, **settings)
    choices = [branch.output for branch in branches]
    for branch, choice in zip(branches, choices, strict=True):
        assert choice is not None
        assert branch.token_ids == prompt + choice.token_ids
    assert [c.token_ids for c in choices if c] == theirs.token_ids
    if theirs.scores:
        assert [c.score for c in choices if c] == pytest.approx(theirs.scores, abs=1e-4, rel=1e-6)
        assert [c.beam_indices for c in choices if c] == theirs.beam_indices
    for branch in branches:
        branch.release()
    check_idle(llm)


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
@pytest.mark.parametrize("num_beams", WIDTHS)
def test_beams_equal_those_of_transformers(
    make_llm: MakeLLM, plain: Any, num_beams: int, early_stopping: Any
) -> None:
    """Every width and rule of stopping, with every length penalty and one or two end tokens."""
    llm = make_llm()
    lengths: set[int] = set()
    for length_penalty, ends in itertools.product(LENGTH_PENALTIES, ENDS):
        shared = {"num_beams": num_beams, "length_penalty": length_penalty, "early_stopping": early_stopping}
        theirs = generate(plain, PROMPT, max_new_tokens=10, eos_token_id=ends, **shared)
        compare(llm, theirs, PROMPT, max_tokens=10, stop_token_ids=ends, **shared)
        lengths.update(map(len, theirs.token_ids))
    if num_beams > 1:
        assert len(lengths) > 1, "beams end where end tokens say"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"min_new_tokens": 7}, {"min_tokens": 7}),
        ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
        ({"repetition_penalty": 0.6, "min_new_tokens": 3}, {"repetition_penalty": 0.6, "min_tokens": 3}),
        ({"sequence_bias": [[[5], 1.0], [[9], -3.0]]}, {"logit_bias": {5: 1.0, 9: -3.0}}),
    ],
)
def test_what_is_done_to_log_probabilities_equals_the_processors_of_transformers(
    make_llm: MakeLLM, plain: Any, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    llm = make_llm()
    unchanged = generate(plain, PROMPT, num_beams=4, max_new_tokens=10, eos_token_id=ENDS[1])
    expected = generate(plain, PROMPT, num_beams=4, max_new_tokens=10, eos_token_id=ENDS[1], **theirs)
    assert expected.token_ids != unchanged.token_ids
    compare(llm, expected, PROMPT, num_beams=4, max_tokens=10, stop_token_ids=ENDS[1], **ours)


def test_the_best_are_returned_where_fewer_are_asked_for(make_llm: MakeLLM, plain: Any) -> None:
    llm = make_llm()
    theirs = generate(plain, PROMPT, num_beams=6, max_new_tokens=8, eos_token_id=-1)
    best = Theirs(theirs.token_ids[:2], theirs.scores[:2], theirs.beam_indices[:2])
    compare(llm, best, PROMPT, num_beams=6, num_return_sequences=2, max_tokens=8)


def test_a_beam_search_on_a_branch_equals_that_on_the_flat_prompt(make_llm: MakeLLM) -> None:
    """Also where the branch was forked inside a block, extended, and its last tokens lack KV."""
    flat = [b.output for b in make_llm().beam_search(PROMPT, num_beams=4, max_tokens=8)]
    branch = make_llm().branch(PROMPT[:9]).fork()[0]
    branch.extend(PROMPT[9:])
    found = [b.output for b in branch.beam_search(num_beams=4, max_tokens=8)]
    assert [c.token_ids for c in found if c] == [c.token_ids for c in flat if c]
    assert [c.score for c in found if c] == pytest.approx([c.score for c in flat if c], abs=1e-4)


@pytest.mark.model
@pytest.mark.parametrize(
    ("text", "stop", "settings"),
    [
        ("The capital of France is", None, {}),
        ("List of prime numbers: 2, 3,", " 11", {"length_penalty": 2.0, "early_stopping": "never"}),
    ],
)
def test_beams_of_smollm2_equal_those_of_transformers(
    make_smollm2: MakeLLM, plain_smollm2: Any, text: str, stop: str | None, settings: dict[str, Any]
) -> None:
    llm = make_smollm2()
    assert llm.tokenizer is not None
    prompt = llm.tokenizer.encode(text)
    theirs = generate(
        plain_smollm2,
        prompt,
        num_beams=4,
        max_new_tokens=12,
        eos_token_id=2,
        stop_strings=stop,
        tokenizer=llm.tokenizer.hf,
        **settings,
    )
    compare(llm, theirs, prompt, num_beams=4, max_tokens=12, stop=stop, **settings)


@pytest.fixture(scope="module")
def plain_smollm2(smollm2: LLM) -> Any:
    """The embedded model as transformers runs it."""
    from transformers import AutoModelForCausalLM

    module: Any = smollm2.engine.runner.model.module  # type: ignore[attr-defined]
    config = copy.deepcopy(module.config)  # the attention implementation is written into it
    model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, attn_implementation="eager", dtype=torch.float32
    )
    model.load_state_dict(module.state_dict())
    return model.eval()

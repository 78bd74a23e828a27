"""The arithmetic of beam search, on numbers made up by hand."""

from __future__ import annotations

import pytest

from ramet.engine.beam import Beams, Candidate, num_candidates


def beams(num_beams: int, **settings: object) -> Beams:
    return Beams(num_beams, **{"max_tokens": 10, "length_exponent": 1.0, "early_stopping": False, **settings})  # type: ignore[arg-type]


def candidates(*scores: float) -> list[Candidate]:
    """Best first; their tokens are 0, 1, 2, ..."""
    return [Candidate(0, token_id, score, score) for token_id, score in enumerate(scores)]


def tokens(chosen: list[Candidate]) -> list[int]:
    return [one.token_id for one in chosen]


@pytest.mark.parametrize(("num_ends", "count"), [(0, 8), (1, 8), (2, 12), (5, 24)])
def test_enough_candidates_for_every_beam_to_end_in_every_way(num_ends: int, count: int) -> None:
    assert num_candidates(4, num_ends) == count


def test_only_candidates_among_the_first_num_beams_may_finish() -> None:
    state = beams(2)
    running = state.advance(candidates(-1.0, -2.0, -3.0, -4.0), [False, True, True, False])
    assert tokens(running) == [0, 3]
    assert state.scores == [-1.0, -4.0]
    assert [one.candidate.token_id for one in state.finished] == [1]


def test_a_score_is_the_sum_over_a_power_of_the_length_with_its_end_token() -> None:
    state = beams(2, length_exponent=2.0, early_stopping="never")
    state.advance(candidates(-1.0, -2.0, -3.0), [False, True, False])
    state.advance(candidates(-1.5, -4.0, -5.0), [True, False, False])
    assert [(one.num_tokens, one.score) for one in state.finished] == [(2, -1.5 / 4), (1, -2.0)]


def test_the_last_token_finishes_every_beam() -> None:
    state = beams(2, max_tokens=1)
    assert state.advance(candidates(-1.0, -2.0, -3.0), [False, False, False]) == []
    assert state.done
    assert [one.candidate.token_id for one in state.finished] == [0, 1]


def test_better_beams_take_the_place_of_those_that_finished_before() -> None:
    state = beams(1, max_tokens=10, early_stopping="never")
    assert state.early_stopping is True, "one beam is a greedy search"
    state = beams(2, length_exponent=0.0, early_stopping="never")
    state.advance(candidates(-1.0, -5.0, -6.0, -7.0), [False, True, False, False])
    state.advance(candidates(-1.1, -5.5, -6.0, -7.0), [False, True, False, False])
    assert [one.score for one in state.finished] == [-5.0, -5.5]
    assert not state.done
    state.advance(candidates(-1.2, -1.3, -6.0, -7.0), [True, True, False, False])
    assert [one.score for one in state.finished] == [-1.2, -1.3]
    assert state.done, "what runs at -6 can only fall"


@pytest.mark.parametrize(
    ("early_stopping", "length_exponent", "done"),
    [
        (True, 1.0, True),  # two are complete: enough
        (False, 1.0, True),  # -4 / 2 is worse than -3 / 2
        ("never", 1.0, False),  # -4 / 10 would be better
        ("never", 0.0, True),  # a sum only falls
        ("never", -1.0, True),  # and the more so times its length
        (False, 0.0, True),
    ],
)
def test_when_a_search_is_settled(early_stopping: object, length_exponent: float, done: bool) -> None:
    state = beams(2, early_stopping=early_stopping, length_exponent=length_exponent)
    state.advance(candidates(-1.0, -1.5, -3.0, -4.0), [False, False, False, False])
    running = state.advance(candidates(-2.0, -3.0, -4.0, -5.0), [True, True, False, False])
    assert state.done is done
    assert tokens(running) == ([] if done else [2, 3])


def test_a_search_is_not_settled_while_beams_are_missing() -> None:
    state = beams(2, early_stopping=True)
    state.advance(candidates(-1.0, -9.0, -9.5, -9.6), [True, False, False, False])
    assert not state.done


def test_a_search_ends_where_no_candidate_runs_on() -> None:
    state = beams(3)
    assert state.advance(candidates(-1.0, -2.0), [True, True]) == []
    assert state.done
    assert len(state.finished) == 2


def test_of_equal_scores_the_one_that_was_complete_first_stays() -> None:
    state = beams(1, length_exponent=0.0)
    state.early_stopping = False
    state.advance(candidates(-1.0, -1.0), [True, False])
    first = state.finished
    state.advance(candidates(-1.0, -2.0), [True, False])
    assert state.finished == first


def test_a_search_that_is_cut_has_what_runs_beside_what_was_complete() -> None:
    state = beams(2, length_exponent=1.0)
    running = state.advance(candidates(-1.0, -4.0, -6.0), [False, True, False])
    state.cut(running)
    assert state.done
    assert [(one.candidate.token_id, one.score) for one in state.finished] == [(0, -1.0), (1, -4.0)]

"""SamplingParams: what is accepted, what is refused and by which name, and the seeds of the choices."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from ramet.engine.errors import InvalidInput, RametError
from ramet.engine.sampling_params import SamplingParams, derive_seed

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [0, -1, 129, 10**6, True, 1.0, "2", None]),
        ("temperature", [-1, -1e-9, NAN, INF, -INF, "0.5", True, None]),
        ("top_k", [-2, 1.5, "1", True, None]),
        ("top_p", [-0.1, 1.1, NAN, INF, "0.5", True, None]),
        ("seed", [2**64, -(2**63) - 1, 0.5, "7", True]),
        ("max_tokens", [0, -1, 1.5, True, "8"]),
        ("stop", ["", ["a", ""], ["a"] * 17, 7, [7], {"a"}, "\ud83d", b"a"]),
        ("stop_token_ids", [[-1], [True], [1.5], 7, "7", list(range(65))]),
        ("ignore_eos", [1, "true", None]),
        ("echo", [1, "true", None]),
        ("return_entropy", [0, "true", None]),
        ("logprobs", [-1, 21, True, 1.5]),
        ("prompt_logprobs", [-1, 21, True, 1.5, "1"]),
        ("min_p", [-0.1, 1.1, NAN, INF, 1e30, "0.5", True, None]),
        ("repetition_penalty", [-1, 0, 1e-8, 1e30, NAN, INF, "0.5", True, None]),
        ("presence_penalty", [-2.1, 2.1, 1e30, NAN, INF, -INF, "0.5", True, None]),
        ("frequency_penalty", [-2.1, 2.1, 1e30, NAN, INF, -INF, "0.5", True, None]),
        (
            "logit_bias",
            [{-1: 1}, {True: 1}, {"7": 1}, {1.5: 1}, {1: 101}, {1: NAN}, {1: True}, {1: "1"}, 7, [7]],
        ),
        ("logit_bias", [dict.fromkeys(range(1025), 0), "7", ((1, 2, 3),)]),
        ("allowed_token_ids", [[], [-1], [True], [1.5], 7, "7", range(2**16 + 1)]),
        ("banned_token_ids", [[-1], [True], [1.5], 7, "7", range(2**16 + 1)]),
        ("logprob_token_ids", [[-1], [True], [1.5], 7, "7", range(129)]),
        ("min_tokens", [-1, 65, True, 1.5, "1", None]),
    ],
)
def test_refused_values_name_the_field(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidInput) as caught:
            SamplingParams(**{field: value})
        assert caught.value.field == field
        assert str(caught.value).startswith(f"{field} must ")
        assert isinstance(caught.value, RametError)
        assert isinstance(caught.value, ValueError)


def test_message_names_the_limit_and_the_value() -> None:
    with pytest.raises(InvalidInput, match=r"^max_tokens must be >= 1, got 0$"):
        SamplingParams(max_tokens=0)
    with pytest.raises(InvalidInput, match=r"^n must be between 1 and 128, got 1000000$"):
        SamplingParams(n=10**6)


def test_message_stays_short_for_huge_values() -> None:
    with pytest.raises(InvalidInput) as caught:
        SamplingParams(stop=["", "x" * 10**6])
    assert len(str(caught.value)) < 200
    with pytest.raises(InvalidInput) as caught:
        SamplingParams(temperature="9" * 10**6)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 200


def test_accepted_extremes() -> None:
    SamplingParams(
        n=128, temperature=1e30, top_k=10**9, top_p=0, seed=2**64 - 1, max_tokens=None, logprobs=20
    )
    SamplingParams(temperature=1e-8, top_k=-1, top_p=1, seed=-(2**63), max_tokens=1, logprobs=0)


def test_numbers_become_pythons_own() -> None:
    """numpy's arithmetic overflows where Python's does not, in the middle of a step."""
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_p=Fraction(1, 2),  # type: ignore[arg-type]
        top_k=np.int64(4),  # type: ignore[arg-type]
        seed=np.int64(-7),  # type: ignore[arg-type]
        max_tokens=np.uint8(200),  # type: ignore[arg-type]
    )
    assert params == SamplingParams(temperature=0.5, top_p=0.5, top_k=4, seed=-7, max_tokens=200)
    numbers = (params.temperature, params.top_p, params.top_k, params.seed, params.max_tokens)
    assert [type(number) for number in numbers] == [float, float, int, int, int]


def test_what_contradicts_itself_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"^allowed_token_ids must hold a token that is not banned$"):
        SamplingParams(allowed_token_ids=[1, 2], banned_token_ids=[2, 1, 3])
    with pytest.raises(InvalidInput, match=r"^min_tokens must be between 0 and 4, got 5$"):
        SamplingParams(min_tokens=5, max_tokens=4)
    SamplingParams(min_tokens=5, max_tokens=None)


def test_temperature_beyond_a_float_is_refused() -> None:
    with pytest.raises(InvalidInput, match="temperature"):
        SamplingParams(temperature=10**400)


def test_stops_are_a_tuple_that_cannot_change() -> None:
    words = ["a", "b"]
    ids = [1, 2]
    params = SamplingParams(stop=words, stop_token_ids=ids)
    words.append("")
    ids.append(-1)
    assert params.stops == ("a", "b")
    assert params.stop_token_ids == (1, 2)
    assert SamplingParams(stop="x").stops == ("x",)
    assert SamplingParams().stops == ()
    biases = {3: 1.5, 1: -100}
    params = dataclasses.replace(params, logit_bias=biases, allowed_token_ids=[3, 1, 3], banned_token_ids=[1])
    biases[2] = float("nan")
    assert params.biases == ((1, -100.0), (3, 1.5))
    assert params.allowed_token_ids == (3, 1)
    hash(params)
    assert dataclasses.replace(params, n=2).stops == ("a", "b")


def test_each_choice_has_its_own_seed() -> None:
    seeds = [derive_seed(7, index) for index in range(128)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 128


def test_derived_seeds_of_neighbours_do_not_meet() -> None:
    seeds = {derive_seed(seed, index) for seed in range(-100, 100) for index in range(100)}
    assert len(seeds) == 200 * 100
    assert all(-100 <= seed < 2**64 for seed in seeds)

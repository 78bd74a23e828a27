"""Every field of BeamSearchParams has a limit, and its error names both."""

from __future__ import annotations

import math
from typing import Any

import pytest
from numpy import float32, int64

from ramet import BeamSearchParams, InvalidInput, SamplingParams
from ramet.engine.beam_params import SHARED_FIELDS

GIVEN = [name for name, field in BeamSearchParams.__dataclass_fields__.items() if field.init]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("num_beams", value) for value in (0, -1, 257, 10**6, 1.0, True, "4", None, math.nan)],
        *[("num_return_sequences", value) for value in (0, 5, -1, True, "1")],
        *[
            ("length_penalty", value)
            for value in (math.nan, math.inf, -math.inf, 10.5, -11, 10**400, "1", True)
        ],
        *[("early_stopping", value) for value in ("always", 1, 0, None, "", "Never")],
        *[("scoring", value) for value in ("", "HF", None, 1, ["hf"])],
        *[("max_tokens", value) for value in (0, -1, 1.5, True)],
        *[("min_tokens", value) for value in (-1, 65)],
        *[("repetition_penalty", value) for value in (0, math.nan, 101)],
        *[("presence_penalty", value) for value in (-3, math.nan)],
        *[("frequency_penalty", value) for value in (3, "x")],
        *[("logit_bias", value) for value in ({1: 101}, {-1: 0}, [1])],
        *[("allowed_token_ids", value) for value in ([-1], "1", [])],
        ("banned_token_ids", [1.5]),
        *[("stop", value) for value in ("", ["a"] * 17, 3)],
        *[("stop_token_ids", value) for value in ([-1], list(range(65)))],
        ("ignore_eos", 1),
        *[("logprobs", value) for value in (-1, 21)],
    ],
)
def test_a_bad_value_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidInput) as raised:
        BeamSearchParams(**{field: value})
    assert raised.value.field == field


def test_the_shared_fields_are_those_of_sampling() -> None:
    for name in SHARED_FIELDS:
        default = SamplingParams.__dataclass_fields__[name].default
        assert BeamSearchParams.__dataclass_fields__[name].default == default
    params = BeamSearchParams(stop="x", logit_bias={3: 1.0})
    assert params.tokens.stops == ("x",)
    assert params.tokens.biases == ((3, 1.0),)


def test_what_was_given_is_frozen_as_plain_values() -> None:
    stop, bias = ["a", "b"], {3: 1.0}
    numbers: dict[str, Any] = {
        "num_beams": int64(4),
        "num_return_sequences": int64(2),
        "length_penalty": float32(0.5),
    }
    params = BeamSearchParams(**numbers, stop=stop, logit_bias=bias)
    stop.append("c")
    bias[4] = 2.0
    assert params.stop == ("a", "b") and params.logit_bias == ((3, 1.0),)
    assert [type(value) for value in (params.num_beams, params.num_returned, params.length_penalty)] == [
        int,
        int,
        float,
    ]
    assert hash(params) == hash(BeamSearchParams(**{name: getattr(params, name) for name in GIVEN}))


def test_what_follows_from_the_fields() -> None:
    assert BeamSearchParams(num_beams=6).num_returned == 6
    assert BeamSearchParams(num_beams=6, num_return_sequences=2).num_returned == 2
    assert BeamSearchParams(length_penalty=0.5).length_exponent == 0.5
    assert BeamSearchParams(length_penalty=0.5, scoring="raw").length_exponent == 0.0

"""The text of a generation, forked in the middle. What it shows of a stream: test_stream_text.py."""

from __future__ import annotations

import pytest

from ramet import LLM, SamplingParams
from ramet.engine.growing_text import GrowingText
from ramet.engine.tokenizer import Tokenizer

pytestmark = pytest.mark.model
STOP = [33203, 23960, 57, 58]  # "DEF" "GH" "I" "J"


@pytest.fixture(scope="module")
def tokenizer(smollm2: LLM) -> Tokenizer:
    assert smollm2.tokenizer is not None
    return smollm2.tokenizer


def test_a_fork_goes_on_by_itself(tokenizer: Tokenizer) -> None:
    """Also in the middle of a character, and of what may become a stop string."""
    text = GrowingText(tokenizer, SamplingParams(stop="DEFGHIJ"))
    text.add(STOP[0])
    other = text.fork()
    assert [text.add(token_id) for token_id in STOP[1:]] == [None, None, "DEFGHIJ"]
    assert other.add(260) is None
    for byte in (10813, 230):  # two of the three tokens of an emoji
        other.add(byte)
    third = other.fork()
    assert third.add(131) is None
    assert (text.finish(), other.finish(), third.finish()) == (None, None, None)
    assert text.text == ""
    assert other.text == tokenizer.decode([STOP[0], 260, 10813, 230])
    assert third.text == tokenizer.decode([STOP[0], 260, 10813, 230, 131])


@pytest.mark.parametrize(("shown", "text"), [(False, " a"), (True, " aDEFGHIJ")])
def test_a_stop_string_ends_the_text(tokenizer: Tokenizer, shown: bool, text: str) -> None:
    growing = GrowingText(tokenizer, SamplingParams(stop="DEFGHIJ", include_stop_str_in_output=shown))
    assert [growing.add(token_id) for token_id in [253, *STOP]][-1] == "DEFGHIJ"
    assert growing.finish() is None
    assert growing.text == text.replace(" a", tokenizer.decode([253]))


def test_no_stop_string_is_looked_for_where_none_may_end_it(tokenizer: Tokenizer) -> None:
    growing = GrowingText(tokenizer, SamplingParams(stop="DEFGHIJ"), "before ")
    assert [growing.add(token_id, search=False) for token_id in STOP] == [None] * 4
    assert growing.text == "before DEFGHIJ"

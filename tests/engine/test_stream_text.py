"""Text through the engine: stop strings across tokens, characters across tokens, echo, and streams.

The models are scripted and the tokenizers a few words or bytes, so that each token's text is known.
"""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer as Backend, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ramet import LLM, InvalidInput
from ramet.testing import ScriptedModel, check_idle

PIECES = ["ABC", "DEF", "GH", "I", "J", "X", "DEFGHIJ", "</s>"]
ID = {piece: token_id for token_id, piece in enumerate(PIECES)}
END = ID["</s>"]


def word_tokenizer() -> PreTrainedTokenizerFast:
    backend = Backend(models.WordLevel(dict(ID), unk_token="X"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token="</s>"
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({piece: token_id for token_id, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend
    )


def saying(token_ids: list[int], prompt: list[int], tokenizer: PreTrainedTokenizerFast) -> LLM:
    """An engine that says these tokens after this prompt."""
    script = [*token_ids, END]
    size = len(tokenizer)
    model = ScriptedModel(lambda past: script[min(len(past) - len(prompt), len(token_ids))], size)
    return LLM(model, tokenizer, block_size=4, num_blocks=32)


def both_ways(llm: LLM, prompt: list[int], **settings: Any) -> tuple[str, list[int], object]:
    """(text, tokens, what ended it), the same streamed and not."""
    settings = {"temperature": 0, "max_tokens": 16, **settings}
    choice = llm.generate(prompt, **settings)[0].choices[0]
    deltas = list(llm.stream(prompt, **settings))
    assert "".join(delta.text for delta in deltas) == choice.text
    assert [token_id for delta in deltas for token_id in delta.token_ids] == choice.token_ids
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [choice.finish_reason]
    check_idle(llm)
    return choice.text, choice.token_ids, choice.stop_reason


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "reason"),
    [
        (["ABC", "DEF", "GH", "I", "J", "X"], ["DEFGHIJ"], "ABC", "DEFGHIJ"),
        (["ABC", "DEF", "GH", "X"], ["DEFGHIJ"], "ABCDEFGHX", END),
        (["ABC", "DEF", "GH"], ["DEFGHIJ"], "ABCDEFGH", END),
        (["ABC", "DEF", "GH", "I", "J"], ["GHI", "DEFGHIJ"], "ABCDEF", "GHI"),
        (["ABC", "DEF"], ["C"], "AB", "C"),
    ],
)
def test_g1_stop_strings_across_tokens(
    pieces: list[str], stops: list[str], text: str, reason: object
) -> None:
    prompt = [ID["X"]]
    llm = saying([ID[piece] for piece in pieces], prompt, word_tokenizer())
    assert both_ways(llm, prompt, stop=stops, stop_token_ids=[END])[::2] == (text, reason)


def test_g1_the_end_by_length_gives_what_was_held_back() -> None:
    prompt = [ID["X"]]
    llm = saying([ID["ABC"], ID["DEF"], ID["GH"], ID["I"]], prompt, word_tokenizer())
    assert both_ways(llm, prompt, stop="DEFGHIJ", max_tokens=3)[0] == "ABCDEFGH"


def test_g1_echo_is_not_searched_for_stop_strings() -> None:
    prompt = [ID["DEFGHIJ"], ID["DEF"], ID["GH"]]
    llm = saying([ID["I"], ID["J"], ID["ABC"], ID["DEFGHIJ"]], prompt, word_tokenizer())
    text, token_ids, reason = both_ways(llm, prompt, stop="DEFGHIJ", echo=True)
    assert text == "DEFGHIJDEFGHIJABC", "a stop string that begins in the prompt is none"
    assert (len(token_ids), reason) == (4, "DEFGHIJ")
    outputs = llm.generate(prompt, stop="DEFGHIJ", echo=True, n=2, seed=1, max_tokens=3)
    assert [choice.text for choice in outputs[0].choices] == ["DEFGHIJDEFGHIJABC"] * 2


def test_no_stop_string_is_looked_for_before_min_tokens() -> None:
    prompt = [ID["X"]]
    llm = saying([ID["ABC"], ID["ABC"], ID["X"], ID["ABC"], ID["X"]], prompt, word_tokenizer())
    assert both_ways(llm, prompt, stop="ABC")[0] == ""
    text, token_ids, reason = both_ways(llm, prompt, stop="ABC", min_tokens=2)
    assert (text, len(token_ids), reason) == ("ABCABCX", 4, "ABC")


@pytest.mark.parametrize("min_tokens", [1, 2, 3])
def test_a_stop_string_may_begin_before_min_tokens(min_tokens: int) -> None:
    prompt = [ID["X"]]
    said = [ID[word] for word in ("DEF", "GH", "I", "J", "X")]
    llm = saying(said, prompt, word_tokenizer())
    text, token_ids, reason = both_ways(llm, prompt, stop="DEFGHIJ", min_tokens=min_tokens)
    assert (text, len(token_ids), reason) == ("", 4, "DEFGHIJ")
    (beam,) = llm.beam_search(prompt, num_beams=1, max_tokens=5, stop="DEFGHIJ", min_tokens=min_tokens)
    assert beam.output is not None and beam.output.token_ids == said[:4]
    beam.release()
    # One that was complete before is none, also where a longer one goes on from it.
    text, token_ids, reason = both_ways(llm, prompt, stop=["FG", "EFGHIJ"], min_tokens=2)
    assert (text, len(token_ids), reason) == ("D", 4, "EFGHIJ")


def test_g1_bad_stops_are_refused() -> None:
    llm = saying([0], [1], word_tokenizer())
    for stop in ("", ["a", ""], ["a"] * 17):
        with pytest.raises(InvalidInput, match=r"^stop must"):
            llm.generate([1], stop=stop)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("🌶".encode(), "🌶"),
        ("中文字".encode(), "中文字"),
        (b" a" + "🌶".encode()[:2], " a\ufffd"),
        (b"\x80\x80\x80 world", "\ufffd\ufffd\ufffd world"),
        ("🌶".encode()[:2] + "🌶".encode() + b" world", "\ufffd🌶 world"),
    ],
)
def test_g2_characters_split_over_tokens(said: bytes, text: str) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    char_of = {byte: chr(byte) for byte in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    ids = [alphabet.index(char_of[byte]) for byte in said]
    llm = saying(ids, [1], byte_tokenizer())
    found, token_ids, _ = both_ways(llm, [1], max_tokens=len(ids))
    assert (found, token_ids) == (text, ids)


def test_a_stop_string_or_end_token_can_stay_in_the_text() -> None:
    script = [ID["ABC"], ID["DEF"], ID["GH"], ID["X"]]
    llm = saying(script, [0], word_tokenizer())
    keep: dict[str, Any] = {"include_stop_str_in_output": True, "stop_token_ids": [END]}
    assert both_ways(llm, [0], stop="FG", **keep) == ("ABCDEFG", script[:3], "FG")
    assert both_ways(llm, [0], **keep)[0] == "ABCDEFGHX"
    text, tokens, reason = both_ways(llm, [0], skip_special_tokens=False, **keep)
    assert (text, tokens, reason) == ("ABCDEFGHX</s>", [*script, END], END)
    hide: dict[str, Any] = {"skip_special_tokens": False, "stop_token_ids": [END]}
    assert both_ways(llm, [0], **hide)[0] == "ABCDEFGHX"
    assert both_ways(llm, [0], skip_special_tokens=False, max_tokens=5)[0] == "ABCDEFGHX</s>"

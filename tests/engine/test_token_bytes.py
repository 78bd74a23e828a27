"""The bytes of single tokens: of a byte-level vocabulary, of SentencePiece's spelling, of control tokens."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ramet import LLM
from ramet.engine.token_bytes import TokenBytes, byte_of
from ramet.engine.tokenizer import Tokenizer


def tokenizer_of(pieces: list[str], decoder: decoders.Decoder) -> Tokenizer:
    backend = Backend(models.WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token="?"))
    backend.decoder = decoder
    return Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")  # type: ignore[no-untyped-call]
    )


def test_the_byte_table_is_that_of_the_tokenizers() -> None:
    table = byte_of()
    assert set(table) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(table.values()) == list(range(256))


def test_a_byte_level_token_may_be_a_part_of_a_character() -> None:
    spelled = {byte: char for char, byte in byte_of().items()}
    parts = ["é"[:1].encode()[:1], "é".encode()[1:], b" world", b"\n"]
    pieces = ["?", *("".join(spelled[byte] for byte in part) for part in parts), "</s>"]
    lookup = TokenBytes(tokenizer_of(pieces, decoders.ByteLevel()))
    assert [lookup[index] for index in range(1, 5)] == parts
    assert lookup[5] == b"</s>"
    assert lookup[6] == b""


def test_sentencepiece_spells_spaces_and_rare_bytes() -> None:
    pieces = ["?", "\u2581world", "<0xF0>", "<0xf0>", "é", "</s>"]
    lookup = TokenBytes(tokenizer_of(pieces, decoders.Metaspace()))
    expected = [b"?", b" world", b"\xf0", b"<0xf0>", "é".encode(), b"</s>"]
    assert [lookup[index] for index in range(6)] == expected


def test_joined_they_are_the_text(smollm2: LLM) -> None:
    assert smollm2.tokenizer is not None
    lookup = TokenBytes(smollm2.tokenizer)
    text = "def f(x):\n\treturn 'chili \U0001f336' # 中文\n"
    assert b"".join(lookup[token_id] for token_id in smollm2.encode(text)).decode() == text
    assert lookup[2] == b"<|im_end|>"

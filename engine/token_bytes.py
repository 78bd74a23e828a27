"""The bytes that one token stands for: what log-probabilities are labelled with.

A decoder cannot say it: it turns a part of a character into U+FFFD, and some drop a leading space.
"""

from __future__ import annotations

import re
from functools import cache

from ramet.engine.tokenizer import Tokenizer

_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")  # how SentencePiece spells a byte that is in no other piece
_SPACE = "\u2581"  # and a space


class TokenBytes:
    """Token id -> bytes, for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._byte_level = tokenizer.is_byte_level

    def __getitem__(self, token_id: int) -> bytes:
        """Empty for an id that stands for nothing."""
        piece = self._tokenizer.piece(token_id)
        if piece is None:
            return b""
        if token_id in self._tokenizer.added_ids:
            return piece.encode()
        if self._byte_level:
            table = byte_of()
            if all(char in table for char in piece):
                return bytes(table[char] for char in piece)
        elif match := _FALLBACK.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace(_SPACE, " ").encode()


@cache
def byte_of() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies, as GPT-2 defined them: printable
    Latin-1 stands for itself, and the other bytes, in order, for the characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table

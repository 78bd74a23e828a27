"""Token ids as bytes: four bytes a token, little endian, so that comparing prefixes is one memcmp."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

TOKEN_BYTES = 4
_NATIVE = "I" if array("I").itemsize == TOKEN_BYTES else "L"


def pack(token_ids: Iterable[int]) -> bytes:
    """Pack token ids (0 <= id < 2**32) into bytes. O(n); done once a request.

    Raises OverflowError for an id outside that range and TypeError for one that is not an integer.
    """
    packed = array(_NATIVE, token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack(data: bytes | bytearray | memoryview) -> list[int]:
    """The token ids that `pack` was given. O(n)."""
    packed = array(_NATIVE)
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


def common_tokens(a: bytes | bytearray, a_start: int, b: bytes | bytearray, b_start: int, most: int) -> int:
    """How many whole tokens, `most` at the most, agree from byte `a_start` of a and byte `b_start` of b."""
    count = 0
    while count < most:
        i, j = a_start + TOKEN_BYTES * count, b_start + TOKEN_BYTES * count
        if a[i : i + TOKEN_BYTES] != b[j : j + TOKEN_BYTES]:
            break
        count += 1
    return count

"""Token ids as bytes."""

from __future__ import annotations

import struct
import sys

import pytest
from hypothesis import given, strategies as st

from ramet.radix.tokens import TOKEN_BYTES, common_tokens, pack, unpack

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(ids=IDS)
def test_four_bytes_a_token_little_endian(ids: list[int]) -> None:
    assert pack(ids) == struct.pack(f"<{len(ids)}I", *ids)
    assert unpack(pack(ids)) == unpack(bytearray(pack(ids))) == unpack(memoryview(pack(ids))) == ids


def test_the_other_byte_order_is_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [1, 0xA1B2C3D4]
    here = struct.pack("=2I", *ids)
    monkeypatch.setattr(sys, "byteorder", "big")
    swapped = b"".join(here[i : i + TOKEN_BYTES][::-1] for i in (0, TOKEN_BYTES))
    assert pack(ids) == swapped
    assert unpack(swapped) == ids


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_ids_outside_32_bits_are_refused(bad: int) -> None:
    with pytest.raises(OverflowError):
        pack([bad])


def test_what_is_no_integer_is_refused() -> None:
    with pytest.raises(TypeError):
        pack(["1"])  # type: ignore[list-item]


@given(a=st.lists(st.integers(0, 2), max_size=9), b=st.lists(st.integers(0, 2), max_size=9), data=st.data())
def test_common_tokens(a: list[int], b: list[int], data: st.DataObject) -> None:
    i, j = data.draw(st.integers(0, len(a))), data.draw(st.integers(0, len(b)))
    most = min(len(a) - i, len(b) - j)
    same = [x == y for x, y in zip(a[i:], b[j:], strict=False)]
    expected = [*same, False].index(False)
    assert common_tokens(pack(a), i * TOKEN_BYTES, pack(b), j * TOKEN_BYTES, most) == expected

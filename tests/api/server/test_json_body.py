"""Bodies that are not quite JSON."""

from __future__ import annotations

import pytest

from ramet.api.server.errors import ApiError
from ramet.api.server.json_body import MAX_DEPTH, parse


def nested(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b"\xff\xfe{}",
        "{}".encode("utf-16"),
        b'{"a": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        nested(MAX_DEPTH + 2),
        b"[" * (MAX_DEPTH + 2) + b"]" * (MAX_DEPTH + 2),
        b'{"a": 1e400}',
        b"[-1e999]",
    ],
)
def test_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse(body)
    assert (caught.value.status_code, caught.value.code) == (400, "invalid_json")


def test_depth_up_to_the_limit_is_fine() -> None:
    parse(nested(MAX_DEPTH))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"a": {"b": ["x", "\\ud83d"]}}', "a.b.1"),
        (b'{"a": "\\uDE00"}', "a"),
        (b'{"\\ud83d": 1}', "body"),
        (b'["\\ud83d"]', "0"),
    ],
)
def test_a_lone_surrogate_is_found_and_named(body: bytes, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(body)
    assert (caught.value.status_code, caught.value.param) == (400, param)


def test_a_pair_is_a_character() -> None:
    assert parse(b'{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}

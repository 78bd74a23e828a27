"""Checks of plain values that come from outside. Each raises InvalidInput, naming the field and its limit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from ramet.engine.errors import InvalidInput


def check_int(field: str, value: object, low: int, high: int | None) -> None:
    """A whole number from `low` to `high`, both included; None is no upper end."""
    limit = f"must be >= {low}" if high is None else f"must be between {low} and {high}"
    # A bool is an int to Python, and never what a caller means here.
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidInput(field, f"must be a whole number, and {limit.removeprefix('must be ')}", value)
    if int(value) < low or (high is not None and int(value) > high):
        raise InvalidInput(field, limit, value)


def check_float(field: str, value: object, low: float, high: float) -> None:
    """A finite number from `low` to `high`, both included."""
    limit = (
        f"must be a finite number >= {low:g}" if high == math.inf else f"must be between {low:g} and {high:g}"
    )
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidInput(field, limit, value)
    try:
        number = float(value)
    except OverflowError:  # An int can be larger than any float.
        number = math.inf
    # Written so that NaN, which compares false with everything, is refused too.
    if not (low <= number <= high and math.isfinite(number)):
        raise InvalidInput(field, limit, value)


def check_bool(field: str, value: object) -> None:
    """True or false, and not 1 or 0."""
    if not isinstance(value, bool):
        raise InvalidInput(field, "must be true or false", value)


def check_hashable(field: str, value: object) -> None:
    """Something that can be a key; a tuple that holds a list cannot."""
    try:
        hash(value)
    except TypeError:
        raise InvalidInput(field, "must be hashable", value) from None


def plain(value: object) -> Any:
    """An array or a number of numpy or torch as Python's own lists and numbers; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, type) else value


def checked_list(field: str, value: object, what: str) -> list[Any]:
    """Any iterable as a list, but a text, bytes or a mapping: their items are not what a caller means."""
    value = plain(value)
    if isinstance(value, (str, bytes, bytearray, Mapping)) or not isinstance(value, Iterable):
        raise InvalidInput(field, f"must be a list of {what}", value)
    return list(value)


def checked_strings(field: str, value: object, most: int) -> tuple[str, ...]:
    """One text or up to `most`, none of them empty; None is none."""
    if value is None:
        return ()
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise InvalidInput(field, "must be a string or a list of strings", value)
    if len(texts) > most:
        raise InvalidInput(field, f"must hold at most {most} strings, got {len(texts)}")
    for text in texts:
        if not text:
            raise InvalidInput(field, "must not hold an empty string")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise InvalidInput(field, "must be valid Unicode, without lone surrogates") from None
    return tuple(texts)


def checked_ids(field: str, value: object, most: int) -> tuple[int, ...]:
    """Up to `most` token ids, each once, in the order given; None is none.

    Their upper end is the model's vocabulary, which the engine knows and checks.
    """
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise InvalidInput(field, "must be a list of token ids", value)
    if len(value) > most:
        raise InvalidInput(field, f"must hold at most {most} ids, got {len(value)}")
    for token_id in value:
        check_int(field, token_id, 0, None)
    return tuple(dict.fromkeys(map(int, value)))


def checked_biases(field: str, value: object, most: int, bound: float) -> tuple[tuple[int, float], ...]:
    """Up to `most` (token id, bias) pairs out of a mapping, or out of such pairs; None is none."""
    if value is None:
        return ()
    pairs: object = tuple(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, tuple) or not all(isinstance(p, tuple) and len(p) == 2 for p in pairs):
        raise InvalidInput(field, "must be a mapping of token ids to biases", value)
    if len(pairs) > most:
        raise InvalidInput(field, f"must hold at most {most} tokens, got {len(pairs)}")
    for token_id, bias in pairs:
        check_int(field, token_id, 0, None)
        check_float(field, bias, -bound, bound)
    return tuple(sorted({int(token_id): float(bias) for token_id, bias in pairs}.items()))

"""How the tokens of one request are chosen and when it ends: plain values, checked when they are made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from ramet.engine.errors import InvalidInput

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
_MIN_SEED, _MAX_SEED = -(2**63), 2**64 - 1
_MASK = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Raises InvalidInput, which names the field and its limit, for any value outside of what is said here.

    Attributes:
        n: how many choices to make from one prompt, 1 to 128.
        temperature: divides the logits; 0 takes the likeliest token always.
        top_k: choose among the k likeliest tokens; 0, -1 and anything from the vocabulary's size on mean all.
        top_p: choose among the fewest likeliest tokens that hold this share of the probability (after top_k),
            at least one; 0 takes the likeliest token always.
        seed: 64 bits; the same seed gives the same tokens, whatever else runs. None leaves it to the engine.
        max_tokens: how many tokens to generate at most; None is up to the context limit.
        stop: texts that end a choice, and are cut off; one or up to 16. A tuple once the object is made.
        stop_token_ids: tokens that end a choice, beside the model's own; up to 64.
        ignore_eos: go on past the model's own end tokens.
        logprobs: how many of the likeliest tokens to report with each token, 0 to 20; None reports none.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 64
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Check every field, and freeze the two that may come as lists."""
        _check_int("n", self.n, 1, MAX_CHOICES)
        _check_float("temperature", self.temperature, 0.0, math.inf)
        _check_int("top_k", self.top_k, -1, None)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, _MIN_SEED, _MAX_SEED)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, None)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidInput("ignore_eos", "must be true or false", self.ignore_eos)
        # A caller's list could change after it was checked.
        object.__setattr__(self, "stop", _checked_stops(self.stop))
        object.__setattr__(self, "stop_token_ids", _checked_ids(self.stop_token_ids))

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, as the tuple that ``stop`` has become."""
        assert isinstance(self.stop, tuple), "made a tuple when the object was made"
        return self.stop


def derive_seed(seed: int, index: int) -> int:
    """A seed for the index-th of several streams that come from one seed; index 0 is the seed itself."""
    if index == 0:
        return seed
    # Two rounds, so that neither neighbouring seeds nor neighbouring indices give related streams.
    return _mix64(_mix64(seed & _MASK) + index * 0x9E3779B97F4A7C15)


def _mix64(x: int) -> int:
    """The finaliser of splitmix64: a bijection of 64 bits in which every bit depends on all."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _check_int(field: str, value: object, low: int, high: int | None) -> None:
    limit = f"must be >= {low}" if high is None else f"must be between {low} and {high}"
    # A bool is an int to Python, and never what a caller means here.
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidInput(field, f"must be a whole number, and {limit.removeprefix('must be ')}", value)
    if int(value) < low or (high is not None and int(value) > high):
        raise InvalidInput(field, limit, value)


def _check_float(field: str, value: object, low: float, high: float) -> None:
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


def _checked_stops(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, Sequence) or not all(isinstance(text, str) for text in stops):
        raise InvalidInput("stop", "must be a string or a list of strings", stop)
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidInput("stop", f"must hold at most {MAX_STOP_STRINGS} strings, got {len(stops)}")
    for text in stops:
        if not text:
            raise InvalidInput("stop", "must not hold an empty string")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise InvalidInput("stop", "must be valid Unicode, without lone surrogates") from None
    return tuple(stops)


def _checked_ids(token_ids: object) -> tuple[int, ...]:
    if token_ids is None:
        return ()
    if isinstance(token_ids, (str, bytes)) or not isinstance(token_ids, Sequence):
        raise InvalidInput("stop_token_ids", "must be a list of token ids", token_ids)
    if len(token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidInput(
            "stop_token_ids", f"must hold at most {MAX_STOP_TOKEN_IDS} ids, got {len(token_ids)}"
        )
    for token_id in token_ids:
        # The upper end is the model's vocabulary, which the engine knows and checks.
        _check_int("stop_token_ids", token_id, 0, None)
    return tuple(int(token_id) for token_id in token_ids)

"""How the tokens of one request are chosen and when it ends: plain values, checked when they are made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ramet.engine.checks import (
    check_bool,
    check_float,
    check_int,
    checked_biases,
    checked_ids,
    checked_strings,
)
from ramet.engine.errors import InvalidInput

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
MAX_NAMED_TOKENS = 128  # whose log-probabilities are reported at each place
MAX_BIASES = 1024
MAX_LISTED_TOKENS = 1 << 16  # allowed or banned
MAX_BIAS = 100.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
MAX_PENALTY = 2.0
_MIN_SEED, _MAX_SEED = -(2**63), 2**64 - 1
_MASK = 2**64 - 1
_WHOLE = ("n", "best_of", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
_REAL = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
)  # fmt: skip
_FLAGS = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "echo", "return_entropy")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Raises InvalidInput, which names the field and its limit, for any value outside of what is said here.

    Attributes:
        n: how many choices to make from one prompt, 1 to 128.
        best_of: how many to make of which the n best are returned, best first, n to 128; None is n. One that
            cannot be among them any more is cancelled. The choices cannot be read while they come.
        best_by: which are best, by the "mean" of their tokens' log-probabilities or by "cumulative", the sum.
        temperature: divides the logits; 0 takes the likeliest token always.
        top_k: choose among the k likeliest tokens; 0, -1 and anything from the vocabulary's size on mean all.
        top_p: choose among the fewest likeliest tokens that hold this share of the probability (after top_k),
            at least one; 0 takes the likeliest token always.
        min_p: choose among the tokens that are at least this share as likely as the likeliest (at this
            temperature, after top_p); 0 is off.
        repetition_penalty: divides the positive and multiplies the negative logits of tokens that the branch
            holds, prompt and output; 1 is off, 0.01 to 100.
        presence_penalty: taken from the logits of tokens that this generation has made; 0 is off, -2 to 2.
        frequency_penalty: the same, as many times as it has made them; 0 is off, -2 to 2.
        logit_bias: token id -> what is added to its logit, -100 to 100, for up to 1024 tokens. A tuple of
            pairs once the object is made.
        allowed_token_ids: only these can be chosen, up to 65536; None is all.
        banned_token_ids: these cannot be chosen, up to 65536.
        seed: 64 bits; the same seed gives the same tokens, whatever else runs. None leaves it to the engine.
        max_tokens: how many tokens to generate at most; None is up to the context limit.
        min_tokens: nothing ends a choice before it has this many tokens: end and stop tokens cannot be
            chosen, and stop strings that are complete are none; one that only begins there may end it later.
        stop: texts that end a choice, and are cut off; one or up to 16. A tuple once the object is made.
        stop_token_ids: tokens that end a choice, beside the model's own; up to 64.
        ignore_eos: go on past the model's own end tokens.
        skip_special_tokens: leave control tokens out of the text.
        include_stop_str_in_output: leave the stop string, or the token, that ended a choice in its text.
        echo: let the text begin with that of the prompt; it is not searched for stop strings.
        logprobs: how many of the likeliest tokens to report with each token, 0 to 20; None reports none.
        prompt_logprobs: the same for the tokens of the prompt. 0 reports each token's own, which is kept with
            the cached prefix once it is known; for more the prompt runs again.
        logprob_token_ids: tokens whose log-probabilities to report with each token, up to 128.
        return_entropy: report the entropy, in nats, of the distribution that each token was chosen from.

    Log-probabilities and entropy are those of the model: before biases, penalties, temperature and filters.
    """

    n: int = 1
    best_of: int | None = None
    best_by: Literal["mean", "cumulative"] = "mean"
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = None
    allowed_token_ids: Sequence[int] | None = None
    banned_token_ids: Sequence[int] = ()
    seed: int | None = None
    max_tokens: int | None = 64
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    echo: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] = ()
    return_entropy: bool = False

    def __post_init__(self) -> None:
        """Check every field, and freeze those that may come as lists or mappings."""
        check_int("n", self.n, 1, MAX_CHOICES)
        if self.best_of is not None:
            check_int("best_of", self.best_of, int(self.n), MAX_CHOICES)
        if self.best_by not in ("mean", "cumulative"):
            raise InvalidInput("best_by", 'must be "mean" or "cumulative"', self.best_by)
        check_float("temperature", self.temperature, 0.0, math.inf)
        check_int("top_k", self.top_k, -1, None)
        check_float("top_p", self.top_p, 0.0, 1.0)
        check_float("min_p", self.min_p, 0.0, 1.0)
        least, most = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        check_float("repetition_penalty", self.repetition_penalty, least, most)
        check_float("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        check_float("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        if self.seed is not None:
            check_int("seed", self.seed, _MIN_SEED, _MAX_SEED)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, None)
        check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        for field in ("logprobs", "prompt_logprobs"):
            if getattr(self, field) is not None:
                check_int(field, getattr(self, field), 0, MAX_LOGPROBS)
        for field in _FLAGS:
            check_bool(field, getattr(self, field))
        self._freeze()

    def _freeze(self) -> None:
        """Check and copy what a caller could change after it was checked."""
        frozen: dict[str, Any] = {
            "stop": checked_strings("stop", self.stop, MAX_STOP_STRINGS),
            "stop_token_ids": checked_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS),
            "logit_bias": checked_biases("logit_bias", self.logit_bias, MAX_BIASES, MAX_BIAS),
            "banned_token_ids": checked_ids("banned_token_ids", self.banned_token_ids, MAX_LISTED_TOKENS),
            "logprob_token_ids": checked_ids("logprob_token_ids", self.logprob_token_ids, MAX_NAMED_TOKENS),
        }
        if self.allowed_token_ids is not None:
            frozen["allowed_token_ids"] = allowed = checked_ids(
                "allowed_token_ids", self.allowed_token_ids, MAX_LISTED_TOKENS
            )
            if not set(allowed) - set(frozen["banned_token_ids"]):
                raise InvalidInput("allowed_token_ids", "must hold a token that is not banned")
        # Numbers may have come as numpy's, whose arithmetic overflows where Python's does not.
        for fields, kind in ((_WHOLE, int), (_REAL, float)):
            given = {field: getattr(self, field) for field in fields}
            frozen |= {field: kind(value) for field, value in given.items() if value is not None}
        for field, value in frozen.items():
            object.__setattr__(self, field, value)

    @property
    def num_sampled(self) -> int:
        """How many choices are made, returned or not."""
        return self.n if self.best_of is None else self.best_of

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, as the tuple that ``stop`` has become."""
        assert isinstance(self.stop, tuple), "made a tuple when the object was made"
        return self.stop

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """(token id, bias) by id, as the tuple that ``logit_bias`` has become."""
        assert isinstance(self.logit_bias, tuple), "made a tuple when the object was made"
        return self.logit_bias


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

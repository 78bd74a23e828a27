"""What comes back from the engine: choices, outputs, scores, and pieces of a stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ramet.engine.sampler import Draw, TokenLogprob

FinishReason = Literal["stop", "length", "abort"]


@dataclass
class Choice:
    """One generated continuation.

    `token_ids` holds every generated token, also those of a stop string, which `text` leaves out.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)  # natural log, one for each token
    logprobs: list[list[TokenLogprob]] | None = None  # the likeliest tokens at each place, if asked for
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the token id or the string that ended it
    named_logprobs: list[list[TokenLogprob]] | None = None  # of the tokens named, at each place, if any are
    entropies: list[float] | None = None  # nats, of the model's distribution at each place, if asked for

    def add(self, draw: Draw) -> None:
        """Append a token with what is reported of it; the text is the caller's."""
        self.token_ids.append(draw.token_id)
        self.token_logprobs.append(draw.logprob)
        if self.logprobs is not None and draw.top is not None:
            self.logprobs.append(draw.top)
        if self.named_logprobs is not None and draw.named is not None:
            self.named_logprobs.append(draw.named)
        if self.entropies is not None and draw.entropy is not None:
            self.entropies.append(draw.entropy)

    @property
    def cumulative_logprob(self) -> float:
        return sum(self.token_logprobs)

    @property
    def mean_logprob(self) -> float:
        """Log-probability a token; 0 before the first."""
        return self.cumulative_logprob / len(self.token_logprobs) if self.token_logprobs else 0.0


@dataclass
class Output:
    """A prompt and what was generated from it."""

    prompt_token_ids: list[int]
    num_cached_tokens: int  # of the prompt, found in the cache; at most one less than there are
    choices: list[Choice]
    # For each token of the prompt the likeliest tokens there, its own among them; None for the first, and for
    # all if nothing was asked for.
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None


@dataclass(frozen=True)
class Score:
    """How likely one continuation of a branch is."""

    token_ids: list[int]
    token_logprobs: list[float]  # natural log, one for each token
    is_greedy: bool  # whether each token is the likeliest one at its place
    first_logit: float  # of the first token, as the model gave it

    @property
    def logprob(self) -> float:
        return sum(self.token_logprobs)

    @property
    def mean_logprob(self) -> float:
        return self.logprob / len(self.token_logprobs)


@dataclass(frozen=True)
class Delta:
    """A piece of a stream: joined, the pieces of one index are its choice; see Choice.

    The first piece that a prompt gives has its log-probabilities, if they were asked for; see Output. The
    last one of a choice has its finish_reason, and may have no token.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    prompt_index: int = 0  # which prompt, or branch, of those that were asked for in one call
    stop_reason: int | str | None = None
    token_logprobs: list[float] = field(default_factory=list)  # one for each token
    logprobs: list[list[TokenLogprob]] | None = None
    named_logprobs: list[list[TokenLogprob]] | None = None
    entropies: list[float] | None = None

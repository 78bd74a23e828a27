"""Chooses the next token of every row from its logits.

The order is that of vLLM and transformers: biases and forbidden tokens, penalties (adjust.py), temperature,
top_k, top_p, min_p. Each filter sees the distribution that the ones before it left.

A row's result depends on its own logits, settings, seed and position alone: never on the other rows, nor on
what was drawn before. It keeps no state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ramet.engine.adjust import Adjustment, adjusted
from ramet.engine.errors import BadLogits

# Below these a draw could not tell the likeliest token from certainty, and exp() would only see 0 and 1.
_GREEDY_TEMPERATURE = 1e-5
_GREEDY_TOP_P = 1e-7
_RUN = 256  # tokens that are accumulated one by one
_GAMMA = np.uint64(0x9E3779B97F4A7C15)


class RowSampling(NamedTuple):
    """How one row is sampled."""

    temperature: float  # 0 is greedy
    top_k: int  # 0, -1 or at least the vocabulary's size is off
    top_p: float  # 0 is greedy, 1 is off
    seed: int  # of the branch's own random stream
    position: int  # of the token to be drawn, in the branch: which number of the stream is used
    logprobs: int | None = None  # how many of the likeliest tokens to report; None is none
    min_p: float = 0.0  # 0 is off
    adjustment: Adjustment | None = None  # None is none
    named: tuple[int, ...] = ()  # tokens whose log-probabilities to report
    entropy: bool = False  # whether to report that of the raw distribution

    @property
    def is_greedy(self) -> bool:
        """Whether only the likeliest token can come out."""
        return self.temperature < _GREEDY_TEMPERATURE or self.top_p < _GREEDY_TOP_P or self.top_k == 1


class TokenLogprob(NamedTuple):
    """A token and the log of its probability before temperature and filters."""

    token_id: int
    logprob: float


class Draw(NamedTuple):
    """What came out of one row; log-probabilities and entropy are those of the raw logits."""

    token_id: int
    logprob: float
    top: list[TokenLogprob] | None = None  # likeliest first; the chosen token is always among them
    named: list[TokenLogprob] | None = None  # in the order in which they were named
    entropy: float | None = None  # nats


class Sampled(NamedTuple):
    """One entry for each row; see Draw."""

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[list[TokenLogprob] | None]
    named_logprobs: list[list[TokenLogprob] | None]
    entropies: list[float | None]

    def draws(self) -> list[Draw]:
        """The same, row by row."""
        return [Draw(*row) for row in zip(*self, strict=True)]


def sample(logits: Tensor, rows: Sequence[RowSampling]) -> Sampled:
    """Choose a token for each row.

    logits: [R, V], any float dtype. rows: R settings, in the order of the logits.
    Raises BadLogits, which names the rows, where a row holds NaN, +inf, or no finite token that is allowed.
    """
    assert logits.ndim == 2 and logits.shape[0] == len(rows), "one row of logits for each row of settings"
    if not rows:
        return Sampled([], [], [], [], [])
    raw_logits = logits.float()  # [R, V]
    logits = adjusted(raw_logits, [row.adjustment for row in rows])
    if logits is not raw_logits:
        _check_finite(raw_logits.amax(dim=-1))  # a ban could hide it
    token_ids = _likeliest(logits)  # [R]
    _check_finite(logits.gather(1, token_ids[:, None])[:, 0])
    drawn = [index for index, row in enumerate(rows) if not row.is_greedy]
    if len(drawn) == len(rows):
        token_ids = _draw(logits, rows)
    elif drawn:
        index = torch.tensor(drawn, device=logits.device)
        token_ids[index] = _draw(logits[index], [rows[i] for i in drawn])
    raw = torch.log_softmax(raw_logits, dim=-1)  # [R, V]
    chosen = raw.gather(1, token_ids[:, None])[:, 0].tolist()
    ids: list[int] = token_ids.tolist()
    top = [
        None if row.logprobs is None else top_logprobs(raw[i], row.logprobs, ids[i])
        for i, row in enumerate(rows)
    ]
    return Sampled(ids, chosen, top, _named_logprobs(raw, rows), _entropies(raw, rows))


def logprobs_of(logits: Tensor, token_ids: Sequence[int]) -> list[float]:
    """The log-probability of token i in row i of logits [R, V]. Raises BadLogits where there is none."""
    if not token_ids:
        return []
    logprobs = torch.log_softmax(logits.float(), dim=-1)  # [R, V]
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0].tolist()
    bad = tuple(index for index, logprob in enumerate(chosen) if math.isnan(logprob))
    if bad:
        raise BadLogits(bad)
    return chosen


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Numbers in [0, 1) with 53 random bits, each a function of its own seed and position alone.

    Each seed has a splitmix64 generator with a start and a step of its own, read at any position.
    """
    keys = np.array([seed & (2**64 - 1) for seed in seeds], dtype=np.uint64)
    steps = np.array(positions, dtype=np.uint64) + np.uint64(1)
    with np.errstate(over="ignore"):  # Arithmetic modulo 2**64 is what is meant.
        start = _mix64(keys + _GAMMA)
        step = _mix64(start ^ _GAMMA) | np.uint64(1)
        bits = _mix64(start + step * steps)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix64(x: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """The finaliser of splitmix64, for a whole array; the caller silences the overflow."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _draw(logits: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    """Token ids [F] for the rows that are drawn at random; logits [F, V] fp32.

    The inverse of the cumulative distribution, in the order of the vocabulary: first the run of tokens that
    the target falls into, then the token. Accumulating a whole vocabulary took longer than all else here.
    """
    weights = _weights(logits, rows)  # [F, V] fp32, the likeliest token has 1
    vocab_size = logits.shape[1]
    filtered = [i for i, row in enumerate(rows) if row.top_p < 1.0 or 0 < row.top_k < vocab_size]
    if filtered:
        at = torch.tensor(filtered, device=logits.device)
        weights[at] *= _kept(logits[at], [rows[i] for i in filtered])
    if any(row.min_p for row in rows):
        # The likeliest token has weight 1, whatever the filters have taken from the others.
        weights *= weights >= _column(weights, [row.min_p for row in rows])
    number = uniforms([row.seed for row in rows], [row.position for row in rows])
    if vocab_size % _RUN:
        weights = F.pad(weights, (0, -vocab_size % _RUN))
    runs = weights.view(len(rows), -1, _RUN)  # [F, V / 256, 256]
    ends = runs.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)  # [F, V / 256]
    target = torch.from_numpy(number).to(logits.device)[:, None] * ends[:, -1:]  # [F, 1]
    run = _first_beyond(ends, target)  # [F, 1]
    start = torch.where(run > 0, ends.gather(1, (run - 1).clamp_min(0)), 0.0)
    inside = runs.gather(1, run[..., None].expand(-1, -1, _RUN))[:, 0]  # [F, 256]
    token = _first_beyond(inside.cumsum(dim=-1, dtype=torch.float64), target - start)
    return (run * _RUN + token)[:, 0]


def _first_beyond(cumulative: Tensor, target: Tensor) -> Tensor:
    """The first place [F, 1] where `cumulative` [F, N] exceeds the target [F, 1]: never one without weight.

    Rounding may lift the target to the total or beyond; then it is the last place that has any weight.
    """
    total = cumulative[:, -1:]
    target = torch.minimum(target, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True)


def _weights(logits: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    """exp((logits - highest) / temperature), [F, V] fp32: no temperature can make it overflow."""
    # Of what fp32 cannot hold, infinity, a forbidden token's weight would be no number.
    hottest = torch.finfo(logits.dtype).max
    temperature = _column(logits, [min(row.temperature, hottest) for row in rows])
    return (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature).exp_()


def _kept(logits: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    """Which tokens stay, bools [F, V]: the top_k likeliest, of those the fewest that hold top_p."""
    num_kept, threshold = _threshold(logits, rows)
    kept = logits >= threshold
    if bool((kept.sum(dim=-1, keepdim=True) == num_kept).all()):
        return kept
    # Several tokens have the lowest logit that stays: of those, the lowest ids stay.
    above = logits > threshold
    equal = logits == threshold
    return above | (equal & (equal.cumsum(dim=-1) <= num_kept - above.sum(dim=-1, keepdim=True)))


def _threshold(logits: Tensor, rows: Sequence[RowSampling]) -> tuple[Tensor, Tensor]:
    """How many tokens of each row stay, int64 [F, 1], and the lowest logit among them, [F, 1]."""
    vocab_size = logits.shape[1]
    top_k = [row.top_k if 0 < row.top_k < vocab_size else vocab_size for row in rows]
    # A row's sorted values, unlike its sorted ids, are the same for any width, so other rows cannot change
    # them.
    values = _sorted(logits)[:, : max(top_k)]  # [F, width], descending
    limit = torch.tensor(top_k, device=logits.device)[:, None]  # [F, 1]
    mass = _weights(values, rows).cumsum(dim=-1, dtype=torch.float64)
    share = torch.tensor([row.top_p for row in rows], dtype=torch.float64, device=logits.device)[:, None]
    wanted = mass.gather(1, limit - 1) * share
    num_kept = torch.where(share < 1.0, (mass < wanted).sum(dim=-1, keepdim=True) + 1, limit)
    return num_kept, values.gather(1, num_kept - 1)


def _likeliest(logits: Tensor) -> Tensor:
    """The id of each row's highest logit [R, V] -> [R], the lowest where several are equal."""
    if logits.device.type == "cpu":  # numpy finds it with vector instructions, 7 times faster than torch
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def _sorted(logits: Tensor) -> Tensor:
    """The logits [F, V] of each row in descending order."""
    if (
        logits.device.type == "cpu"
    ):  # numpy sorts floats with vector instructions, 15 times faster than torch.
        return torch.from_numpy(-np.sort(-logits.numpy(), axis=-1))
    return logits.sort(dim=-1, descending=True).values


def _column(like: Tensor, values: list[float]) -> Tensor:
    """The numbers as a column [F, 1] with the dtype and device of ``like``."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _check_finite(highest: Tensor) -> None:
    """Raise BadLogits for rows whose highest logit [R] is NaN or infinite: no token can be chosen there."""
    bad = (~torch.isfinite(highest)).nonzero()[:, 0].tolist()
    if bad:
        raise BadLogits(tuple(bad))


def top_logprobs(logprobs: Tensor, count: int, chosen: int) -> list[TokenLogprob]:
    """The ``count`` likeliest tokens of one row [V], ties by id, then the chosen one if it is not there."""
    count = min(count, logprobs.shape[0])
    top: list[TokenLogprob] = []
    if count:
        lowest = logprobs.topk(count).values[-1]
        ids = (logprobs >= lowest).nonzero()[:, 0]
        pairs = zip(ids.tolist(), logprobs[ids].tolist(), strict=True)
        top = [TokenLogprob(*pair) for pair in sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:count]]
    if all(token.token_id != chosen for token in top):
        top.append(TokenLogprob(chosen, float(logprobs[chosen])))
    return top


def _named_logprobs(raw: Tensor, rows: Sequence[RowSampling]) -> list[list[TokenLogprob] | None]:
    """The log-probabilities [R, V] of the tokens that each row names, read in one go."""
    naming = [(index, row.named) for index, row in enumerate(rows) if row.named]
    found: list[list[TokenLogprob] | None] = [None] * len(rows)
    if naming:
        row_of = torch.tensor([index for index, named in naming for _ in named], device=raw.device)
        column = torch.tensor([token_id for _, named in naming for token_id in named], device=raw.device)
        values = iter(raw[row_of, column].tolist())
        for index, named in naming:
            found[index] = [TokenLogprob(token_id, next(values)) for token_id in named]
    return found


def _entropies(raw: Tensor, rows: Sequence[RowSampling]) -> list[float | None]:
    """The entropy, in nats, of the rows [R, V] of log-probabilities that ask for it."""
    asking = [index for index, row in enumerate(rows) if row.entropy]
    found: list[float | None] = [None] * len(rows)
    if asking:
        probabilities = raw[torch.tensor(asking, device=raw.device)].exp()
        # Added in float64, so that the order, which depends on the number of rows, does not show.
        entropies = torch.special.entr(probabilities).sum(dim=-1, dtype=torch.float64)
        for index, entropy in zip(asking, entropies.float().tolist(), strict=True):
            found[index] = entropy
    return found

"""What a request does to the logits before a token is drawn: biases, forbidden tokens, penalties.

In this order, which is vLLM's: no bias or penalty lifts what is forbidden, and penalties see biased logits.
The work of a row is in the tokens that it names or holds, not in the vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ramet.engine.sampling_params import SamplingParams

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
NO_IDS: Ints = np.empty(0, dtype=np.int64)


class TokenCounts:
    """The distinct tokens of a branch and how often this generation made each. O(1) a token.

    It goes where its generation goes: no step, batch or cache hit changes it.
    """

    __slots__ = ("_counts", "_ids", "_place")

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        """`prompt` holds the tokens that are there already: they count as held, not as made."""
        self._place = dict(zip(dict.fromkeys(prompt), range(len(prompt)), strict=False))  # token id -> index
        self._ids = array("q", self._place)
        self._counts = array("q", bytes(8 * len(self._ids)))

    def add(self, token_id: int) -> None:
        """The generation has made this token."""
        place = self._place.setdefault(token_id, len(self._ids))
        if place == len(self._ids):
            self._ids.append(token_id)
            self._counts.append(0)
        self._counts[place] += 1

    def fork(self) -> TokenCounts:
        """A copy that goes on by itself."""
        other = TokenCounts()
        other._place = dict(self._place)
        other._ids, other._counts = self._ids[:], self._counts[:]
        return other

    def ids(self) -> Ints:
        """The distinct tokens, a copy."""
        return np.array(self._ids, dtype=np.int64)

    def counts(self) -> Ints:
        """How often each of `ids` was made, a copy."""
        return np.array(self._counts, dtype=np.int64)


class Adjustment(NamedTuple):
    """What is done to one row. Ids are unique within each field and inside the vocabulary."""

    bias_ids: Ints = NO_IDS
    biases: Floats = np.empty(0, dtype=np.float32)
    allowed_ids: Ints | None = None  # None is all
    banned_ids: Ints = NO_IDS
    repetition: float = 1.0  # 1 is off
    presence: float = 0.0
    frequency: float = 0.0
    counts: TokenCounts | None = None  # None without penalties


def adjustment_of(
    params: SamplingParams, counts: TokenCounts | None, forbidden: Iterable[int] = ()
) -> Adjustment | None:
    """What `params` does to each row, with some more tokens forbidden; None if nothing."""
    banned = dict.fromkeys((*params.banned_token_ids, *forbidden))
    if not (params.biases or banned or params.allowed_token_ids is not None or counts is not None):
        return None
    allowed = params.allowed_token_ids
    return Adjustment(
        bias_ids=_ids(token_id for token_id, _ in params.biases),
        biases=np.array([bias for _, bias in params.biases], dtype=np.float32),
        allowed_ids=None if allowed is None else _ids(allowed),
        banned_ids=_ids(banned),
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        counts=counts,
    )


def adjusted(logits: Tensor, rows: Sequence[Adjustment | None]) -> Tensor:
    """The logits [R, V] fp32 after what each row asks for: themselves where none asks, else a copy."""
    asking = [(index, row) for index, row in enumerate(rows) if row is not None]
    if not asking:
        return logits
    result = logits.clone()
    flat = result.view(-1)
    width = logits.shape[1]
    at = _places(asking, width, lambda row: row.bias_ids)
    if len(at):
        flat[_tensor(at, logits)] += _tensor(np.concatenate([row.biases for _, row in asking]), logits)
    _allow(result, asking)
    at = _places(asking, width, lambda row: row.banned_ids)
    if len(at):
        flat[_tensor(at, logits)] = -torch.inf
    penalised = [(index, row, row.counts) for index, row in asking if row.counts is not None]
    if penalised:
        _penalise(flat, width, penalised)
    return result


def _allow(logits: Tensor, asking: Sequence[tuple[int, Adjustment]]) -> None:
    """Forbid, in place, all tokens but those allowed, in rows that name some."""
    for index, row in asking:
        if row.allowed_ids is not None:
            ids = _tensor(row.allowed_ids, logits)
            kept = logits[index, ids]
            logits[index] = -torch.inf
            logits[index, ids] = kept


def _penalise(flat: Tensor, width: int, rows: Sequence[tuple[int, Adjustment, TokenCounts]]) -> None:
    """Apply the penalties in place to the flat logits [R * V] of all rows."""
    ids = [counts.ids() for _, _, counts in rows]
    lengths = [len(own) for own in ids]

    def each(values: list[float]) -> Tensor:
        return _tensor(np.repeat(np.array(values, dtype=np.float32), lengths), flat)

    at = _tensor(
        np.concatenate([own + index * width for own, (index, _, _) in zip(ids, rows, strict=True)]), flat
    )
    made = _tensor(np.concatenate([counts.counts() for _, _, counts in rows]).astype(np.float32), flat)
    repetition = each([row.repetition for _, row, _ in rows])
    logits = flat[at]
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits -= made * each([row.frequency for _, row, _ in rows])
    logits -= (made > 0) * each([row.presence for _, row, _ in rows])
    flat[at] = logits


def _places(
    asking: Sequence[tuple[int, Adjustment]], width: int, ids_of: Callable[[Adjustment], Ints]
) -> Ints:
    """Where the named tokens of each row are in the flat logits."""
    return np.concatenate([ids_of(row) + index * width for index, row in asking])


def _ids(token_ids: Iterable[int]) -> Ints:
    return np.fromiter(token_ids, dtype=np.int64)


def _tensor(values: npt.NDArray[np.generic], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)

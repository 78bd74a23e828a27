"""The log-probabilities of a prompt's tokens, each given those before it: recalled, or computed in order."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

import torch
from torch import Tensor

from ramet.engine.sampler import TokenLogprob, logprobs_of, top_logprobs
from ramet.radix.cursor import Cursor
from ramet.radix.sidecar import known_logprobs, write_logprobs


class PromptScores:
    """One entry for each token of a prompt; the first is None, as nothing comes before it.

    Each token's own log-probability is kept with the cached prefix, so that a hit answers without computing.
    The likeliest others are not: where `count` asks for some, all of the prompt runs again.
    """

    def __init__(self, token_ids: Sequence[int], count: int) -> None:
        self.token_ids = token_ids
        self.count = count  # how many of the likeliest tokens each entry has beside its own
        self.entries: list[list[TokenLogprob] | None] = [None]  # up to the first that is not known yet
        self._own: list[float] = []  # of the tokens from position 1 on

    @property
    def num_left(self) -> int:
        """Entries that are not known yet."""
        return len(self.token_ids) - len(self.entries)

    @property
    def logits_from(self) -> int:
        """The position whose logits give the next entry; that of the last token once all are known."""
        return len(self.entries) - 1

    def recall(self, cursor: Cursor) -> None:
        """Take what the pages know, up to the first token of which they know nothing."""
        if self.count:
            return
        known = known_logprobs(cursor)
        while self.num_left and len(self.entries) < len(known) and not isnan(known[len(self.entries)]):
            self._add(known[len(self.entries)], None)

    def accept(self, logits: Tensor) -> None:
        """Take the logits [R, V] of the next positions. Raises BadLogits where they are no numbers."""
        first = len(self.entries)
        targets = list(self.token_ids[first : first + len(logits)])
        own = logprobs_of(logits, targets)
        raw = torch.log_softmax(logits.float(), dim=-1) if self.count else None  # [R, V]
        for index, (token_id, logprob) in enumerate(zip(targets, own, strict=True)):
            self._add(logprob, None if raw is None else top_logprobs(raw[index], self.count, token_id))

    def keep(self, cursor: Cursor, more: Sequence[float] = ()) -> None:
        """Leave what is known with the pages; `more` are log-probabilities of the tokens after the prompt."""
        own = self._own if self.num_left else [*self._own, *more]
        write_logprobs(cursor, 1, own[: max(0, cursor.length - 1)])

    def _add(self, logprob: float, top: list[TokenLogprob] | None) -> None:
        self.entries.append(top or [TokenLogprob(self.token_ids[len(self.entries)], logprob)])
        self._own.append(logprob)

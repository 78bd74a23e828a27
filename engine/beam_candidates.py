"""The best continuations of all running beams together, out of their logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ramet.engine.adjust import Adjustment, adjusted
from ramet.engine.beam import Candidate
from ramet.engine.errors import BadLogits

_ROWS = 16  # beams that a CPU looks at together: their numbers stay in its cache
_RUN = 64  # neighbouring tokens of which only the best is compared at first


def best_candidates(
    logits: Sequence[Tensor], scores: Sequence[float], rows: Sequence[Adjustment | None], count: int
) -> list[Candidate]:
    """The `count` best candidates, best first; fewer if there are fewer that are possible at all.

    logits: [V] for each of W beams, any float dtype. scores: the sum of each so far. rows: what to do to its
    log-probabilities. Of equal candidates the lower beam and the lower token come first; which of those that
    equal the last one are there is left open. Raises BadLogits, which names the beams, where there is NaN or
    no finite number.
    """
    bad: list[int] = []
    parts: list[_Places] = []
    num_rows = _ROWS if logits[0].device.type == "cpu" else len(logits)
    for first in range(0, len(logits), num_rows):
        part = slice(first, first + num_rows)
        try:
            parts.append(_best(torch.stack(list(logits[part])), scores[part], rows[part], count, first))
        except BadLogits as error:
            bad += [first + row for row in error.rows]
    if bad:
        raise BadLogits(tuple(bad))
    found = _Places(*map(torch.cat, zip(*parts, strict=True)))
    best = found.sums.topk(min(count, len(found.sums)), sorted=False).indices
    sums, beams, token_ids, logprobs = (field[best].tolist() for field in found)
    candidates = map(Candidate, beams, token_ids, sums, logprobs)
    return sorted(
        (c for c in candidates if c.score > -torch.inf), key=lambda c: (-c.score, c.beam, c.token_id)
    )


class _Places(NamedTuple):
    """Some places of the sums [W, V] and what is there, each [C]."""

    sums: Tensor
    beams: Tensor
    token_ids: Tensor
    logprobs: Tensor


def _best(
    logits: Tensor, scores: Sequence[float], rows: Sequence[Adjustment | None], count: int, first: int
) -> _Places:
    """The `count` best of some rows [R, V], of which the first is that of beam `first`, in no order."""
    highest = logits.amax(dim=-1)
    bad = (~torch.isfinite(highest)).nonzero()[:, 0].tolist()
    if bad:
        raise BadLogits(tuple(bad))
    logprobs = torch.log_softmax(logits.float(), dim=-1)  # [R, V], the model's own
    so_far = torch.tensor(scores, dtype=torch.float32, device=logits.device)[:, None]
    sums = adjusted(logprobs, rows) + so_far  # [R, V]
    row, token = _top_places(sums, count)
    return _Places(sums[row, token], first + row, token, logprobs[row, token])


def _top_places(sums: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The rows and the columns of the `count` highest of the sums [R, V], in no order.

    They lie in the `count` runs with the highest maxima: each run that is left out has that many numbers
    above it. To compare runs first costs one pass over the memory instead of a sort.
    """
    width = sums.shape[1]
    if width % _RUN:
        sums = F.pad(sums, (0, -width % _RUN), value=-torch.inf)
    runs = sums.view(-1, _RUN)  # [R * V / 64, 64]
    best = runs.amax(dim=-1).topk(min(count, len(runs)), sorted=False).indices  # [C]
    inside = runs[best].flatten()  # [C * 64]
    top = inside.topk(min(count, len(inside)), sorted=False).indices
    flat = best[top // _RUN] * _RUN + top % _RUN
    row, column = flat // sums.shape[1], flat % sums.shape[1]
    return row[column < width], column[column < width]

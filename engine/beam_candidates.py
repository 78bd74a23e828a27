"""The best continuations of all running beams together, out of their logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ramet.engine.adjust import Adjustment, adjusted
from ramet.engine.beam import Candidate
from ramet.engine.errors import BadLogits

_RUN = 64  # neighbouring tokens of which only the best is compared at first


class Scored:
    """The log-probabilities of each running beam's next token."""

    def __init__(self, logits: Tensor, scores: Sequence[float], rows: Sequence[Adjustment | None]) -> None:
        """logits: [W, V], any float dtype. scores: W sums so far. rows: what to do to each beam's
        log-probabilities. Raises BadLogits, which names the rows that hold NaN or no finite number."""
        logits = logits.float()
        highest = logits.amax(dim=-1)
        bad = (~torch.isfinite(highest)).nonzero()[:, 0].tolist()
        if bad:
            raise BadLogits(tuple(bad))
        self.logprobs = torch.log_softmax(logits, dim=-1)  # [W, V], the model's own
        sums = torch.tensor(scores, dtype=torch.float32, device=logits.device)[:, None]
        self.sums = adjusted(self.logprobs, rows) + sums  # [W, V]

    def best(self, count: int) -> list[Candidate]:
        """The `count` best candidates, best first; fewer if there are fewer that are possible at all.

        Of equal ones the lower beam and the lower token come first; which of those that equal the last one
        are there is left open.
        """
        places = _top_places(self.sums, count)
        sums = self.sums.flatten()[places]
        logprobs = self.logprobs.flatten()[places]
        found = sorted(
            (-total, place, logprob)
            for place, total, logprob in zip(places.tolist(), sums.tolist(), logprobs.tolist(), strict=True)
            if total > -torch.inf
        )
        width = self.sums.shape[1]
        return [Candidate(place // width, place % width, -total, logprob) for total, place, logprob in found]


def _top_places(sums: Tensor, count: int) -> Tensor:
    """Where the `count` highest of the flat sums [W * V] are, in no order.

    They lie in the `count` runs with the highest maxima: each run that is left out has that many numbers
    above it. To compare runs first costs one pass over the memory instead of a sort.
    """
    width = sums.shape[1]
    if width % _RUN:
        sums = F.pad(sums, (0, -width % _RUN), value=-torch.inf)
    runs = sums.reshape(-1, _RUN)  # [W * V / 64, 64]
    best = runs.amax(dim=-1).topk(min(count, len(runs)), sorted=False).indices  # [C]
    inside = runs[best].flatten()  # [C * 64]
    top = inside.topk(min(count, len(inside)), sorted=False).indices
    flat = best[top // _RUN] * _RUN + top % _RUN
    padded = sums.shape[1]
    beam, token = flat // padded, flat % padded
    return (beam * width + token)[token < width]

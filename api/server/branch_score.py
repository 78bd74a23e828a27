"""How likely continuations of a branch are. Nothing changes, and its own tokens are not computed again."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from ramet.api.server import leases
from ramet.api.server.answers import finite
from ramet.api.server.branch_schemas import Candidate, ScoreRequest
from ramet.api.server.branch_store import Entry
from ramet.api.server.branch_verbs import Context
from ramet.api.server.errors import blaming, invalid
from ramet.engine.outputs import Score
from ramet.engine.scoring import normalized
from ramet.engine.tokenizer import validate_token_ids


async def score(context: Context, entry: Entry, body: ScoreRequest) -> dict[str, Any]:
    """Log-probabilities of whole continuations, and of single tokens that may come next."""
    state = context.state
    candidates, labels = body.candidates or [], body.next_token_candidates or []
    if not candidates and not labels:
        raise invalid("candidates", "or next_token_candidates must hold at least one")
    many = [await _tokens(context, one, f"candidates.{i}") for i, one in enumerate(candidates)]
    named = [
        await _tokens(context, Candidate(text=label), f"next_token_candidates.{i}")
        for i, label in enumerate(labels)
    ]
    for index, token_ids in enumerate(named):
        if len(token_ids) != 1:
            limit = f"must be one token, and is {len(token_ids)}; see candidates"
            raise invalid(f"next_token_candidates.{index}", limit)
    suffix = None if body.suffix is None else await _tokens(context, body.suffix, "suffix")
    position = len(entry.branch)
    field = "candidates" if many else "next_token_candidates"
    if suffix is not None and position + len(suffix) > state.engine.config.max_tokens:
        field = "suffix"
    with blaming(field):
        looks, scores = await asyncio.gather(
            state.engine.look([entry.branch]), entry.branch.score([*many, *named], suffix=suffix)
        )
    resident = looks[0].resident_tokens
    await leases.use(state, entry)
    state.metrics.score_candidates.inc(len(scores))
    first = scores[: len(many)]
    answer: dict[str, Any] = {"object": "branch.score", "branch_id": entry.id, "position": position}
    answer["scores"] = [
        _shown(index, one, body, value)
        for index, (one, value) in enumerate(zip(first, _normalised(context, first, body), strict=True))
    ]
    answer["next_token"] = [
        {
            "text": label,
            "token_id": one.token_ids[0],
            "logit": one.first_logit if math.isfinite(one.first_logit) else None,
            "logprob": finite(one.logprob),
            "is_greedy": one.is_greedy,
        }
        for label, one in zip(labels, scores[len(many) :], strict=True)
    ]
    num_prompt = position + len(suffix or ()) + sum(len(ids) for ids in many)
    answer["usage"] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": 0,
        "total_tokens": num_prompt,
        "prompt_tokens_details": {
            "cached_tokens": min(resident, position),
            "cache_write_tokens": max(0, position - resident),
        },
    }
    return answer


async def _tokens(context: Context, candidate: Candidate, field: str) -> list[int]:
    text = context.state.text
    if (candidate.text is None) == (candidate.token_ids is None):
        raise invalid(field, "must have text or token_ids, and not both")
    if candidate.token_ids is not None:
        token_ids = validate_token_ids(candidate.token_ids, text.vocab_size, field)
    else:
        assert candidate.text is not None, "one of the two is given"
        token_ids = await text.encode(candidate.text, field, add_special_tokens=False, control_tokens=False)
    if not token_ids:
        raise invalid(field, "must hold at least one token")
    return token_ids


def _normalised(context: Context, scores: list[Score], body: ScoreRequest) -> list[float]:
    """What the candidates are to be compared by."""
    how = body.normalize or "none"
    lengths = [len(one.token_ids) for one in scores]
    if how == "bytes":
        num_bytes = context.state.text.token_bytes
        lengths = [sum(len(num_bytes(token_id)) for token_id in one.token_ids) for one in scores]
    return normalized(how, [finite(one.logprob) for one in scores], lengths)


def _shown(index: int, score: Score, body: ScoreRequest, value: float) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "index": index,
        "logprob": finite(score.logprob),
        "score": value,
        "num_tokens": len(score.token_ids),
        "is_greedy": score.is_greedy,
        "token_ids": score.token_ids,
    }
    if body.return_token_logprobs:
        shown["token_logprobs"] = [finite(one) for one in score.token_logprobs]
    return shown

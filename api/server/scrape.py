"""/metrics: a look at everything, as Prometheus reads it."""

from __future__ import annotations

from collections import Counter

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

from ramet.api.server.metrics import Look
from ramet.api.server.state import State, state_of

router = APIRouter()


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    state = state_of(request)
    text = state.metrics.text(await _look(state))
    return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)


async def _look(state: State) -> Look:
    entries = [entry for store in state.stores() for entry in store.entries()]
    looks = await state.engine.look([entry.branch for entry in entries])
    pinned = [entry.branch for entry in entries if entry.pin == "hard"]
    leased = [entry.branch for entry in entries if entry.lease_ends_at is not None]
    num_pinned = (await state.engine.look_at_tree(pinned)).blocks
    num_held = (await state.engine.look_at_tree(list(dict.fromkeys([*pinned, *leased])))).blocks
    by_state = Counter(look.state for look in looks)
    return Look(
        stats=await state.engine.stats(),
        pinned_blocks=num_pinned,
        leased_blocks=num_held - num_pinned,
        branches={name: by_state[name] for name in ("idle", "generating", "parked")},
        num_trees=sum(len(store.trees) for store in state.stores()),
    )

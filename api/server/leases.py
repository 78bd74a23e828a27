"""Two clocks on a branch: its lease, which lets it keep its blocks, and its own end, when it is let go of."""

from __future__ import annotations

import asyncio

from ramet.api.server import log
from ramet.api.server.branch_schemas import Lease, Settable
from ramet.api.server.branch_store import BranchStore, Entry
from ramet.api.server.errors import ApiError, of_engine
from ramet.api.server.state import State
from ramet.engine.errors import BranchReleased, InvalidInput
from ramet.engine.sequence import Hold

DEFAULT_LEASE_S = 300.0
SWEEP_S = 0.5


async def use(state: State, entry: Entry) -> None:
    """A branch is used: its clocks start again, unless its lease says otherwise."""
    entry.expires_at = max(entry.expires_at, state.clock() + state.settings.branch_ttl)
    if entry.lease is not None and entry.lease.renew_on_use is not False:
        ended = entry.lease_ends_at is None
        entry.lease_ends_at = state.clock() + entry.lease.ttl
        if ended:
            await _hold(entry)


async def set_lease(state: State, entry: Entry, body: Settable) -> None:
    """Take over the lease and the pin of a request, where they were given. Raises ApiError."""
    pin = body.pin or (entry.pin if entry.pin != "none" or body.lease is None else "soft")
    if pin == "hard" and entry.pin != "hard":
        await _check_budget(state, entry)
    entry.pin = pin
    if body.lease is not None:
        entry.lease = body.lease
    elif pin == "soft" and entry.lease is None:
        entry.lease = Lease(ttl=DEFAULT_LEASE_S, renew_on_use=True)
    elif pin == "none":
        entry.lease = None
    if body.lease is not None or body.pin is not None:
        entry.lease_ends_at = None if entry.lease is None else state.clock() + entry.lease.ttl
    await _hold(entry)


async def _hold(entry: Entry) -> None:
    if entry.pin == "hard":
        hold = Hold.PIN
    else:
        hold = Hold.NONE if entry.lease_ends_at is None else Hold.LEASE
    await entry.branch.hold(hold)


async def _check_budget(state: State, entry: Entry) -> None:
    """Pinned branches may hold a part of the blocks only, so that others can always go on."""
    budget = int(state.settings.max_pinned_ratio * state.engine.config.num_blocks)
    pinned = [one.branch for store in state.stores() for one in store.entries() if one.pin == "hard"]
    whole = await state.engine.look_at_tree([*pinned, entry.branch])
    if whole.blocks > budget:
        message = f"pinned branches may hold {budget} blocks, and would hold {whole.blocks} with this one"
        raise ApiError(429, message, code="pin_budget_exceeded", param="pin")


async def sweep_for_ever(state: State) -> None:
    """End what has come to its end, twice a second."""
    while state.engine.is_running:
        await asyncio.sleep(SWEEP_S)
        for store in state.stores():
            try:
                await sweep(state, store)
            except Exception as error:
                if of_engine(error) is None:
                    log.error("a bug", error)  # the others' clocks go on


async def sweep(state: State, store: BranchStore) -> None:
    """Park the branches whose leases have ended, and let go of those that nobody has used for long."""
    now = state.clock()
    for entry in store.entries():
        if entry.expires_at <= now and entry.work is None:
            store.remove(entry, "expired")
            state.metrics.prunes.labels("expired").inc()
            await entry.branch.release()
        elif entry.lease_ends_at is not None and entry.lease_ends_at <= now and entry.pin != "hard":
            entry.lease_ends_at = None
            await _park(entry)


async def _park(entry: Entry) -> None:
    try:
        await entry.branch.hold(Hold.NONE)
        await entry.branch.park()
    except BranchReleased:
        return  # meanwhile
    except InvalidInput:
        return  # it runs: when it rests it holds no faster than others
    entry.tree.events.add("branch.parked", {"branch_id": entry.id})

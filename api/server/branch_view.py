"""Branches and trees as clients see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ramet.api.server import kv_events
from ramet.api.server.branch_store import MAX_TREE_BRANCHES, MAX_TREE_TOKENS, Entry, Tree
from ramet.api.server.errors import invalid
from ramet.api.server.state import State
from ramet.engine.look import BranchLook, TreeLook

BRANCH_PARTS = {"token_ids", "text", "messages", "block_table"}
TREE_PARTS = {"nodes", "blocks"}
_PREVIEW_TOKENS = 24


def parts_of(include: str | None, known: set[str]) -> set[str]:
    """What a query asks for, beside the usual. Raises ApiError."""
    parts = {part for part in (include or "").split(",") if part}
    if not parts <= known:
        raise invalid("include", f"must be of {', '.join(sorted(known))}")
    return parts


async def show_branches(
    state: State, entries: Sequence[Entry], parts: set[str] | None = None
) -> list[dict[str, Any]]:
    """All at one moment."""
    looks = await state.engine.look([entry.branch for entry in entries])
    return [_show(state, *pair, parts or set()) for pair in zip(entries, looks, strict=True)]


async def show_branch(state: State, entry: Entry, parts: set[str] | None = None) -> dict[str, Any]:
    return (await show_branches(state, [entry], parts))[0]


def _show(state: State, entry: Entry, look: BranchLook, parts: set[str]) -> dict[str, Any]:
    lease = entry.lease
    num_prompt = look.position - entry.num_generated
    shown: dict[str, Any] = {
        "id": entry.id,
        "object": "branch",
        "created_at": int(entry.created_at),
        "model": state.settings.model_names[0],
        "tree_id": entry.tree.id,
        "parent_id": entry.parent_id,
        "forked_at": entry.forked_at,
        "name": entry.name,
        "state": look.state,
        "position": look.position,
        "depth": len(entry.path),
        "children": sum(1 for one in entry.tree.branches.values() if one.parent_id == entry.id),
        "checkpoints": entry.checkpoints,
        "metadata": entry.metadata,
        "annotations": entry.annotations,
        "lease": None
        if lease is None
        else {
            "ttl": lease.ttl,
            "renew_on_use": lease.renew_on_use is not False,
            "expires_at": entry.lease_ends_at,
        },
        "expires_at": int(entry.expires_at),
        "pin": entry.pin,
        "pinned_tokens": look.resident_tokens if entry.pin == "hard" else 0,
        "kv": {
            "block_size": state.engine.config.block_size,
            "resident_tokens": look.resident_tokens,
            "blocks": len(look.table.blocks),
            "shared_blocks": look.shared_blocks,
            "exclusive_blocks": look.exclusive_blocks,
            "exclusive_bytes": look.exclusive_blocks * state.engine.block_nbytes,
        },
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": entry.num_generated,
            "total_tokens": look.position,
            "prompt_tokens_details": {
                "cached_tokens": look.cached_tokens,
                "cache_write_tokens": max(0, num_prompt - look.cached_tokens),
            },
        },
    }
    if "token_ids" in parts:
        shown["token_ids"] = entry.branch.token_ids
    if "text" in parts:
        shown["text"] = state.text.decode(entry.branch.token_ids)
    if "messages" in parts:
        shown["messages"] = entry.turns[-1].messages if entry.turns else None
    if "block_table" in parts:
        shown["block_table"] = {"blocks": look.table.blocks, "filled": look.table.filled}
    return shown


async def show_tree(state: State, tree: Tree, parts: set[str] | None = None) -> dict[str, Any]:
    """What a tree holds, each block counted once."""
    parts = parts or set()
    if tree.events.told is not None:
        await kv_events.tell(state)  # whoever asks for the numbers finds what led to them in the feed
    entries = list(tree.branches.values())
    looks = await state.engine.look([entry.branch for entry in entries])
    whole = await state.engine.look_at_tree([entry.branch for entry in entries])
    size = state.engine.block_nbytes
    hard = [look for entry, look in zip(entries, looks, strict=True) if entry.pin == "hard"]
    pinned = {block for look in hard for block in look.table.blocks}
    shown: dict[str, Any] = {
        "id": tree.id,
        "object": "tree",
        "created_at": int(tree.created_at),
        "branches": {
            "live": len(entries),
            "generating": sum(look.running for look in looks),
            "parked": sum(look.parked for look in looks),
            "pruned": tree.num_pruned,
            "expired": tree.num_expired,
        },
        "tokens": {
            "logical": whole.logical_tokens,
            "physical": whole.physical_tokens,
            "sharing_ratio": round(whole.sharing_ratio, 4),
        },
        "kv": {
            "block_size": state.engine.config.block_size,
            "blocks": whole.blocks,
            "shared_blocks": whole.shared_blocks,
            "cow_copies": sum(look.copies for look in looks),
            "bytes": whole.blocks * size,
            "pinned_bytes": size * len(pinned),
            "resident_tokens": whole.physical_tokens,
        },
        "limits": {"max_branches": MAX_TREE_BRANCHES, "max_tokens": MAX_TREE_TOKENS},
    }
    if "nodes" in parts:
        shown["nodes"] = {"data": _nodes(state, entries, whole, "blocks" in parts), "has_more": False}
    return shown


def _nodes(state: State, entries: list[Entry], whole: TreeLook, blocks: bool) -> list[dict[str, Any]]:
    """The stretches of tokens; their ids hold within one answer."""
    some_user: dict[int, int] = {}  # of each share, a branch that has its tokens
    for index in range(len(whole.shares) - 1, -1, -1):
        share = whole.shares[index]
        if share.ending:
            some_user[index] = share.ending[0]
        if share.parent is not None and index in some_user:
            some_user.setdefault(share.parent, some_user[index])
    nodes = []
    for index, share in enumerate(whole.shares):
        tokens = entries[some_user[index]].branch.token_ids[share.start : share.end][:_PREVIEW_TOKENS]
        node: dict[str, Any] = {
            "id": f"nd_{index}",
            "parent_id": None if share.parent is None else f"nd_{share.parent}",
            "start": share.start,
            "end": share.end,
            "num_sharers": share.num_users,
            "branches": [entries[one].id for one in share.ending],
            "state": "resident",
            "preview": state.text.preview(tokens),
        }
        if blocks:
            node["blocks"] = share.blocks
        nodes.append(node)
    return nodes

"""The feed of a tree: in order, resumable, with a snapshot for who comes late, and an end."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from ramet.api.server import events
from ramet.api.server.events import EventLog
from tests.api.server.test_branches import Api
from tests.api.serving import Serve


def parsed(text: str) -> list[tuple[int, str, dict[str, Any]]]:
    found = []
    for part in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in part.split("\n") if not line.startswith(":") and line)
        if lines:
            found.append((int(lines["id"]), lines["event"], json.loads(lines["data"])))
    return found


def test_a_reader_hears_everything_in_order_and_can_come_back(serve: Serve) -> None:
    server = serve()
    api = Api(server)
    made = api.create(prompt="abc")
    tree, root = made["tree_id"], made["id"]
    texts: list[str] = []
    thread = threading.Thread(target=lambda: texts.append(api.call("GET", f"/v1/trees/{tree}/events").text))
    thread.start()
    log = server.server.state.tenants.get("local").branches.trees[tree].events
    server.wait_until(lambda: bool(log._changed._waiters))
    kids = [
        one["branch_id"] for one in api.do(root, "generate", into="children", n=2, max_tokens=2)["choices"]
    ]
    api.do(kids[0], "extend", text="!")
    api.do(kids[0], "promote")
    api.do(root, "truncate", position=2)
    partial = api.call("GET", f"/v1/trees/{tree}")
    assert partial.status_code == 200
    api.drop(tree)
    thread.join(10)
    told = parsed(texts[0])
    assert told[0][1] == "tree.snapshot"
    assert [one["branch_id"] for one in told[0][2]["branches"]] == [root]
    assert [one[0] for one in told] == list(range(told[0][0], told[0][0] + len(told)))
    names = [one[1] for one in told[1:] if not one[1].startswith("kv.")]  # see test_kv_events.py
    assert sorted(names[:2]) == ["branch.created", "branch.created"] or "branch.generating" in names[:3]
    expected = {
        "branch.created",
        "branch.generating",
        "branch.completed",
        "branch.extended",
        "branch.pruned",
        "branch.promoted",
        "branch.truncated",
    }
    assert set(names) == expected
    assert all(one[2]["type"] == one[1] for one in told)
    assert api.call("GET", f"/v1/trees/{tree}/events").status_code == 404


def read(log: EventLog, after: int | None) -> list[tuple[int, str, dict[str, Any]]]:
    """What a reader is told of a log that is closed."""

    async def main() -> str:
        return b"".join([part async for part in log.read(after, lambda: {"now": 1})]).decode()

    return parsed(asyncio.run(main()))


def test_resuming_after_an_event_gives_those_that_follow() -> None:
    log = EventLog(lambda: 5.0)
    for index in range(4):
        log.add("branch.created", {"n": index})
    log.close()
    assert [one[0] for one in read(log, 2)] == [3, 4]
    assert read(log, 4) == []
    assert [one[1] for one in read(log, None)] == ["tree.snapshot"]
    for unknown in (99, -1):
        assert [(one[0], one[1]) for one in read(log, unknown)] == [(4, "tree.snapshot")]
    assert [one[0] for one in read(log, 0)] == [1, 2, 3, 4]


def test_who_was_away_too_long_gets_a_snapshot() -> None:
    log = EventLog(lambda: 5.0)
    for index in range(events._KEPT + 10):
        log.add("branch.created", {"n": index})
    log.close()
    assert len(read(log, 10)) == events._KEPT
    assert [one[1] for one in read(log, 9)] == ["tree.snapshot"]


def test_events_of_blocks_push_out_none_of_branches() -> None:
    log = EventLog(lambda: 5.0)
    for index in range(3):
        log.add("branch.created", {"n": index})
    for index in range(3 * events._KEPT):
        log.add_kv("kv.alloc", {"n": index})
    log.add("branch.pruned", {})
    log.close()
    told = read(log, 1)
    assert [one[1] for one in told if one[1].startswith("branch.")] == ["branch.created"] * 2 + [
        "branch.pruned"
    ]
    assert [one[2]["n"] for one in told if one[1] == "kv.alloc"][
        -1
    ] == 3 * events._KEPT - 1  # the newest are there
    assert [one[0] for one in told] == sorted(one[0] for one in told)
    assert len(told) == 3 + events._KEPT_KV


def test_who_is_too_slow_gets_a_snapshot_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> list[tuple[int, str, dict[str, Any]]]:
        log = EventLog(lambda: 5.0)
        reader = log.read(0, lambda: {"branches": []})
        log.add("branch.created", {})
        told = [await anext(reader)]
        for _ in range(events._KEPT + 1):
            log.add("branch.extended", {})
        log.close()
        told += [part async for part in reader]
        return parsed(b"".join(told).decode())

    told = asyncio.run(main())
    last = events._KEPT + 2
    assert [one[:2] for one in told] == [(1, "branch.created"), (last, "tree.snapshot")]


def test_silence_is_broken_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_PING_S", 0.01)

    async def main() -> None:
        log = EventLog(lambda: 5.0)
        reader = log.read(0, dict)
        assert (await anext(reader)).startswith(b":")
        log.add("branch.created", {})
        assert (await anext(reader)).startswith(b"id: 1\nevent: branch.created\n")
        log.close()
        with pytest.raises(StopAsyncIteration):
            await anext(reader)

    asyncio.run(main())


def test_a_stopping_server_ends_its_feeds(serve: Serve) -> None:
    server = serve()
    api = Api(server)
    made = api.create(prompt="abc")
    done: list[int] = []
    path = f"/v1/trees/{made['tree_id']}/events"
    thread = threading.Thread(target=lambda: done.append(api.call("GET", path).status_code))
    thread.start()
    log = server.server.state.tenants.get("local").branches.trees[made["tree_id"]].events
    server.wait_until(lambda: bool(log._changed._waiters))
    server.server.state.draining = False
    server.loop.call_soon_threadsafe(server.server.state.drain)
    thread.join(5)
    assert done == [200]
    server.server.state.draining = False
    api.drop(made["tree_id"])

"""What a feed tells of blocks: its sum is the accounting, and it names nobody else's."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from ramet.api.server import kv_events
from ramet.api.server.branch_store import Tree
from ramet.api.server.events import Event
from tests.api.server.test_branches import Api, ok
from tests.api.server.test_events import parsed
from tests.api.server.test_leases import at, flood
from tests.api.serving import Serve, Serving, make_llm

SIGNS = {"kv.alloc": 1, "kv.cow": 1, "kv.restore": 1, "kv.evict": -1, "kv.free": -1}
BLOCK_BYTES = 16 * 8  # the scripted model keeps 8 bytes a token
KEYS = ("sk-first-0001", "sk-other-0002")


@pytest.fixture(autouse=True)
def only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for the tree finds all in its feed: nothing depends on when else it is looked at."""
    monkeypatch.setattr(kv_events, "TELL_S", 3600.0)


def trees_of(server: Serving) -> dict[str, Tree]:
    return {name: tree for store in server.server.state.stores() for name, tree in store.trees.items()}


class Feed:
    """One tree's events of blocks as they come."""

    def __init__(self, api: Api, tree: str) -> None:
        self.api, self.id = api, tree
        self.tree = trees_of(api.server)[tree]
        api.server.run(kv_events.watch(api.server.server.state, self.tree))
        self.seen = 0
        self.blocks = 0

    def news(self) -> list[tuple[str, dict[str, Any]]]:
        """What is new, after the tree was asked for; it must lead to what the tree says."""
        shown = ok(self.api.call("GET", f"/v1/trees/{self.id}"))
        new: list[Event] = [one for one in self.tree.events._of_blocks if one.id > self.seen]
        self.seen = new[-1].id if new else self.seen
        for one in new:
            self.blocks += SIGNS[one.name] * one.data["blocks"]
            assert one.data["kv"]["blocks"] == self.blocks >= 0
            assert one.data["num_branches"] == len(one.data["branch_ids"])
        assert self.blocks == shown["kv"]["blocks"]
        return [(one.name, one.data) for one in new]

    def only(self, name: str) -> dict[str, Any]:
        """The one event that is new."""
        ((told, data),) = self.news()
        assert told == name
        return data


def test_blocks_taken_copied_and_let_go_of(serve: Serve) -> None:
    api = Api(serve())
    made = api.create(prompt="a" * 20)
    feed = Feed(api, made["tree_id"])
    data = feed.only("kv.alloc")  # 16 tokens and 4
    assert (data["blocks"], data["bytes"], data["cached_tokens"]) == (2, 2 * BLOCK_BYTES, 0)
    kids = [one["id"] for one in api.do(made["id"], "fork", n=2)["data"]]
    assert feed.news() == []  # a fork takes nothing
    for kid in kids:
        api.do(kid, "extend", text="!")  # the open block has two other owners, then one
    data = feed.only("kv.cow")
    assert (data["blocks"], sorted(data["branch_ids"])) == (2, sorted(kids))
    assert ok(api.call("GET", f"/v1/trees/{feed.id}"))["kv"]["cow_copies"] == 2
    api.do(kids[0], "generate", max_tokens=31)  # 21 tokens and 30 that are fed fill 51 of 64 slots
    data = feed.only("kv.alloc")
    assert (data["blocks"], data["branch_ids"]) == (2, [kids[0]])
    api.do(kids[0], "truncate", position=33)
    assert feed.only("kv.free")["blocks"] == 1
    api.do(kids[0], "promote")  # its sibling had a block of its own
    assert feed.only("kv.free")["blocks"] == 1
    second = api.create(prompt="a" * 16 + "b" * 16, tree_id=feed.id)["id"]
    data = feed.only("kv.alloc")
    assert (data["blocks"], data["branch_ids"], data["cached_tokens"]) == (1, [second], 16)
    api.drop(feed.id)


def test_what_is_given_up_and_comes_back(serve: Serve) -> None:
    server = serve(make_llm(num_blocks=20))
    api = Api(server)
    at(server, 1000.0)
    plain = api.create(prompt="y" * 40)
    leased = api.create(prompt="x" * 40, lease={"ttl": 60})
    feeds = {one["id"]: Feed(api, one["tree_id"]) for one in (plain, leased)}
    for feed in feeds.values():
        assert feed.only("kv.alloc")["blocks"] == 3
    flood(server)
    data = feeds[plain["id"]].only("kv.evict")
    assert (data["blocks"], data["tokens"], data["branch_ids"]) == (3, 40, [plain["id"]])
    assert feeds[leased["id"]].news() == []
    api.do(plain["id"], "generate", max_tokens=1)
    data = feeds[plain["id"]].only("kv.restore")
    assert (data["blocks"], data["tokens"], data["cached_tokens"]) == (3, 40, 0)
    at(server, 1061.0)  # the lease ends: its full blocks stay in the cache, its open one goes
    data = feeds[leased["id"]].only("kv.evict")
    assert (data["blocks"], data["tokens"]) == (3, 40)
    api.do(leased["id"], "extend", text="!" * 30)  # 70 tokens: of 5 blocks, 3 held what was given up
    (back, restored), (more, alloc) = feeds[leased["id"]].news()
    assert (back, restored["blocks"], restored["tokens"], restored["cached_tokens"]) == (
        "kv.restore",
        3,
        8,
        32,
    )
    assert (more, alloc["blocks"]) == ("kv.alloc", 2)
    ok(api.call("POST", "/v1/admin/reset_prefix_cache"))
    assert feeds[leased["id"]].only("kv.evict")["blocks"] == 5
    for feed in feeds.values():
        api.drop(feed.id)


def test_a_feed_names_nobody_elses_branches(serve: Serve) -> None:
    server = serve(make_llm(num_blocks=20), keys=KEYS)
    mine, theirs = (Api(server, key) for key in KEYS)
    made = mine.create(prompt="p" * 64)
    feed = Feed(mine, made["tree_id"])
    assert feed.only("kv.alloc")["blocks"] == 4
    other = theirs.create(prompt="p" * 64)  # the same text, and none of the same blocks
    feeds = [feed, Feed(theirs, other["tree_id"])]
    assert feed.news() == []
    assert feeds[1].only("kv.alloc")["cached_tokens"] == 0
    theirs.do(other["id"], "generate", max_tokens=230)
    data = feed.only("kv.evict")
    assert (data["branch_ids"], data["blocks"]) == ([made["id"]], 4)
    assert feeds[1].only("kv.alloc")["branch_ids"] == [other["id"]]
    for one, owner in zip(feeds, (mine, theirs), strict=True):
        response = (theirs if owner is mine else mine).call("GET", f"/v1/trees/{one.id}/events")
        assert response.status_code == 404
        owner.drop(one.id)


@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_happens_the_events_add_up(serve: Serve, seed: int) -> None:
    rng = random.Random(seed)
    server = serve(make_llm(num_blocks=24, block_size=4, max_batch_tokens=8), keys=KEYS)
    feeds: dict[str, Feed] = {}
    names: dict[str, int] = {}
    for _ in range(150):
        api = Api(server, rng.choice(KEYS))
        known = ok(api.call("GET", "/v1/branches?limit=100"))["data"]
        if len(known) < 2 or rng.random() < 0.1:
            tree = rng.choice([None, *(one["tree_id"] for one in known)])
            made = api.create(prompt=rng.choice("ab") * rng.randint(1, 30), tree_id=tree)
            if made["tree_id"] not in feeds:
                feeds[made["tree_id"]] = Feed(api, made["tree_id"])
        else:
            one = rng.choice(known)
            verb, body = rng.choice(VERBS)
            if len(known) > 8 or one["position"] > 70:
                verb, body = "delete", {}
            path = f"/v1/branches/{one['id']}" + ("" if verb == "delete" else f"/{verb}")
            response = api.call("DELETE" if verb == "delete" else "POST", path, body)
            assert response.status_code in (200, 201, 400), response.text  # 400: nothing to truncate
        alive = trees_of(server)
        feeds = {name: feed for name, feed in feeds.items() if name in alive}
        for name, feed in feeds.items():
            for told, data in feed.news():
                names[told] = names.get(told, 0) + 1
                assert set(data["branch_ids"]) <= set(alive[name].branches)
    assert set(names) == set(SIGNS)
    for feed in feeds.values():
        feed.api.drop(feed.id)


VERBS: list[tuple[str, dict[str, Any]]] = [
    ("fork", {"n": 2}),
    ("fork", {"at": 1}),
    ("extend", {"text": "hello, world"}),
    ("extend", {"text": "?", "prefill": "lazy"}),
    ("generate", {"max_tokens": 9, "temperature": 0}),
    ("generate", {"max_tokens": 6, "n": 3, "into": "children", "seed": 1}),
    ("beam_search", {"max_tokens": 5, "num_beams": 3}),
    ("score", {"candidates": [{"text": "ab"}, {"text": "ccc"}]}),
    ("truncate", {"position": 3}),
    ("promote", {}),
    ("delete", {}),
]


def test_a_block_that_is_there_already_takes_the_place_of_its_duplicate_without_a_word(serve: Serve) -> None:
    api = Api(serve())
    first, made = api.create(prompt="p" * 16), api.create(prompt="p" * 16)
    api.do(first["id"], "generate", max_tokens=20, temperature=0)
    feed = Feed(api, made["tree_id"])
    assert feed.only("kv.alloc")["blocks"] == 1
    api.do(made["id"], "generate", max_tokens=8, temperature=0)
    assert feed.only("kv.alloc")["blocks"] == 1
    before = api.get(made["id"], "block_table")["block_table"]["blocks"]
    api.do(made["id"], "generate", max_tokens=9, temperature=0)  # 16 new ones are fed: the block is full
    assert feed.news() == []
    assert api.get(made["id"], "block_table")["block_table"]["blocks"] != before
    (twin,) = (one["id"] for one in api.do(made["id"], "fork", at=16)["data"])
    api.do(twin, "generate", max_tokens=8, temperature=0)
    assert feed.only("kv.alloc")["blocks"] == 1
    api.do(twin, "generate", max_tokens=9, temperature=0)
    assert feed.only("kv.free")["blocks"] == 1  # the tree had it
    for one in (first, made):
        api.drop(one["tree_id"])


def test_one_look_tells_all_that_was_taken_meanwhile(serve: Serve) -> None:
    api = Api(serve())
    made = api.create(prompt="abc")
    feed = Feed(api, made["tree_id"])
    feed.news()
    api.do(made["id"], "generate", max_tokens=200)
    assert feed.only("kv.alloc")["blocks"] == 12  # 202 tokens with KV: 13 blocks
    api.drop(feed.id)


def test_a_feed_that_nobody_reads_costs_nothing(serve: Serve) -> None:
    server = serve()
    api = Api(server)
    made = api.create(prompt="a" * 40)
    api.do(made["id"], "generate", max_tokens=20)
    ok(api.call("GET", f"/v1/trees/{made['tree_id']}"))
    assert server.llm.engine.scheduler.changes is None
    assert not trees_of(server)[made["tree_id"]].events._of_blocks
    api.drop(made["tree_id"])


def test_blocks_are_told_without_being_asked_for(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "TELL_S", 0.01)
    server = serve()
    api = Api(server)
    made = api.create(prompt="a" * 40)
    tree = trees_of(server)[made["tree_id"]]
    server.run(kv_events.watch(server.server.state, tree))
    assert len(tree.events._of_blocks) == 1
    api.do(made["id"], "extend", text="b" * 40)
    server.wait_until(lambda: len(tree.events._of_blocks) == 2)
    assert not server.server.state.engine.has_changes
    api.drop(made["tree_id"])


def test_a_reader_that_was_cut_off_goes_on_and_adds_up(serve: Serve) -> None:
    server = serve()
    api = Api(server)
    made = api.create(prompt="a" * 40)
    path = f"/v1/trees/{made['tree_id']}/events"
    first = ""
    with server.http.stream("GET", path) as stream:
        for line in stream.iter_lines():
            first += line + "\n"
            if not line:
                break
    ((last, name, snapshot),) = parsed(first)
    assert (name, snapshot["kv"]["blocks"], snapshot["kv"]["resident_tokens"]) == ("tree.snapshot", 3, 40)
    assert snapshot["kv"]["bytes"] == 3 * BLOCK_BYTES
    api.do(made["id"], "generate", n=3, into="children", max_tokens=40)
    blocks = ok(api.call("GET", f"/v1/trees/{made['tree_id']}"))["kv"]["blocks"]
    texts: list[str] = []
    resumed = {"last-event-id": str(last)}
    reader = threading.Thread(target=lambda: texts.append(api.call("GET", path, **resumed).text))
    reader.start()
    log = trees_of(server)[made["tree_id"]].events
    server.wait_until(lambda: bool(log._changed._waiters))
    api.drop(made["tree_id"])
    reader.join(10)
    told = parsed(texts[0])
    assert [one[0] for one in told] == list(range(last + 1, last + 1 + len(told)))
    deltas = [SIGNS[name] * data["blocks"] for _, name, data in told if name in SIGNS]
    assert deltas and 3 + sum(deltas) == blocks
    assert sum(name == "branch.created" for _, name, _ in told) == 3

"""Leases and pins: who keeps its blocks under pressure, and until when."""

from __future__ import annotations

from ramet.api.server.leases import sweep
from tests.api.server.test_branches import Api, ok
from tests.api.serving import Serve, Serving, error_of, make_llm


def at(server: Serving, now: float) -> None:
    """Let it be so late, and do what is due."""
    state = server.server.state
    state.clock = lambda: now
    for store in state.stores():
        server.run(sweep(state, store))


def flood(server: Serving) -> None:
    """Prompts that need all blocks."""
    for index in range(3):
        ok(server.post("/v1/completions", {"prompt": chr(97 + index) * 230, "max_tokens": 1}))


def cached(api: Api, branch: str) -> int:
    """How many of a branch's tokens were there when it went on."""
    before = api.get(branch)["kv"]["resident_tokens"]
    usage = api.do(branch, "generate", max_tokens=1)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == before
    return int(before)


def test_a_leased_branch_outlives_a_flood_and_another_does_not(serve: Serve) -> None:
    server = serve(make_llm(num_blocks=20))
    api = Api(server)
    leased = api.create(prompt="x" * 40, lease={"ttl": 60})["id"]
    plain = api.create(prompt="y" * 40)["id"]
    flood(server)
    assert (cached(api, leased), cached(api, plain)) == (40, 0)
    assert api.get(plain)["position"] == 41  # it works all the same
    for one in (leased, plain):
        api.drop(api.get(one)["tree_id"])


def test_when_a_lease_ends_the_branch_is_parked_and_use_renews_it(serve: Serve) -> None:
    server = serve()
    api = Api(server)
    at(server, 1000.0)
    root = api.create(prompt="x" * 40, lease={"ttl": 60})["id"]
    strict = api.create(prompt="z" * 40, lease={"ttl": 60, "renew_on_use": False})["id"]
    at(server, 1050.0)
    for one in (root, strict):
        api.do(one, "extend", text="!")
    at(server, 1061.0)
    assert api.get(root)["lease"]["expires_at"] == 1110.0
    assert [api.get(one)["state"] for one in (root, strict)] == ["idle", "parked"]
    assert api.get(strict)["lease"]["expires_at"] is None
    at(server, 1111.0)
    assert api.get(root)["state"] == "parked"
    text = api.do(root, "generate", temperature=0, max_tokens=4)["choices"][0]["text"]
    expected = make_llm().generate("x" * 40 + "!", temperature=0, max_tokens=4)[0].choices[0].text
    assert text == expected
    assert api.get(root)["lease"]["expires_at"] == 1171.0  # used again, so it holds again
    (child,) = api.do(root, "fork")["data"]
    assert child["lease"]["ttl"] == 60
    shown = ok(api.call("PATCH", f"/v1/branches/{root}", {"pin": "none"}))
    assert (shown["lease"], shown["pin"]) == (None, "none")
    for one in (root, strict):
        api.drop(api.get(one)["tree_id"])


def test_a_branch_that_nobody_uses_expires(serve: Serve) -> None:
    server = serve(branch_ttl=100.0)
    api = Api(server)
    at(server, 1000.0)
    old = api.create(prompt="x" * 40)
    kept = api.create(prompt="y", tree_id=old["tree_id"])["id"]
    at(server, 1090.0)
    api.do(kept, "extend", text="!")
    at(server, 1101.0)
    error = error_of(api.call("GET", f"/v1/branches/{old['id']}"), 404)
    assert error["code"] == "branch_expired"
    tree = ok(api.call("GET", f"/v1/trees/{old['tree_id']}"))
    assert (tree["branches"]["expired"], tree["branches"]["live"]) == (1, 1)
    at(server, 1200.0)
    assert error_of(api.call("GET", f"/v1/trees/{old['tree_id']}"), 404)


def test_pins_hold_within_a_budget_and_never_block_progress(serve: Serve) -> None:
    server = serve(make_llm(num_blocks=20), max_pinned_ratio=0.3)
    api = Api(server)
    pinned = api.create(prompt="x" * 80, pin="hard")
    assert (pinned["pin"], pinned["pinned_tokens"]) == ("hard", 80)
    other = api.create(prompt="y" * 32)["id"]
    response = api.call("PATCH", f"/v1/branches/{other}", {"pin": "hard"})
    error = error_of(response, 429)
    assert (error["code"], response.headers["x-should-retry"]) == ("pin_budget_exceeded", "false")
    assert api.get(other)["pin"] == "none"
    (shared,) = api.do(pinned["id"], "fork", pin="hard")["data"]  # the same blocks
    assert shared["pin"] == "hard"
    kv = ok(api.call("GET", f"/v1/trees/{pinned['tree_id']}"))["kv"]
    assert kv["pinned_bytes"] == kv["bytes"]  # blocks that both have count once
    flood(server)
    assert api.get(pinned["id"])["kv"]["resident_tokens"] == 80
    refused = server.post("/v1/completions", {"prompt": "z" * 300, "max_tokens": 1})
    error = error_of(refused, 429)
    assert (error["code"], refused.headers["x-should-retry"]) == ("kv_capacity_exhausted", "true")
    assert "retry-after" in refused.headers
    api.drop(pinned["tree_id"])
    assert ok(server.post("/v1/completions", {"prompt": "z" * 300, "max_tokens": 1}))
    api.drop(api.get(other)["tree_id"])


def test_without_a_budget_nothing_is_pinned(serve: Serve) -> None:
    server = serve()
    response = Api(server).call("POST", "/v1/branches", {"prompt": "a", "pin": "hard"})
    assert error_of(response, 429)["code"] == "pin_budget_exceeded"
    assert not server.llm.stats().pages.num_in_use

"""A retry with the same key does nothing twice."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from starlette.responses import Response

from ramet.api.server import idempotency
from ramet.api.server.errors import ApiError
from ramet.api.server.idempotency import Idempotency
from tests.api.server.test_branches import Api, ok
from tests.api.serving import Serve, Steps, error_of, make_llm


def test_a_replay_is_the_first_answer(serve: Serve) -> None:
    server = serve()
    api = Api(server)
    first = api.call("POST", "/v1/branches", {"prompt": "a"}, **{"idempotency-key": "k"})
    again = api.call("POST", "/v1/branches", {"prompt": "a"}, **{"idempotency-key": "k"})
    assert (again.status_code, again.json()) == (201, first.json())
    assert again.headers["idempotent-replayed"] == "true" and "idempotent-replayed" not in first.headers
    assert len(ok(api.call("GET", "/v1/branches"))["data"]) == 1
    other = api.call("POST", "/v1/branches", {"prompt": "b"}, **{"idempotency-key": "k"})
    error = error_of(other, 422)
    assert (error["code"], error["param"]) == ("idempotency_key_reused", "idempotency-key")
    path = f"/v1/branches/{first.json()['id']}/extend"
    assert error_of(api.call("POST", path, {"prompt": "a"}, **{"idempotency-key": "k"}), 422)
    for _ in range(2):
        assert ok(api.call("POST", path, {"text": "!"}, **{"idempotency-key": "e"}))["position"] == 2
    for _ in range(2):
        bad = api.call("POST", path, {"text": 1}, **{"idempotency-key": "bad"})
        assert error_of(bad, 400)["param"] == "text"
    body = {"prompt": "a", "seed": 1, "max_tokens": 3}
    replies = [api.call("POST", "/v1/completions", body, **{"idempotency-key": "c"}) for _ in range(2)]
    assert replies[0].json()["id"] == replies[1].json()["id"]
    for key, change in (("", {}), ("k" * 256, {}), ("s", {"stream": True})):
        response = api.call("POST", "/v1/completions", {**body, **change}, **{"idempotency-key": key})
        assert error_of(response, 400)["param"] == "idempotency-key"
    api.drop(first.json()["tree_id"])


def test_keys_are_each_tenants_own(serve: Serve) -> None:
    keys = ("sk-first-0001", "sk-other-0002")
    server = serve(keys=keys)
    body = {"prompt": "a", "max_tokens": 1}
    ids = [
        Api(server, key).call("POST", "/v1/completions", body, **{"idempotency-key": "k"}).json()["id"]
        for key in keys
    ]
    assert ids[0] != ids[1]


def test_two_at_once_are_one(serve: Serve) -> None:
    server = serve(make_llm(Steps()))
    api = Api(server)
    root = api.create(prompt="a")
    results: list[Any] = []

    def ask() -> None:
        path = f"/v1/branches/{root['id']}/generate"
        results.append(api.call("POST", path, {"max_tokens": 50}, **{"idempotency-key": "k"}).json())

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert results[0] == results[1] == results[2]
    assert api.get(root["id"])["position"] == 51
    api.drop(root["tree_id"])


def test_what_may_turn_out_otherwise_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(idempotency, "_MOST", 3)

    async def main() -> None:
        kept = Idempotency(lambda: now[0])
        calls: list[int] = []

        async def act(status: int = 200) -> Response:
            calls.append(status)
            if status == 0:
                raise ZeroDivisionError
            return Response(b"x", status)

        for status in (429, 503):
            for _ in range(2):
                assert (await kept.run("a", b"1", lambda status=status: act(status))).status_code == status  # type: ignore[misc]
        with pytest.raises(ZeroDivisionError):
            await kept.run("a", b"1", lambda: act(0))
        assert calls == [429, 429, 503, 503, 0]
        calls.clear()
        for _ in range(2):
            await kept.run("a", b"1", act)
        assert len(calls) == 1
        with pytest.raises(ApiError):
            await kept.run("a", b"2", act)
        now[0] = 601.0
        await kept.run("a", b"2", act)
        assert len(calls) == 2
        for key in "bcdefg":
            await kept.run(key, b"1", act)
        assert len(kept._kept) <= 3

    asyncio.run(main())

"""The verbs of branches over HTTP: the same tokens as in process, exact accounting, clear errors."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from typing import Any

import pytest

from ramet import LLM
from ramet.api.server import branch_store, branch_verbs, generating
from ramet.testing import ScriptedModel
from tests.api.server.test_sse import send
from tests.api.serving import END, LETTERS, Serve, Serving, Steps, byte_tokenizer, error_of, make_llm

HI = [{"role": "user", "content": "hi"}]


def ids(text: str) -> list[int]:
    return list(byte_tokenizer().encode(text))


def ok(response: Any, status: int = 200) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body: dict[str, Any] = response.json()
    return body


class Api:
    """The verbs, as one tenant calls them."""

    def __init__(self, server: Serving, key: str | None = None) -> None:
        self.server = server
        self.headers = {} if key is None else {"authorization": f"Bearer {key}"}

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        return self.server.http.request(method, path, json=body, headers={**self.headers, **headers})

    def create(self, **body: Any) -> dict[str, Any]:
        return ok(self.call("POST", "/v1/branches", body), 201)

    def do(self, branch: str, verb: str, **body: Any) -> dict[str, Any]:
        status = 201 if verb == "fork" else 200
        return ok(self.call("POST", f"/v1/branches/{branch}/{verb}", body), status)

    def fails(self, status: int, branch: str, verb: str, **body: Any) -> dict[str, Any]:
        return error_of(self.call("POST", f"/v1/branches/{branch}/{verb}", body), status)

    def get(self, branch: str, include: str = "token_ids,text") -> dict[str, Any]:
        return ok(self.call("GET", f"/v1/branches/{branch}?include={include}"))

    def drop(self, tree: str) -> dict[str, Any]:
        return ok(self.call("DELETE", f"/v1/trees/{tree}"))

    def stream(self, branch: str, **body: Any) -> list[dict[str, Any]]:
        """The data of the events, whose names must be their types."""
        response = self.call("POST", f"/v1/branches/{branch}/generate", {**body, "stream": True})
        assert response.status_code == 200, response.text
        *events, done, rest = response.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        found = []
        for one in events:
            name, data = one.split("\n") if one.startswith("event: ") else ("", one)
            found.append(json.loads(data.removeprefix("data: ")))
            assert name in ("", f"event: {found[-1].get('type')}")
        return found


@pytest.fixture
def api(shared: Serving) -> Any:
    """A tenant that leaves nothing behind."""
    one = Api(shared)
    yield one
    for tree in ok(one.call("GET", "/v1/trees?limit=100"))["data"]:
        one.drop(tree["id"])


def test_create_shows_everything(api: Api) -> None:
    body = {"prompt": "p" * 40, "name": "root", "metadata": {"a": "b"}, "lease": {"ttl": 60}}
    made = api.create(**body)
    assert made["object"] == "branch" and made["id"].startswith("br_")
    assert (made["position"], made["depth"], made["children"], made["parent_id"]) == (40, 0, 0, None)
    assert (made["name"], made["metadata"], made["checkpoints"]) == ("root", {"a": "b"}, {"prompt": 40})
    assert (made["state"], made["pin"], made["lease"]["ttl"]) == ("idle", "soft", 60)
    kv = made["kv"]
    assert (kv["resident_tokens"], kv["blocks"], kv["exclusive_blocks"]) == (40, 3, 3)
    assert kv["exclusive_bytes"] == 3 * 16 * 8  # the scripted model keeps 8 bytes a token
    assert made["usage"]["prompt_tokens_details"]["cache_write_tokens"] == 40
    assert api.get(made["id"])["text"] == "p" * 40
    lazy = api.create(token_ids=ids("zz"), prefill="lazy", tree_id=made["tree_id"])
    assert (lazy["kv"]["resident_tokens"], lazy["tree_id"]) == (0, made["tree_id"])


def test_the_same_tokens_as_in_process(api: Api) -> None:
    llm = make_llm()
    root = llm.branch("hello")
    kids = root.fork(2)
    kids[0].extend(" tool")
    expected = kids[0].generate(temperature=0, max_tokens=9)
    more = root.expand(n=3, seed=5, max_tokens=7)
    scores = kids[0].score(["ab", "c"])
    here = api.create(prompt="hello")["id"]
    first, second = (one["id"] for one in api.do(here, "fork", n=2)["data"])
    extension = api.do(first, "extend", text=" tool")
    assert (extension["start_position"], extension["position"]) == (5, 10)
    assert extension["token_ids"] == ids(" tool")
    generation = api.do(first, "generate", temperature=0, max_tokens=9, return_token_ids=True)
    (choice,) = generation["choices"]
    assert (choice["branch_id"], choice["token_ids"], choice["text"]) == (
        first,
        expected.token_ids,
        expected.text,
    )
    assert (choice["start_position"], choice["end_position"]) == (10, 19)
    assert choice["cumulative_logprob"] == pytest.approx(expected.cumulative_logprob)
    assert api.get(first)["token_ids"] == kids[0].token_ids
    assert api.get(second)["token_ids"] == ids("hello")
    grown = api.do(here, "generate", into="children", n=3, seed=5, max_tokens=7)["choices"]
    assert [api.get(one["branch_id"])["token_ids"] for one in grown] == [kid.token_ids for kid in more]
    told = api.do(first, "score", candidates=[{"text": "ab"}, {"text": "c"}])["scores"]
    assert [one["logprob"] for one in told] == [pytest.approx(max(s.logprob, -9999.0)) for s in scores]


def test_fork_at_any_token_and_while_generating(serve: Serve) -> None:
    server = serve(make_llm(Steps()))
    api = Api(server)
    root = api.create(prompt="hello world")["id"]
    (child,) = api.do(root, "fork", at=3)["data"]
    assert (child["position"], child["forked_at"], child["parent_id"], child["depth"]) == (3, 3, root, 1)
    assert api.get(child["id"])["text"] == "hel"
    thread = threading.Thread(target=lambda: api.do(root, "generate", max_tokens=120, seed=1))
    thread.start()
    server.wait_until(lambda: api.get(root)["position"] > 13)
    assert api.get(root)["state"] == "generating"
    (running,) = api.do(root, "fork")["data"]
    assert running["position"] > 11
    (earlier,) = api.do(root, "fork", at="prompt")["data"]
    assert earlier["position"] == 11
    thread.join(20)
    whole = api.get(root)["token_ids"]
    assert len(whole) == 131
    assert api.get(running["id"])["token_ids"] == whole[: running["position"]]
    made = api.create(**{"from": {"branch_id": root, "position": 5}})
    assert (made["parent_id"], made["position"]) == (root, 5)
    api.drop(child["tree_id"])


def test_operations_on_one_branch_queue_and_too_many_are_refused(serve: Serve) -> None:
    server = serve(make_llm(Steps()))
    api = Api(server)
    root = api.create(prompt="a")["id"]
    codes: list[Any] = []

    def generate() -> None:
        response = api.call("POST", f"/v1/branches/{root}/generate", {"max_tokens": 40})
        codes.append(response.json().get("error", {}).get("code"))
        if response.status_code != 200:
            assert (response.status_code, response.headers["x-should-retry"]) == (409, "false")

    threads = [threading.Thread(target=generate) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(map(str, codes)) == ["None"] * 8 + ["branch_busy"] * 2
    assert api.get(root)["position"] == 1 + 8 * 40
    api.drop(api.get(root)["tree_id"])


def test_children_have_their_own_params(api: Api) -> None:
    root = api.create(prompt="abc")["id"]
    params = [{"max_tokens": 2, "seed": 1}, {"max_tokens": 5, "temperature": 0}]
    choices = api.do(root, "generate", params=params)["choices"]
    assert [one["end_position"] for one in choices] == [5, 8]
    assert api.fails(400, root, "generate", params=params, n=2)["param"] == "params"
    assert api.fails(400, root, "generate", params=params, into="self")["param"] == "params"
    assert api.fails(400, root, "generate", params=[{"n": 2}])["param"] == "params.0.n"
    assert api.fails(400, root, "generate", n=2)["code"] == "n_requires_children"


def test_streams_tell_each_branch_what_it_got(api: Api) -> None:
    root = api.create(prompt="abc")["id"]
    whole = api.do(root, "generate", into="children", n=3, seed=2, max_tokens=6)["choices"]
    ask = {"into": "children", "n": 3, "seed": 2, "max_tokens": 6, "return_token_ids": True, "logprobs": True}
    events = api.stream(root, **ask)
    assert events[-1]["type"] == "generation.completed"
    assert events[-1]["usage"]["completion_tokens"] == 18
    done = {one["index"]: one for one in events if one["type"] == "branch.completed"}
    for index, choice in enumerate(whole):
        deltas = [one for one in events if one["type"].endswith("delta") and one["index"] == index]
        assert "".join(one["delta"] for one in deltas) == done[index]["text"] == choice["text"]
        assert [t for one in deltas for t in one["token_ids"]] == done[index]["token_ids"]
        assert len(done[index]["token_logprobs"]) == 6
        assert {one["branch_id"] for one in deltas} == {done[index]["branch_id"]}
        assert api.get(done[index]["branch_id"])["text"] == "abc" + choice["text"]
    before = api.get(root)["position"]
    events = api.stream(root, max_tokens=4, seed=1, checkpoint="after")
    assert [one["branch_id"] for one in events if one["type"] == "branch.completed"] == [root]
    assert api.get(root)["checkpoints"]["after"] == before + 4


def test_a_child_can_be_used_while_others_grow(serve: Serve) -> None:
    server = serve(make_llm(Steps()))
    api = Api(server)
    root = api.create(prompt="abc")["id"]
    body = {"params": [{"max_tokens": 1}, {"max_tokens": 300}], "stream": True}
    with server.http.stream("POST", f"/v1/branches/{root}/generate", json=body) as stream:
        lines = stream.iter_lines()  # kept: when it goes, the connection goes
        for line in lines:
            if line.startswith("data: ") and json.loads(line[6:])["type"] == "branch.completed":
                child = json.loads(line[6:])["branch_id"]
                break
        assert api.do(child, "extend", text="!")["position"] == 5
        assert api.get(root)["children"] == 2
        # One that still grows has its turn: who wants to change it waits, and then finds it gone.
        query = f"/v1/branches?parent_id={root}&state=generating"
        (growing,) = [one["id"] for one in ok(api.call("GET", query))["data"]]
        late: list[Any] = []
        path = f"/v1/branches/{growing}/extend"
        waits = threading.Thread(target=lambda: late.append(api.call("POST", path, {"text": "?"})))
        waits.start()
        api.do(growing, "fork")
        assert not late
    # The stream is closed: what was not complete is gone, what was is there.
    server.wait_until(lambda: api.get(root)["children"] == 1)
    waits.join(10)
    assert error_of(late[0], 404)["code"] == "branch_not_found"
    assert api.get(child)["text"].endswith("!")
    api.drop(api.get(root)["tree_id"])


def test_children_that_are_born_as_their_branch_is_pruned_go_with_it(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    api = Api(server)
    root = api.create(prompt="hello")
    asked = api.do(root["id"], "fork")["data"][0]["id"]
    real = generating.Generating._born

    def late(self: Any, branches: list[Any]) -> None:
        """On the engine's thread: the prune of the engine's branches has to wait for it."""
        path = f"/v1/branches/{asked}?scope=subtree"
        threading.Thread(target=server.http.delete, args=(path,)).start()
        server.wait_until(lambda: bool(self.entry.gone))
        real(self, branches)

    monkeypatch.setattr(generating.Generating, "_born", late)
    api.call("POST", f"/v1/branches/{asked}/generate", {"n": 2, "into": "children", "max_tokens": 3})
    assert [one["id"] for one in ok(api.call("GET", "/v1/branches"))["data"]] == [root["id"]]
    api.drop(root["tree_id"])


@pytest.mark.parametrize("forked", [True, False])
def test_a_branch_that_nobody_was_told_of_goes(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, forked: bool
) -> None:
    server = serve()
    root = Api(server).create(prompt="hello")
    looking = threading.Event()

    async def look(*_: Any) -> None:
        looking.set()
        await asyncio.sleep(60)

    monkeypatch.setattr(branch_verbs, "show_branch", look)
    raw = send(server, "/v1/branches", {"from": {"branch_id": root["id"]}} if forked else {"prompt": "hi"})
    assert looking.wait(10)
    assert len(server.llm.engine.sequences) == 2
    raw.close()
    server.wait_until(lambda: len(server.llm.engine.sequences) == 1)
    Api(server).drop(root["tree_id"])


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_leaves_the_branch_as_it_was(serve: Serve, stream: bool) -> None:
    llm = make_llm(Steps())
    server = serve(llm)
    api = Api(server)
    root = api.create(prompt="hello")["id"]
    for body in ({"max_tokens": 2000}, {"max_tokens": 2000, "into": "children", "n": 3}):
        raw = send(server, f"/v1/branches/{root}/generate", {**body, "stream": stream})
        server.wait_until(lambda: any(len(s.token_ids) > 15 for s in list(llm.engine.sequences)))
        raw.close()
        server.wait_until(lambda: not any(s.run for s in list(llm.engine.sequences)))
        server.wait_until(lambda: api.get(root)["children"] == 0)
        assert api.get(root)["position"] == 5
    text = api.do(root, "generate", temperature=0, max_tokens=5)["choices"][0]["text"]
    assert text == make_llm().generate("hello", temperature=0, max_tokens=5)[0].choices[0].text
    api.drop(api.get(root)["tree_id"])


def test_a_generation_may_go_on_without_its_client(serve: Serve) -> None:
    server = serve(make_llm(Steps()))
    api = Api(server)
    for stream in (True, False):
        root = api.create(prompt="hello")["id"]
        body = {"max_tokens": 100, "stream": stream, "on_disconnect": "continue"}
        raw = send(server, f"/v1/branches/{root}/generate", body)
        server.wait_until(lambda: api.get(root)["position"] > 8)  # noqa: B023
        raw.close()
        server.wait_until(lambda: api.get(root)["position"] == 105)  # noqa: B023
        api.drop(api.get(root)["tree_id"])


def test_cancel_keeps_the_tokens_so_far(serve: Serve) -> None:
    server = serve(make_llm(Steps()))
    api = Api(server)
    root = api.create(prompt="hello")["id"]
    replies: list[dict[str, Any]] = []
    for body in ({}, {"into": "children", "n": 2}):
        ask = {"max_tokens": 2000, "seed": 3, **body}
        thread = threading.Thread(target=lambda: replies.append(api.do(root, "generate", **ask)))  # noqa: B023
        thread.start()
        server.wait_until(lambda: any(len(s.token_ids) > 40 for s in list(server.llm.engine.sequences)))
        api.do(root, "cancel")
        thread.join(10)
        for choice in replies[-1]["choices"]:
            assert choice["finish_reason"] == "cancelled" and 0 < len(choice["text"]) < 2000
            assert api.get(choice["branch_id"])["text"].endswith(choice["text"])
        api.do(root, "truncate", position=5)
    api.do(root, "cancel")  # nothing to cancel is no error
    api.drop(api.get(root)["tree_id"])


def test_who_leaves_the_queue_takes_nothing_from_who_is_served(serve: Serve) -> None:
    llm = make_llm(Steps())
    server = serve(llm)
    api = Api(server)
    root = api.create(prompt="hello")["id"]
    replies: list[dict[str, Any]] = []
    ask = {"into": "children", "n": 2, "max_tokens": 2000}
    served = threading.Thread(target=lambda: replies.append(api.do(root, "generate", **ask)))
    served.start()
    server.wait_until(lambda: api.get(root)["children"] == 2)
    entry = server.server.state.tenants.get("local").branches.get(root)
    with send(server, f"/v1/branches/{root}/generate", ask):
        server.wait_until(lambda: entry._queued == 2)
    server.wait_until(lambda: entry._queued == 1)
    api.do(root, "cancel")
    served.join(10)
    assert [one["finish_reason"] for one in replies[0]["choices"]] == ["cancelled"] * 2
    api.drop(api.get(root)["tree_id"])


@pytest.mark.parametrize("stream", [True, False])
def test_what_is_cancelled_before_the_first_token_has_no_children(serve: Serve, stream: bool) -> None:
    llm = make_llm(max_batch_tokens=16)
    server = serve(llm)
    api = Api(server)
    root = api.create(prompt="hello " * 20, prefill="lazy")["id"]
    goes_on = threading.Event()
    llm.on_step(lambda: goes_on.wait(10))  # after the first of several chunks
    replies: list[Any] = []

    def ask(verb: str, body: Any = None) -> threading.Thread:
        path = f"/v1/branches/{root}/{verb}"
        thread = threading.Thread(target=lambda: replies.append(api.call("POST", path, body).text))
        thread.start()
        return thread

    threads = [ask("generate", {"into": "children", "n": 2, "max_tokens": 4, "stream": stream})]
    server.wait_until(lambda: bool(llm.engine.scheduler.running))
    threads.append(ask("cancel"))
    # A stream's first read is in the queue as well.
    server.wait_until(lambda: server.server.state.engine._commands.qsize() > stream)
    goes_on.set()
    for thread in threads:
        thread.join(10)
    told = next(text for text in replies if "object" not in text)
    assert '"code":"cancelled"' in told
    assert api.get(root)["children"] == 0
    api.drop(api.get(root)["tree_id"])


def test_a_score_stands_in_nobodys_way(serve: Serve) -> None:
    steps = Steps()
    server = serve(make_llm(steps))
    api = Api(server)
    root = api.create(prompt="hello")["id"]
    steps.open.clear()
    scores: list[dict[str, Any]] = []
    candidates = [{"text": "abc"}, {"text": "d"}]
    scoring = threading.Thread(target=lambda: scores.append(api.do(root, "score", candidates=candidates)))
    scoring.start()
    server.wait_until(lambda: any(s.run is not None for s in list(server.llm.engine.sequences)))
    extending = threading.Thread(target=lambda: api.do(root, "extend", text="!"))
    extending.start()
    server.wait_until(lambda: server.server.state.engine._commands.qsize() > 0)
    steps.open.set()
    scoring.join(10)
    extending.join(10)
    assert scores[0]["position"] == 5 and api.get(root)["text"] == "hello!"
    api.drop(api.get(root)["tree_id"])


def test_score_in_all_forms(api: Api) -> None:
    root = api.create(prompt="abc")["id"]
    before = api.get(root)
    llm = make_llm()
    twin = llm.branch("abc")
    best = twin.fork()[0].generate(temperature=0, max_tokens=2).token_ids
    (known,) = twin.score([best])
    candidates = [{"token_ids": best}, {"token_ids": best[:1]}]
    ask = {"candidates": candidates, "return_token_logprobs": True}
    first, second = api.do(root, "score", **ask)["scores"]
    assert first["is_greedy"] and first["token_logprobs"] == pytest.approx(known.token_logprobs)
    assert (first["num_tokens"], second["num_tokens"]) == (2, 1)
    assert first["score"] == first["logprob"]
    mean = api.do(root, "score", **ask, normalize="tokens")["scores"]
    assert mean[0]["score"] == pytest.approx(known.mean_logprob)
    shares = [one["score"] for one in api.do(root, "score", **ask, normalize="softmax")["scores"]]
    assert sum(shares) == pytest.approx(1) and shares[1] > shares[0]
    labels = ["a", "b", "c"]
    assert ids("abc") == LETTERS[:3]
    told = api.do(root, "score", next_token_candidates=labels)["next_token"]
    assert [one["token_id"] for one in told] == LETTERS[:3]
    after = api.do(root, "score", candidates=candidates, suffix={"text": "?"})["scores"]
    (fork,) = twin.fork()
    fork.extend("?")
    assert after[0]["logprob"] == pytest.approx(max(fork.score([best])[0].logprob, -9999.0))
    assert {**api.get(root), "expires_at": 0} == {**before, "expires_at": 0}
    assert api.fails(400, root, "score")["param"] == "candidates"
    assert api.fails(400, root, "score", candidates=[{}])["param"] == "candidates.0"
    assert api.fails(400, root, "score", candidates=[{"text": ""}])["param"] == "candidates.0"
    assert api.fails(400, root, "score", candidates=[{"token_ids": [999]}])["param"] == "candidates.0"
    error = api.fails(400, root, "score", next_token_candidates=["a", "two"])
    assert error["param"] == "next_token_candidates.1"
    assert api.fails(400, root, "score", candidates=[{"text": "a"}] * 257)["param"] == "candidates"


def test_truncate_promote_and_delete_free_what_only_they_held(serve: Serve) -> None:
    server = serve()
    api = Api(server)
    made = api.create(prompt="p" * 32)
    root, tree = made["id"], made["tree_id"]
    kids = [
        one["branch_id"]
        for one in api.do(root, "generate", into="children", n=4, seed=1, max_tokens=40)["choices"]
    ]
    (grandchild,) = api.do(kids[0], "fork")["data"]
    shown = api.do(kids[1], "truncate", position=33, expect_position=72)
    assert (shown["position"], shown["forked_at"]) == (33, 32)
    gone = ok(api.call("DELETE", f"/v1/branches/{kids[2]}"))
    assert gone["deleted"] and gone["num_branches"] == 1
    assert error_of(api.call("GET", f"/v1/branches/{kids[2]}"), 404)["code"] == "branch_not_found"
    free = server.llm.stats().pages.num_free
    promotion = api.do(kids[0], "promote")
    assert promotion["num_branches"] == 2 and promotion["freed_blocks"] > 0
    assert server.llm.stats().pages.num_free == free + promotion["freed_blocks"]
    assert promotion["freed_bytes"] == promotion["freed_blocks"] * 16 * 8
    left = ok(api.call("GET", f"/v1/branches?tree_id={tree}"))["data"]
    assert [one["id"] for one in left] == [root, kids[0], grandchild["id"]]
    freed = ok(api.call("DELETE", f"/v1/branches/{root}?scope=subtree"))
    assert freed["num_branches"] == 3
    assert server.llm.stats().pages.num_in_use == 0
    assert error_of(api.call("GET", f"/v1/trees/{tree}"), 404)["code"] == "tree_not_found"


def test_promote_up_to_an_ancestor(api: Api) -> None:
    root = api.create(prompt="ab")["id"]
    a, b = (one["id"] for one in api.do(root, "fork", n=2)["data"])
    a1, a2 = (one["id"] for one in api.do(a, "fork", n=2)["data"])
    assert api.fails(400, a1, "promote", ancestor=b)["param"] == "ancestor"
    assert api.fails(400, a1, "promote", ancestor=a1)["param"] == "ancestor"
    assert api.do(a1, "promote")["num_branches"] == 1
    assert api.get(b)
    assert api.do(a1, "promote", ancestor="root")["num_branches"] == 1
    assert error_of(api.call("GET", f"/v1/branches/{b}"), 404)
    assert api.do(root, "promote")["num_branches"] == 0
    assert error_of(api.call("GET", f"/v1/branches/{a2}"), 404)


def test_patch(api: Api) -> None:
    root = api.create(prompt="abc")["id"]
    path = f"/v1/branches/{root}"
    shown = ok(api.call("PATCH", path, {"name": "n", "annotations": {"Q": 0.5}, "checkpoint": "here"}))
    assert (shown["name"], shown["annotations"], shown["checkpoints"]["here"]) == ("n", {"Q": 0.5}, 3)
    shown = ok(api.call("PATCH", path, {"annotations": {"visits": 3.0}, "metadata": {"k": "v"}}))
    assert shown["annotations"] == {"Q": 0.5, "visits": 3.0} and shown["name"] == "n"
    for body, param in (
        ({"name": "x" * 129}, "name"),
        ({"metadata": {"k" * 65: "v"}}, f"metadata.{'k' * 65}.[key]"),
        ({"metadata": {str(i): "v" for i in range(17)}}, "metadata"),
        ({"lease": {"ttl": 0}}, "lease.ttl"),
        ({"pin": "iron"}, "pin"),
        ({"position": 1}, "position"),
        ({"annotations": {"Q": "x" * 513}}, "annotations.Q"),
        ({"annotations": {str(i): 1 for i in range(31)}, "checkpoint": "late", "pin": "soft"}, "annotations"),
        ({"annotations": {"Q": 10**400}}, "annotations.Q"),
    ):
        assert error_of(api.call("PATCH", path, body), 400)["param"].startswith(param)
    assert api.get(root, "") == {**shown, "usage": api.get(root, "")["usage"]}, "nothing of it was done"


def test_messages_are_exact_deltas(api: Api) -> None:
    made = api.create(messages=HI)
    root = made["id"]
    assert api.get(root)["text"] == "<s>u:hi</s><s>a:"
    reply = api.do(root, "generate", max_tokens=4, temperature=0)["choices"][0]["text"]
    before = api.get(root)["token_ids"]
    tool = [{"role": "tool", "tool_call_id": "c", "content": "42</s>"}]
    extension = api.do(root, "extend", messages=tool, checkpoint="tool", expect_position=len(before))
    assert (extension["render"], extension["template_exact"]) == ("delta", True)
    held = api.get(root, "token_ids,text,messages")
    assert held["text"] == f"<s>u:hi</s><s>a:{reply}</s><s>t:42</s></s><s>a:"
    assert held["token_ids"][: len(before)] == before
    assert extension["token_ids"].count(END) == 2
    rendered = [*HI, {"role": "assistant", "content": reply}, *tool]
    whole = api.server.post("/v1/chat/completions/render", {"messages": rendered}).json()["prompt_token_ids"]
    assert held["token_ids"] == whole
    assert held["messages"][1] == {"role": "assistant", "content": reply}
    # A fork before the tool's answer knows the conversation up to there.
    (fork,) = api.do(root, "fork", at=len(before) - 1)["data"]
    api.do(fork["id"], "extend", messages=[{"role": "user", "content": "no"}])
    assert api.get(fork["id"])["text"] == f"<s>u:hi</s><s>a:{reply[:-1]}</s><s>u:no</s><s>a:"
    (early,) = api.do(root, "fork", at=5)["data"]
    assert api.fails(400, early["id"], "extend", messages=tool)["param"] == "messages"
    plain = api.create(prompt="abc")["id"]
    assert api.fails(400, plain, "extend", messages=tool)["param"] == "messages"


def test_a_template_that_rewrites_the_past_is_refused_unless_told_otherwise(serve: Serve) -> None:
    hf = byte_tokenizer()
    hf.chat_template = (  # forgets all answers but the last message's, as templates do with old thoughts
        "{% for m in messages %}<s>{{ m.role[0] }}:"
        "{{ m.content if m.role != 'assistant' or loop.last else '-' }}</s>"
        "{% endfor %}{% if add_generation_prompt %}<s>a:{% endif %}"
    )
    server = serve(LLM(ScriptedModel(lambda past: LETTERS[0], 258), hf, num_blocks=64))
    api = Api(server)
    root = api.create(messages=HI)["id"]
    api.do(root, "generate", max_tokens=3)
    forks = [one["id"] for one in api.do(root, "fork", n=2)["data"]]
    more = [{"role": "user", "content": "b"}]
    assert api.fails(400, root, "extend", messages=more)["code"] == "template_not_prefix_stable"
    assert api.get(root)["text"] == "<s>u:hi</s><s>a:aaa"
    told = api.do(forks[0], "extend", messages=more, on_mismatch="rerender")
    assert api.get(forks[0])["text"] == "<s>u:hi</s><s>a:-</s><s>u:b</s><s>a:"
    assert (told["render"], told["reused_tokens"]) == ("rerender", len(ids("<s>u:hi</s><s>a:")))
    assert api.do(forks[1], "extend", messages=more, on_mismatch="append_delta")["render"] == "append_delta"
    assert api.get(forks[1])["text"].startswith("<s>u:hi</s><s>a:aaa")
    api.drop(api.get(root)["tree_id"])


def test_text_of_the_models_own_spelling_is_kept(serve: Serve, make_smollm2: Any) -> None:
    """The model may write a text in other tokens than the tokenizer would: they stay."""
    server = serve(make_smollm2())
    api = Api(server)
    root = api.create(messages=HI)["id"]
    spelled = [one for letter in ("H", "e", "l", "l", "o") for one in server.llm.encode(letter)]
    assert spelled != server.llm.encode("Hello")
    api.do(root, "extend", token_ids=spelled)
    told = api.do(root, "extend", messages=[{"role": "user", "content": "and <|im_end|> now?"}])
    assert (told["render"], told["template_exact"]) == ("delta", False)
    held = api.get(root)
    assert held["token_ids"][31 : 31 + 5] == spelled
    assert held["text"].endswith(
        "Hello<|im_end|>\n<|im_start|>user\nand <|im_end|> now?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert held["token_ids"].count(2) == 4  # system, user, assistant, user: the typed one is text
    api.drop(held["tree_id"])


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("fork", {"n": 0}, "n"),
    ("fork", {"n": 129}, "n"),
    ("fork", {"n": True}, "n"),
    ("fork", {"at": 0}, "at"),
    ("fork", {"at": 6}, "at"),
    ("fork", {"at": -1}, "at"),
    ("fork", {"at": 1.0}, "at"),
    ("fork", {"at": True}, "at"),
    ("fork", {"at": "nowhere"}, "at"),
    ("fork", {"at": 10**30}, "at"),
    ("extend", {}, "token_ids"),
    ("extend", {"text": "a", "token_ids": [1]}, "token_ids"),
    ("extend", {"token_ids": [258]}, "token_ids"),
    ("extend", {"token_ids": [1.5]}, "token_ids.0"),
    ("extend", {"text": 5}, "text"),
    ("extend", {"text": "a", "prefill": "lazy", "return_logprobs": True}, "return_logprobs"),
    ("generate", {"temperature": -1}, "temperature"),
    ("generate", {"max_tokens": 0}, "max_tokens"),
    ("generate", {"n": 129, "into": "children"}, "n"),
    ("generate", {"prompt_logprobs": 1}, "prompt_logprobs"),
    ("generate", {"top_logprobs": 1}, "top_logprobs"),
    ("generate", {"stop": ""}, "stop"),
    ("generate", {"into": "other"}, "into"),
    ("generate", {"params": []}, "params"),
    ("generate", {"tools": [{}]}, "tools"),
    ("generate", {"wrong": 1}, "wrong"),
    ("truncate", {}, "position"),
    ("truncate", {"position": 0}, "position"),
    ("truncate", {"position": 6}, "position"),
    ("truncate", {"checkpoint": "x"}, "checkpoint"),
    ("promote", {"ancestor": "br_x"}, "ancestor"),
    ("promote", {"ancestor": ""}, "ancestor"),
]


@pytest.mark.parametrize(("verb", "body", "param"), BAD, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input_names_its_field_and_changes_nothing(
    api: Api, verb: str, body: dict[str, Any], param: str, stream: bool
) -> None:
    root = api.create(prompt="hello")["id"]
    if stream and verb == "generate":
        body = {**body, "stream": True}
    assert api.fails(400, root, verb, **body)["param"] == param
    assert api.get(root)["text"] == "hello" and api.get(root)["children"] == 0


def test_bad_creations(api: Api) -> None:
    root = api.create(prompt="hello")["id"]
    for body, param in (
        ({}, "messages"),
        ({"prompt": "a", "token_ids": [1]}, "messages"),
        ({"prompt": ""}, "prompt"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"prompt": "a", "tools": [{"type": "function"}]}, "tools"),
        ({"prompt": "a", "from_": {"branch_id": "x"}}, "from_"),
        ({"from": {"branch_id": 7}}, "from.branch_id"),
        ({"from": {"branch_id": root, "position": 9}}, "from.position"),
        ({"from": {"branch_id": root, "position": "nowhere"}}, "from.position"),
        ({"prompt": "a", "pin": 1}, "pin"),
        ({"prompt": "a", "lease": {"ttl": "5"}}, "lease.ttl"),
    ):
        assert error_of(api.call("POST", "/v1/branches", body), 400)["param"] == param
    unknown: list[tuple[dict[str, Any], str, str]] = [
        ({"from": {"branch_id": "br_x"}}, "branch_not_found", "from.branch_id"),
        ({"prompt": "a", "tree_id": "tree_x"}, "tree_not_found", "tree_id"),
        ({"prompt": "a", "model": "other"}, "model_not_found", "model"),
    ]
    for body, code, param in unknown:
        error = error_of(api.call("POST", "/v1/branches", body), 404)
        assert (error["code"], error["param"]) == (code, param)
    assert len(ok(api.call("GET", "/v1/branches"))["data"]) == 1


def test_what_can_never_fit_names_the_field_that_is_too_long(serve: Serve) -> None:
    server = serve(make_llm(max_model_len=64))
    api = Api(server)
    root = api.create(prompt="a" * 60)["id"]
    long = "b" * 70
    chat = [{"role": "user", "content": long}]
    calls: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/branches", {"prompt": long}, "prompt"),
        ("/v1/branches", {"messages": chat}, "messages"),
        ("/v1/branches", {"token_ids": ids(long), "prefill": "lazy"}, "token_ids"),
        ("/v1/beam_search", {"prompt": long}, "prompt"),
        ("/v1/beam_search", {"messages": chat, "stream": True}, "messages"),
        ("/v1/beam_search", {"token_ids": ids(long), "return_branches": True}, "token_ids"),
        ("/v1/chat/completions", {"messages": chat}, "messages"),
        ("/v1/chat/completions", {"messages": chat, "stream": True}, "messages"),
        ("/v1/chat/completions", {"messages": chat, "store_branch": True}, "messages"),
        ("/v1/chat/completions", {"messages": chat, "branch_id": root, "store_branch": True}, "messages"),
        (f"/v1/branches/{root}/extend", {"text": "12345"}, "text"),
        (f"/v1/branches/{root}/extend", {"token_ids": ids("12345"), "prefill": "lazy"}, "token_ids"),
        (f"/v1/branches/{root}/score", {"candidates": [{"text": "123456"}]}, "candidates"),
        (
            f"/v1/branches/{root}/score",
            {"candidates": [{"text": "1"}], "suffix": {"text": "12345"}},
            "suffix",
        ),
    ]
    for path, body, param in calls:
        error = error_of(api.call("POST", path, body), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", param), (path, body)
    api.do(root, "generate", max_tokens=9)  # to the end: 64 tokens and one that is not fed
    assert api.fails(400, root, "generate")["param"] is None  # no field is too long, the branch is
    api.drop(api.get(root)["tree_id"])


def test_an_expected_position_that_is_not_met_is_a_conflict(api: Api) -> None:
    root = api.create(prompt="hello")["id"]
    for verb, body in (("extend", {"text": "a"}), ("generate", {}), ("truncate", {"position": 1})):
        error = api.fails(409, root, verb, expect_position=4, **body)
        assert (error["type"], error["code"]) == ("conflict_error", "head_moved")
    assert api.get(root)["position"] == 5


def test_extend_knows_the_logprobs_of_what_is_appended(api: Api) -> None:
    root = api.create(prompt="abc")["id"]
    score = api.do(root, "score", candidates=[{"text": "xyz"}], return_token_logprobs=True)["scores"][0]
    told = api.do(root, "extend", text="xyz", return_logprobs=True)
    assert told["token_logprobs"] == pytest.approx(score["token_logprobs"])


def test_checkpoints_are_bounded_before_anything_runs(api: Api) -> None:
    root = api.create(prompt="a")["id"]
    for index in range(63):  # and "prompt"
        api.do(root, "extend", text="b", prefill="lazy", checkpoint=f"c{index}")
    for verb, body in (("extend", {"text": "b"}), ("generate", {})):
        assert api.fails(400, root, verb, checkpoint="more", **body)["param"] == "checkpoint"
    assert api.get(root)["position"] == 64
    api.do(root, "extend", text="b", checkpoint="c0")
    assert api.get(root)["checkpoints"]["c0"] == 65


def test_lists_have_pages(api: Api) -> None:
    root = api.create(prompt="a")["id"]
    kids = [one["id"] for one in api.do(root, "fork", n=5)["data"]]
    page = ok(api.call("GET", f"/v1/branches?parent_id={root}&limit=2"))
    assert [one["id"] for one in page["data"]] == kids[:2] and page["has_more"]
    page = ok(api.call("GET", f"/v1/branches?parent_id={root}&limit=4&after={page['last_id']}"))
    assert [one["id"] for one in page["data"]] == kids[2:] and not page["has_more"]
    newest = ok(api.call("GET", "/v1/branches?order=desc&limit=1"))
    assert newest["first_id"] == kids[-1]
    assert ok(api.call("GET", "/v1/branches?state=generating"))["data"] == []
    assert len(ok(api.call("GET", "/v1/branches?state=idle"))["data"]) == 6
    for query in ("limit=0", "limit=101", "limit=a", "order=up", "state=x", "after=br_x"):
        assert error_of(api.call("GET", f"/v1/branches?{query}"), 400)["param"] == query.split("=")[0]
    assert error_of(api.call("GET", f"/v1/branches/{root}?include=all"), 400)["param"] == "include"
    assert error_of(api.call("DELETE", f"/v1/branches/{root}?scope=all"), 400)["param"] == "scope"


def test_trees_account_for_what_their_branches_share(api: Api) -> None:
    made = api.create(prompt="p" * 40)
    kids = api.do(made["id"], "generate", into="children", n=3, seed=1, max_tokens=9)["choices"]
    tree = ok(api.call("GET", f"/v1/trees/{made['tree_id']}?include=nodes,blocks"))
    assert tree["branches"]["live"] == 4
    assert tree["tokens"]["logical"] == 40 + 3 * 48  # the last token of each child has no KV yet
    nodes = tree["nodes"]["data"]
    assert sum(node["end"] - node["start"] for node in nodes) == tree["tokens"]["physical"]
    assert tree["tokens"]["sharing_ratio"] == pytest.approx(184 / tree["tokens"]["physical"], abs=1e-4)
    assert len({block for node in nodes for block in node["blocks"]}) == tree["kv"]["blocks"]
    stem = nodes[0]
    assert (stem["start"], stem["end"], stem["num_sharers"], stem["preview"]) == (0, 32, 4, "p" * 24)
    ends = [one for node in nodes for one in node["branches"]]
    assert sorted(ends) == sorted([made["id"], *(kid["branch_id"] for kid in kids)])
    table = api.get(made["id"], "block_table")["block_table"]
    assert table["blocks"][:2] == stem["blocks"] and table["filled"] == 8
    exclusive = [api.get(one)["kv"]["exclusive_blocks"] for one in ends]
    assert sum(exclusive) + tree["kv"]["shared_blocks"] == tree["kv"]["blocks"]
    (listed,) = ok(api.call("GET", "/v1/trees"))["data"]
    assert listed["id"] == made["tree_id"]


def test_limits(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = ok(api.call("GET", "/v1/limits"))
    assert (limits["max_branches"], limits["max_branches_per_tree"]) == (4096, 1024)
    monkeypatch.setattr(branch_store, "MAX_TREE_BRANCHES", 4)
    monkeypatch.setattr(branch_store, "MAX_TREE_TOKENS", 50)
    made = api.create(prompt="hello")
    api.do(made["id"], "fork", n=3)
    refused = api.call("POST", f"/v1/branches/{made['id']}/fork", {})
    assert error_of(refused, 429)["code"] == "branch_limit_exceeded"
    assert refused.headers["x-should-retry"] == "false"
    assert api.fails(429, made["id"], "generate", into="children")["code"] == "branch_limit_exceeded"
    assert api.fails(429, made["id"], "extend", text="a" * 46)["code"] == "tree_token_limit_exceeded"
    assert api.fails(429, made["id"], "generate", max_tokens=46)["code"] == "tree_token_limit_exceeded"
    api.do(made["id"], "generate", max_tokens=45)
    monkeypatch.setattr(branch_store, "MAX_BRANCHES", 4)
    error = error_of(api.call("POST", "/v1/branches", {"prompt": "a"}), 429)
    assert error["code"] == "branch_limit_exceeded"


def test_a_client_that_goes_away_in_a_batch_leaves_nothing_and_no_trace_in_the_log(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(make_llm(Steps()))
    root = Api(server).create(prompt="hello")
    search = {"op": "beam_search", "branch_id": root["id"], "body": {"num_beams": 2, "max_tokens": 2000}}
    raw = send(server, "/v1/branches/batch", {"ops": [search, {**search, "op": "generate", "body": {}}]})
    server.wait_until(lambda: any(len(s.token_ids) > 9 for s in list(server.llm.engine.sequences)))
    raw.close()
    server.wait_until(lambda: len(server.llm.engine.sequences) == 1)
    Api(server).drop(root["tree_id"])
    gc.collect()  # where what nobody has asked for is told of
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_batch_runs_operations_side_by_side(api: Api) -> None:
    root = api.create(prompt="hello")["id"]
    kids = [one["id"] for one in api.do(root, "fork", n=3)["data"]]
    ops: list[dict[str, Any]] = [
        {"op": "generate", "branch_id": kids[0], "body": {"max_tokens": 3, "temperature": 0}},
        {"op": "extend", "branch_id": kids[1], "body": {"text": "!"}},
        {"op": "score", "branch_id": root, "body": {"candidates": [{"text": "a"}]}},
        {"op": "generate", "branch_id": root, "body": {"temperature": -1}},
        {"op": "fork", "branch_id": "br_unknown"},
        {"op": "generate", "branch_id": root, "body": {"stream": True}},
        {"op": "get", "branch_id": root},
        {"op": "delete", "branch_id": kids[2], "body": {"scope": "subtree"}},
        {"op": "delete", "branch_id": root, "body": {"scope": "all"}},
    ]
    results = ok(api.call("POST", "/v1/branches/batch", {"ops": ops}))["data"]
    assert [one["index"] for one in results] == list(range(9))
    assert [one["status"] for one in results] == [200, 200, 200, 400, 404, 400, 200, 200, 400]
    assert results[1]["result"]["position"] == 6
    errors = [one["error"] for one in results if one["error"] is not None]
    assert [(one["code"], one["param"]) for one in errors] == [
        ("invalid_value", "ops.3.body.temperature"),
        ("branch_not_found", "ops.4.branch_id"),
        ("unsupported_parameter", "ops.5.body.stream"),
        ("invalid_value", "ops.8.body"),
    ]
    response = api.call("POST", "/v1/branches/batch", {"ops": ops[:4], "stream": True})
    *events, done, _ = response.text.split("\n\n")
    assert done == "data: [DONE]"
    told = [json.loads(one.split("data: ")[1]) for one in events]
    assert sorted(one["index"] for one in told) == [0, 1, 2, 3]
    for bad in ([], [ops[0]] * 257, [{"op": "burn", "branch_id": root}]):
        assert error_of(api.call("POST", "/v1/branches/batch", {"ops": bad}), 400)


def test_other_tenants_branches_are_unknown_and_never_looked_up(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ("sk-first-0001", "sk-other-0002")
    server = serve(keys=keys)
    mine, theirs = (Api(server, key) for key in keys)
    made = theirs.create(prompt="secret " * 10)
    mine.create(prompt="own")
    tenants = {one.name: one for one in server.server.state.tenants}
    assert len(tenants) == 2
    looked: list[Any] = []
    owner = next(one for one in tenants.values() if made["id"] in one.branches._entries)

    class Counted(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            looked.append(key)
            return super().__getitem__(key)

        def get(self, key: str, default: Any = None) -> Any:
            looked.append(key)
            return super().get(key, default)

    owner.branches._entries = Counted(owner.branches._entries)
    owner.branches.trees = Counted(owner.branches.trees)
    bodies: dict[str, dict[str, Any]] = {
        "fork": {},
        "extend": {"text": "a"},
        "generate": {},
        "beam_search": {},
        "score": {"candidates": [{"text": "a"}]},
        "truncate": {"position": 1},
        "promote": {},
        "cancel": {},
    }

    def refusals(branch: str, tree: str) -> list[str]:
        calls = [("POST", f"/v1/branches/{branch}/{verb}", body) for verb, body in bodies.items()]
        calls += [(method, f"/v1/branches/{branch}", {}) for method in ("GET", "PATCH", "DELETE")]
        calls += [("GET", f"/v1/trees/{tree}", {}), ("DELETE", f"/v1/trees/{tree}", {})]
        calls += [("GET", f"/v1/trees/{tree}/events", {})]
        calls += [("POST", "/v1/branches", {"from": {"branch_id": branch}})]
        calls += [("POST", "/v1/branches", {"prompt": "a", "tree_id": tree})]
        chat = {"messages": [{"role": "user", "content": "a"}], "branch_id": branch}
        calls += [("POST", "/v1/chat/completions", {**chat, "store_branch": keep}) for keep in (True, False)]
        said = []
        for call in calls:
            response = mine.call(*call)
            error_of(response, 404)
            said.append(response.text.replace(branch, "ID").replace(tree, "ID"))
        ops = [{"op": "get", "branch_id": branch}]
        (result,) = ok(mine.call("POST", "/v1/branches/batch", {"ops": ops}))["data"]
        return [*said, json.dumps(result).replace(branch, "ID")]

    theirs_said = refusals(made["id"], made["tree_id"])
    nobodys_said = refusals("br_" + "0" * 24, "tree_" + "0" * 24)
    assert theirs_said == nobodys_said
    assert looked == []
    assert len(ok(mine.call("GET", "/v1/branches"))["data"]) == 1
    assert ok(mine.call("GET", "/v1/trees"))["data"][0]["id"] != made["tree_id"]
    assert theirs.get(made["id"])["text"] == "secret " * 10
    assert looked
    again = mine.create(prompt="secret " * 10)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    for one in (mine, theirs):
        for tree in ok(one.call("GET", "/v1/trees"))["data"]:
            one.drop(tree["id"])


def test_many_idle_branches_add_nothing_to_a_step(serve: Serve) -> None:
    llm = make_llm()
    llm.engine.listeners.clear()  # which count everything
    server = serve(llm)
    api = Api(server)
    made = api.create(prompt="a" * 33)

    def seconds() -> float:
        body = {"prompt": "xyz", "max_tokens": 150}
        best = 9.0
        for _ in range(3):
            start = time.perf_counter()
            ok(server.post("/v1/completions", body))
            best = min(best, time.perf_counter() - start)
        return best

    alone = seconds()
    for _ in range(8):
        api.do(made["id"], "fork", n=125)
    assert len(llm.engine.sequences) == 1001
    assert seconds() < 2 * alone + 0.05
    api.drop(made["tree_id"])

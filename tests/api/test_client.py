"""The clients: the verbs of an in-process branch, blocking and asynchronous, and retries that are safe."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest

import ramet
from ramet.api import async_client, client, client_calls
from ramet.api.async_client import AsyncClient
from ramet.api.client import Client
from ramet.api.client_calls import BeamProgress, Choice, Delta, EventReader
from tests.api.serving import LETTERS, Serve, Serving, Steps, byte_tokenizer, make_llm

HI = [{"role": "user", "content": "hi"}]


def test_the_verbs_are_those_of_a_branch_in_process(shared: Serving) -> None:
    llm = make_llm()
    here = llm.branch("hello")
    with Client(shared.url) as client, client.branch("hello", name="root", lease=60) as root:
        assert (len(root), root.text, root.token_ids) == (5, "hello", here.token_ids)
        assert root.info["lease"]["ttl"] == 60
        (kid,), (there,) = here.fork(1, at=3), root.fork(1, at=3)
        kid.extend(" tool")
        assert there.extend(" tool") == kid.token_ids[3:]
        there.extend(byte_tokenizer().encode("!"))
        kid.extend("!")
        expected = kid.generate(seed=4, max_tokens=8, stop=["zzz"])
        choice = there.generate(seed=4, max_tokens=8, stop=["zzz"])
        assert (choice.text, choice.token_ids, choice.finish_reason) == (
            expected.text,
            expected.token_ids,
            expected.finish_reason,
        )
        assert choice.token_logprobs == pytest.approx(expected.token_logprobs)
        assert choice.mean_logprob == pytest.approx(expected.mean_logprob)
        assert there.output is choice
        grown = there.expand(n=3, seed=1, max_tokens=5)
        assert [one.token_ids for one in grown] == [
            one.token_ids for one in kid.expand(n=3, seed=1, max_tokens=5)
        ]
        each = there.expand(params=[{"max_tokens": 1}, {"max_tokens": 2}])
        assert [len(one.output.token_ids) for one in each if one.output] == [1, 2]
        best = kid.fork()[0].generate(temperature=0, max_tokens=2).token_ids
        (score,) = there.score([best])
        (known,) = kid.score([best])
        assert score.token_logprobs == pytest.approx(known.token_logprobs)
        assert score.is_greedy and score.token_ids == best
        (token,) = there.next_tokens(["a"], suffix="?")
        assert token.token_id == LETTERS[0]
        there.update(annotations={"Q": 0.5}, checkpoint="here")
        there.extend("more")
        there.truncate("here")
        assert there.token_ids == kid.token_ids
        freed = grown[1].promote()
        assert freed.num_branches == 4 and freed.bytes == freed.blocks * 16 * 8
        assert client.get(there.id).info["children"] == 1
        assert client.tree(root.tree_id, include="nodes")["branches"]["live"] == 3
        assert there.release().num_branches == 1
        assert there.prune() == client_calls.Freed(0, 0, 0)  # it is gone already
        assert client.limits()["max_n"] == 128


def test_beam_searches_give_branches_and_tell_their_progress(shared: Serving) -> None:
    expected = [beam.output for beam in make_llm().beam_search("hello", num_beams=3, max_tokens=5)]
    heard: list[BeamProgress] = []

    async def twin() -> None:
        async with AsyncClient(shared.url) as other:
            beams = await other.beam_search("hello", num_beams=3, max_tokens=5)
            more = await (await other.get(beams[0].info["parent_id"])).beam_search(
                num_beams=3, max_tokens=5, on_progress=heard.append
            )
            for found in (beams, more):
                assert [beam.output.text for beam in found if beam.output] == [
                    one.text for one in expected if one
                ]
            await other.delete_tree(beams[0].tree_id)

    with Client(shared.url) as client, client.branch("hello") as root:
        beams = root.beam_search(num_beams=3, max_tokens=5)
        for beam, known in zip(beams, expected, strict=True):
            assert known is not None and beam.output is not None
            assert (beam.output.text, beam.output.token_ids) == (known.text, known.token_ids)
            assert beam.output.score == pytest.approx(known.score)
            assert beam.output.beam_indices == known.beam_indices
            assert beam.token_ids == root.token_ids + known.token_ids
        asyncio.run(twin())
        told = client.beam_search(messages=HI, num_beams=2, max_tokens=3, on_progress=heard.append)
        assert heard[-1].num_tokens == 3 and told[0].output is not None
        assert heard[-1].text == told[0].output.text
        client.delete_tree(told[0].tree_id)


def test_children_are_known_by_the_answer_that_made_them(shared: Serving) -> None:
    """An expansion is one request; what it says of each child is what the server says when asked again."""
    sent: list[str] = []

    async def main() -> None:
        async with AsyncClient(shared.url) as there, await there.branch("hello") as root:
            there._http.event_hooks["request"].append(count)
            grown = await root.expand(2, max_tokens=3)
            grown += await root.beam_search(num_beams=2, max_tokens=3)
            grown += await there.beam_search("other", num_beams=2, max_tokens=3)
            assert len(sent) == 3
            for child in grown:
                known = dict(child.info)
                assert child.output and known.items() <= (await child.refresh()).items()
            await there.delete_tree(grown[-1].tree_id)

    async def count(request: httpx2.Request) -> None:
        sent.append(request.url.path)

    asyncio.run(main())
    with Client(shared.url) as client, client.branch("hello") as root:
        sent.clear()
        client._http.event_hooks["request"].append(lambda request: sent.append(request.url.path))
        grown = [*root.expand(2, max_tokens=3), *root.beam_search(num_beams=2, max_tokens=3)]
        assert len(sent) == 2
        for child in grown:
            known = dict(child.info)
            assert child.output and known.items() <= child.refresh().items()


def test_streams_give_pieces_and_then_choices(shared: Serving) -> None:
    with Client(shared.url) as client, client.branch(messages=HI) as root:
        told = list(root.stream(n=2, into="children", seed=3, max_tokens=5))
        choices = [one for one in told if isinstance(one, Choice)]
        for choice in choices:
            pieces = [one for one in told if isinstance(one, Delta) and one.index == choice.index]
            assert "".join(piece.text for piece in pieces) == choice.text
            assert [t for piece in pieces for t in piece.token_ids] == choice.token_ids
        assert sorted(choice.index for choice in choices) == [0, 1]
        root.generate(max_tokens=3)
        root.extend(messages=[{"role": "tool", "tool_call_id": "c", "content": "42"}])
        assert root.text.endswith("</s><s>t:42</s><s>a:")


def test_leaving_a_stream_early_cancels_what_is_not_complete(serve: Serve) -> None:
    server = serve(make_llm(Steps()))
    with Client(server.url) as client, client.branch("abc") as root:
        stream = root.stream(max_tokens=3000)
        next(stream)
        stream.close()
        server.wait_until(lambda: not any(s.run for s in list(server.llm.engine.sequences)))
        assert root.text == "abc"


def test_errors_say_what_is_wrong(serve: Serve) -> None:
    server = serve(keys=("sk-first-0001",))
    with Client(server.url, "wrong-key") as client, pytest.raises(ramet.ApiError) as caught:
        client.branch("a")
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    assert not caught.value.retryable
    with Client(server.url, "sk-first-0001") as client:
        with client.branch("hello") as root:
            with pytest.raises(ramet.ApiError) as caught:
                root.generate(temperature=-1)
            assert (caught.value.status, caught.value.param) == (400, "temperature")
            assert caught.value.request_id
            with pytest.raises(ramet.ApiError):
                list(root.stream(wrong=1))
            with pytest.raises(ramet.RametError, match="not at 4"):
                root.extend("a", expect_position=4)
        with pytest.raises(ramet.ApiError) as caught:
            client.get(root.id)
        assert caught.value.code == "branch_not_found"


def test_the_asynchronous_client_has_the_same_verbs(shared: Serving) -> None:
    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(AsyncClient) == public(Client)
    assert public(async_client.AsyncBranch) == public(client.Branch)

    async def main() -> None:
        async with AsyncClient(shared.url) as there, await there.branch("hello") as root:
            kids = await root.fork(2)
            await asyncio.gather(*(kid.extend(str(i)) for i, kid in enumerate(kids)))
            choices = await asyncio.gather(*(kid.generate(seed=1, max_tokens=4) for kid in kids))
            for kid, choice in zip(kids, choices, strict=True):
                assert await kid.token_ids() == [*(await kid.token_ids())[:6], *choice.token_ids]
            (child,) = await kids[0].expand(n=1, max_tokens=2)
            assert child.output is not None and len(child.output.token_ids) == 2
            told = [one async for one in root.stream(max_tokens=3)]
            assert isinstance(told[-1], Choice)
            (score,) = await root.score(["a"], suffix="b", normalize="tokens")
            assert score.score == score.logprob
            assert (await root.next_tokens(["a"]))[0].text == "a"
            await root.update(name="n")
            await root.truncate(3)
            assert await root.text() == "hel"
            assert (await root.refresh())["name"] == "n"
            assert (await there.get(root.id)).info["position"] == 3
            await root.cancel()
            await kids[0].promote()
            await kids[0].release()
            assert (await there.limits())["max_n"] == 128
            assert (await there.tree(root.tree_id))["id"] == root.tree_id
            other = await there.branch("x")
            assert (await there.delete_tree(other.tree_id)).num_branches == 1

    asyncio.run(main())


class Flaky:
    """A server that fails as often as it is told to."""

    def __init__(self, *answers: int | Exception, retry: str = "true") -> None:
        self.answers = list(answers)
        self.retry = retry
        self.keys: list[str | None] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.keys.append(request.headers.get("idempotency-key"))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        error = {"error": {"message": "no", "code": "c", "param": None, "type": "t"}}
        body = {"id": "br_1", "tree_id": "t"} if answer < 400 else error
        return httpx2.Response(answer, json=body, headers={"x-should-retry": self.retry, "retry-after": "0"})


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda *_: 0.0)


def of(flaky: Callable[[httpx2.Request], httpx2.Response]) -> Client:
    client = Client("http://server", max_retries=2)
    client._http = httpx2.Client(base_url="http://server", transport=httpx2.MockTransport(flaky))
    return client


def test_retries_are_the_same_request() -> None:
    flaky = Flaky(503, httpx2.ConnectError("no"), 201)
    assert of(flaky).branch("a").id == "br_1"
    assert len(flaky.keys) == 3 and len(set(flaky.keys)) == 1 and flaky.keys[0]
    other = Flaky(201, 201)
    client = of(other)
    client.branch("a"), client.branch("a")
    assert len(set(other.keys)) == 2


def test_what_is_not_worth_a_retry_is_not_retried() -> None:
    for status in (400, 409, 429, 500):
        flaky = Flaky(status, 200, retry="false")
        with pytest.raises(ramet.ApiError) as caught:
            of(flaky).branch("a")
        assert (caught.value.status, len(flaky.keys)) == (status, 1)
    flaky = Flaky(503, 503, 503, 201)
    with pytest.raises(ramet.ApiError):
        of(flaky).branch("a")
    assert len(flaky.keys) == 3
    with pytest.raises(httpx2.ReadTimeout):
        of(Flaky(*[httpx2.ReadTimeout("slow")] * 3)).branch("a")


def test_an_answer_that_is_no_json_is_an_error_too() -> None:
    def proxy(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(502, text="<html>bad gateway</html>")

    with pytest.raises(ramet.ApiError, match="502"):
        of(proxy).branch("a")


def test_events_are_read_line_by_line() -> None:
    reader = EventReader()
    lines = [": ping", "", "event: x", 'data: {"a":', "data: 1}", "", "data: [DONE]", ""]
    assert [event for line in lines if (event := reader.feed(line)) is not None] == [{"a": 1}]
    with pytest.raises(ramet.ApiError, match="broken"):
        client_calls.told({"error": {"message": "broken"}}, {})
    assert client_calls.told({"type": "something.new"}, {}) is None


def test_waiting_grows_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda *_: 1.0)
    waits = [client_calls.wait_before_retry(attempt, {}) for attempt in range(8)]
    assert waits == sorted(waits) and waits[-1] == 8.0
    assert client_calls.wait_before_retry(0, {"retry-after": "3"}) == 3.0
    assert client_calls.wait_before_retry(0, {"retry-after": "9999"}) == 8.0


def test_the_client_needs_no_torch() -> None:
    code = "import sys, ramet; ramet.Client; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip() == "[]", json.dumps(done.stdout)

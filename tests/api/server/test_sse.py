"""Clients that go away: at each stage, streamed or not, their blocks are free within two steps."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import pytest

from tests.api.serving import Serve, Serving, Steps, make_llm


def send(server: Serving, path: str, body: dict[str, Any]) -> socket.socket:
    """A request by hand, so that it can be cut off anywhere."""
    raw = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    raw.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return raw


def in_use(server: Serving) -> int:
    return server.llm.stats().pages.num_in_use


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stage", ["prefill", "first token", "later"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_goes_away_frees_its_blocks(serve: Serve, stream: bool, stage: str, n: int) -> None:
    model = Steps()
    llm = make_llm(model, max_batch_tokens=16)
    server = serve(llm)
    body = {"prompt": "a" * 160, "max_tokens": 3000, "n": n, "stream": stream}
    raw = send(server, "/v1/completions", body)
    num_rows = {"prefill": 0, "first token": 1, "later": 20}[stage]
    server.wait_until(lambda: in_use(server) > 3 and model.num >= num_rows)
    if stream and stage != "prefill":
        assert raw.recv(100).startswith(b"HTTP/1.1 200")
    raw.close()
    seen: list[int] = []
    llm.on_step(lambda: seen.append(in_use(server)))
    server.wait_until(lambda: not llm.engine.sequences)
    # Two steps after the server has heard of it; that takes the network a moment, in steps of 2 ms.
    assert in_use(server) == 0
    assert len(seen) < 100
    expected = make_llm().generate("a" * 160, temperature=0, max_tokens=5)[0].choices[0].text
    reply = server.post("/v1/completions", {"prompt": "a" * 160, "temperature": 0, "max_tokens": 5})
    assert reply.json()["choices"][0]["text"] == expected


def test_closed_work_is_gone_within_two_steps(serve: Serve) -> None:
    """From the moment that the server knows, counted in steps."""
    model = Steps()
    llm = make_llm(model)
    server = serve(llm)
    raw = send(server, "/v1/completions", {"prompt": "abc", "max_tokens": 3000})
    server.wait_until(lambda: model.num > 3)
    model.open.clear()  # the step that runs now is the last one that may count the request
    raw.close()
    time.sleep(0.1)
    before = llm.engine.num_steps
    model.open.set()
    server.wait_until(lambda: not llm.engine.sequences)
    assert llm.engine.num_steps - before <= 2
    assert in_use(server) == 0


def test_requests_can_be_cancelled_by_their_id_and_keep_their_tokens(serve: Serve) -> None:
    server = serve(make_llm(Steps()))
    results: dict[int, Any] = {}

    def ask(index: int) -> None:
        body = {"prompt": "abc", "max_tokens": 3000, "n": 2, "stream": index == 1}
        reply = server.post("/v1/completions", body, headers={"x-request-id": "same"})
        results[index] = reply.text

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    server.wait_until(lambda: len(server.llm.engine.sequences) == 4)
    time.sleep(0.05)
    assert server.post("/v1/requests/other/cancel").status_code == 404
    assert server.post("/v1/requests/same/cancel").json()["cancelled"] == 2
    for thread in threads:
        thread.join(10)
    whole = json.loads(results[0])["choices"]
    assert [choice["finish_reason"] for choice in whole] == ["cancelled", "cancelled"]
    assert all(0 < len(choice["text"]) < 3000 for choice in whole)
    chunks = [json.loads(line[6:]) for line in results[1].splitlines() if line.startswith("data: {")]
    ends = [p["finish_reason"] for chunk in chunks for p in chunk["choices"] if p["finish_reason"]]
    assert ends == ["cancelled", "cancelled"]
    assert server.post("/v1/requests/same/cancel").status_code == 404


def test_one_id_used_twice_is_two_requests(serve: Serve) -> None:
    """Aborting one leaves the other."""
    server = serve(make_llm(Steps()))
    headers = {"x-request-id": "same"}
    raw = send(server, "/v1/completions", {"prompt": "abc", "max_tokens": 3000})
    body = {"prompt": "xyz", "max_tokens": 60, "temperature": 0}
    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.append(server.post("/v1/completions", body, headers=headers).json())
    )
    thread.start()
    server.wait_until(lambda: len(server.llm.engine.sequences) == 2)
    raw.close()
    thread.join(10)
    expected = make_llm().generate("xyz", max_tokens=60, temperature=0)[0].choices[0].text
    assert results[0]["choices"][0]["text"] == expected


def test_a_slow_reader_holds_its_own_generation_only(serve: Serve) -> None:
    server = serve(make_llm(num_blocks=4096))
    raw = send(server, "/v1/completions", {"prompt": "abc", "max_tokens": 50_000, "stream": True, "seed": 1})
    reply = server.post("/v1/completions", {"prompt": "xyz", "max_tokens": 50})
    assert reply.status_code == 200
    sizes = []
    for _ in range(2):
        time.sleep(0.3)
        sizes.append(max((len(s.token_ids) for s in list(server.llm.engine.sequences)), default=0))
    assert sizes[0] <= 50_000
    raw.close()
    server.wait_until(lambda: not server.llm.engine.sequences)

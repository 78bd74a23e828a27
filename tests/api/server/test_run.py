"""Starting and stopping: what runs may end, and what does not is told so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.api.server.test_sse import send
from tests.api.serving import Serve, Serving, Steps, error_of, make_llm

PATH = "/v1/completions"


def asked(server: Serving, body: dict[str, Any], replies: list[httpx2.Response]) -> threading.Thread:
    """A request that runs in a thread of its own."""

    def ask() -> None:
        replies.append(httpx2.post(server.url + PATH, json=body, timeout=30))

    before = len(server.llm.engine.sequences)
    thread = threading.Thread(target=ask)
    thread.start()
    server.wait_until(lambda: len(server.llm.engine.sequences) > before)
    return thread


def test_a_stopping_server_lets_requests_end_and_takes_no_new_ones(serve: Serve) -> None:
    server = serve(make_llm(Steps()))
    replies: list[httpx2.Response] = []
    thread = asked(server, {"prompt": "a", "max_tokens": 150}, replies)
    server.get("/version")  # keeps a connection open
    server.server.should_exit = True
    server.wait_until(lambda: server.server.state.draining)
    try:
        refused = server.get("/health")
        assert refused.status_code == 503
        assert error_of(server.post(PATH, {"prompt": "a"}), 503)["code"] == "engine_restarting"
    except httpx2.TransportError:
        pass  # the idle connection was closed first, which is as clear
    thread.join(20)
    assert replies[0].json()["usage"]["completion_tokens"] == 150
    server.join()


def test_what_does_not_end_in_time_is_cancelled_and_told(serve: Serve) -> None:
    server = serve(make_llm(Steps()), shutdown_timeout=0.2)
    whole: list[httpx2.Response] = []
    streamed: list[httpx2.Response] = []
    threads = [
        asked(server, {"prompt": "a", "max_tokens": 100_000}, whole),
        asked(server, {"prompt": "b", "max_tokens": 100_000, "stream": True}, streamed),
    ]
    start = time.monotonic()
    server.server.should_exit = True
    for thread in threads:
        thread.join(20)
    assert time.monotonic() - start < 4
    assert error_of(whole[0], 503)["code"] == "engine_restarting"
    *_, last, done = [line for line in streamed[0].text.split("\n\n") if line]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_restarting"
    assert done == "data: [DONE]"
    server.join()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_health_tells_the_truth_after_a_bug_in_the_engine(serve: Serve) -> None:
    server = serve(make_llm(Steps()))

    def broken() -> None:
        raise ZeroDivisionError("a bug")

    stop = server.llm.on_step(broken)
    response = server.post(PATH, {"prompt": "a"})
    assert error_of(response, 500)["code"] == "internal_error"
    server.wait_until(lambda: server.get("/health").status_code == 503)
    assert error_of(server.post(PATH, {"prompt": "a"}), 503)
    assert "ZeroDivisionError" in server.bugs.pop()
    stop()


def test_garbage_and_cut_requests_leave_nothing(serve: Serve) -> None:
    server = serve(make_llm(Steps()))
    for size in (30, 120, 160):
        with send(server, PATH, {"prompt": "a", "max_tokens": 5}) as raw:
            raw.recv(size)
    server.wait_until(lambda: not server.llm.engine.sequences)


@pytest.mark.model
def test_the_command_serves_and_stops_on_sigterm(tmp_path: Path) -> None:
    """The whole way, with the embedded model: a line of JSON says where, and SIGTERM ends it with 0."""
    command = [sys.executable, "-c", "from ramet.api.cli import main; main()", "serve", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.Popen(
        [*command, "--num-blocks", "64"], stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stderr is not None
        lines = (json.loads(line) for line in process.stderr)
        url = next(line["url"] for line in lines if line["message"] == "serving")
        body = {"prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}
        reply = httpx2.post(url + PATH, json=body, timeout=60)
        assert reply.json()["choices"][0]["text"] == " Paris"
        process.send_signal(signal.SIGTERM)
        assert "stopped" in [line["message"] for line in lines]
        assert process.wait(20) == 0
    finally:
        process.kill()

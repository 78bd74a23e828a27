"""What every request passes: ids, keys, names, lengths, and the answer when all else fails."""

from __future__ import annotations

import json
import logging
import socket
from typing import Any

import pytest

from ramet.api.server import meta
from ramet.api.server.log import JsonLines
from tests.api.server.test_metrics import scrape
from tests.api.serving import Serve, Serving, error_of

KEY, OTHER = "sk-first-0001", "sk-other-0002"
PATHS = ["/version", "/v1/models", "/metrics", "/openapi.json", "/docs", "/nowhere", "/v1/branches"]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_everything_but_health_is_behind_the_key(serve: Serve) -> None:
    server = serve(keys=(KEY,))
    assert server.get("/health").status_code == 200
    for path in PATHS:
        error = error_of(server.get(path), 401)
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert server.get(path, headers=bearer(OTHER)).status_code == 401
        assert server.get(path, headers=bearer(KEY)).status_code in (200, 404, 405)
    assert server.post("/v1/completions", {"prompt": "a"}, headers=bearer(OTHER)).status_code == 401
    assert server.post("/v1/completions", {"prompt": "a"}, headers=bearer(KEY)).status_code == 200


def test_without_a_key_other_names_are_refused(shared: Serving) -> None:
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::1"):
        assert error_of(shared.get("/version", headers={"host": host}), 403)["code"] == "host_not_allowed"
    for host in ("localhost", "localhost:9", "[::1]:80"):
        assert shared.get("/version", headers={"host": host}).status_code == 200


def test_request_ids_are_the_clients_own_if_they_are_sound(shared: Serving) -> None:
    assert shared.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    for bad in ("", "a" * 129, "with space"):
        given = shared.get("/health", headers={"x-request-id": bad}).headers["x-request-id"]
        assert given != bad and given.startswith("req_")


def test_unknown_paths_and_methods_have_the_shape_of_errors(shared: Serving) -> None:
    assert error_of(shared.get("/nowhere"), 404)["code"] == "path_not_found"
    assert error_of(shared.get("/v1/completions"), 405)["code"] == "method_not_allowed"


def test_bodies_are_bounded(serve: Serve) -> None:
    server = serve(max_body_bytes=2000)
    body = json.dumps({"prompt": "a" * 3000, "max_tokens": 1}).encode()
    headers = {"content-type": "application/json"}
    assert (
        error_of(server.http.post("/tokenize", content=body, headers=headers), 413)["code"]
        == "body_too_large"
    )
    chunks = (body[i : i + 500] for i in range(0, len(body), 500))
    assert error_of(server.http.post("/tokenize", content=chunks, headers=headers), 413)
    assert server.post("/tokenize", {"prompt": "a" * 100}).status_code == 200


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_that_is_not_sent_as_json_is_refused(shared: Serving, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    response = shared.http.post("/tokenize", content=b'{"prompt": "a"}', headers=headers)
    assert error_of(response, 400)["code"] == "invalid_json"


def test_a_bug_is_answered_without_its_trace(shared: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(meta, "_model", broken)
    response = shared.get("/v1/models")
    assert error_of(response, 500)["code"] == "internal_error"
    assert "secret" not in response.text and "ZeroDivision" not in response.text
    assert "secret" in shared.bugs.pop()  # the log has it
    monkeypatch.undo()
    assert shared.get("/v1/models").status_code == 200


def test_log_lines_are_json_and_hold_no_body(shared: Serving, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ramet.server"):
        shared.post("/tokenize", {"prompt": "zzsecretzz"}, headers={"x-request-id": "mine-2"})
        shared.wait_until(lambda: any("request" in record.getMessage() for record in caplog.records))
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
    mine = next(line for line in lines if line.get("request_id") == "mine-2")
    assert (mine["method"], mine["path"], mine["status"]) == ("POST", "/tokenize", 200)
    assert "zzsecretzz" not in json.dumps(lines)


def test_what_is_no_http_does_no_harm(shared: Serving) -> None:
    for garbage in (b"\x00\x01\x02\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"POST /tokenize HTTP/1.1\r\n"):
        with socket.create_connection(("127.0.0.1", int(shared.url.rsplit(":", 1)[1]))) as raw:
            raw.sendall(garbage)
    assert shared.get("/health").status_code == 200


def test_a_client_that_goes_before_its_body_has_come_is_no_bug(shared: Serving) -> None:
    def gone() -> float:
        return scrape(shared)["ramet_cancelled_total", "cause=disconnect"]

    before = gone()
    for key in (b"", b"Idempotency-Key: k\r\n"):
        raw = socket.create_connection(("127.0.0.1", int(shared.url.rsplit(":", 1)[1])))
        raw.sendall(b"POST /v1/branches HTTP/1.1\r\nHost: localhost\r\n" + key)
        raw.sendall(b'Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"prompt": ')
        raw.close()
    shared.wait_until(lambda: gone() > before)

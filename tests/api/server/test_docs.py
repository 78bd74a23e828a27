"""/docs and /openapi.json."""

from __future__ import annotations

from typing import Any

from tests.api.serving import Serve, Serving


def test_the_page_shows_every_endpoint_and_loads_nothing(shared: Serving) -> None:
    page = shared.get("/docs")
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert "<script" not in page.text and "http" not in page.text.replace("<!doctype html><html", "")
    description: dict[str, Any] = shared.get("/openapi.json").json()
    for path, methods in description["paths"].items():
        assert f"<code>{path}</code>" in page.text
        for method in methods:
            assert f"<b>{method.upper()}</b>" in page.text
    assert "logprob_token_ids" in page.text and "list of integer" in page.text


def test_bodies_are_described(shared: Serving) -> None:
    schemas = shared.get("/openapi.json").json()["components"]["schemas"]
    assert {"type": "string"} in schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"]
    assert schemas["CompletionRequest"]["additionalProperties"] is False
    assert schemas["CompletionRequest"]["required"] == ["prompt"]


def test_both_can_be_left_out(serve: Serve) -> None:
    server = serve(docs=False)
    assert [server.get(path).status_code for path in ("/docs", "/openapi.json")] == [404, 404]

"""/docs: the OpenAPI description as one page, made here. It loads nothing and runs no script."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse

router = APIRouter()
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
summary { cursor: pointer; padding: .3rem 0; }
code { font-size: 95%; }
b { display: inline-block; width: 4.5rem; }
table { border-collapse: collapse; margin: .5rem 0 1rem 1rem; }
td { padding: .1rem 1rem .1rem 0; vertical-align: top; }
"""
_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """All endpoints, and the fields of what they take."""
    description = request.app.openapi()
    title = f"{description['info']['title']} {description['info']['version']}"
    schemas = description["components"]["schemas"]
    parts = [
        part
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
        for part in _operation(path, method, operation, schemas)
    ]
    page = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>"
        f"<style>{_STYLE}</style><h1>{escape(title)}</h1>"
        "<p>The same for programs: <a href=/openapi.json>/openapi.json</a>.</p>"
    )
    return HTMLResponse(page + "".join(parts), headers=_HEADERS)


def _operation(path: str, method: str, operation: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    yield f"<details><summary><b>{method.upper()}</b> <code>{escape(path)}</code></summary>"
    yield f"<p>{escape(operation.get('description', operation.get('summary', '')))}</p><table>"
    for parameter in operation.get("parameters", ()):
        yield _row(parameter["name"], parameter["schema"], parameter.get("required", False))
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    schema = schemas.get(body.get("$ref", "").rpartition("/")[2], {})
    for name, field in schema.get("properties", {}).items():
        yield _row(name, field, name in schema.get("required", ()))
    yield "</table></details>"


def _row(name: str, schema: dict[str, Any], required: bool) -> str:
    note = schema.get("description", "")
    needed = "required" if required else ""
    return (
        f"<tr><td><code>{escape(name)}</code><td>{escape(_kind(schema))}<td>{needed}<td>{escape(note)}</tr>"
    )


def _kind(schema: dict[str, Any]) -> str:
    """A type in a few words."""
    if "anyOf" in schema:
        return " or ".join(kind for one in schema["anyOf"] if (kind := _kind(one)) != "null")
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "enum" in schema or "const" in schema:
        return " | ".join(str(one) for one in schema.get("enum", [schema.get("const")]))
    kind = str(schema.get("type", "anything"))
    return f"list of {_kind(schema['items'])}" if kind == "array" and "items" in schema else kind

"""What docs/api.md shows can be copied and runs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ramet.api.server import branches, meta, openai, scrape
from tests.api.serving import Serve, Serving

PAGE = Path(__file__).parents[2] / "docs/api.md"
SERVER = Path(__file__).parents[2] / "api/server"
DEFAULT_URL = "http://127.0.0.1:8000"


def blocks(language: str, server: Serving) -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [block.replace(DEFAULT_URL, server.url) for block in found if DEFAULT_URL in block]


def test_the_python_transcript_runs(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("python", serve())
    exec(compile(block, str(PAGE), "exec"), {})
    assert "Freed(num_branches=2" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("curl") is None, reason="the transcript is for curl")
def test_the_shell_transcript_runs(serve: Serve) -> None:
    server = serve()
    (block,) = (one for one in blocks("sh", server) if "call()" in one)
    done = subprocess.run(["bash", "-euc", block], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 5 and not any('"error"' in line for line in lines), done.stdout
    assert '"deleted":true' in lines[-1]


def test_every_route_is_on_the_page() -> None:
    page = PAGE.read_text()
    routes: list[Any] = [
        route for module in (branches, meta, openai, scrape) for route in module.router.routes
    ]
    for route in routes:
        path = re.sub(r"\{(branch|tree)_id\}", "{id}", route.path).replace("{request_id}", "{x-request-id}")
        assert path.removesuffix("/{name:path}") in page, route.path


def test_every_error_code_is_on_the_page() -> None:
    sources = "".join(path.read_text() for path in SERVER.glob("*.py"))
    codes = set(re.findall(r'code(?:: str )?=\s?"(\w+)"', sources)) | set(
        re.findall(r'40\d: "(\w+)"', sources)
    )
    codes |= {f"{what}_not_found" for what in re.findall(r'not_found\("(\w+)"', sources)}
    codes -= {"authentication_error", "permission_error", "not_found_error", "conflict_error"}  # types
    assert {"branch_busy", "tree_not_found", "path_not_found", "invalid_value"} <= codes
    page = PAGE.read_text().split("## Errors")[1].split("## ")[0]
    assert [code for code in sorted(codes) if f"`{code}`" not in page] == []


def test_every_event_of_a_feed_is_on_the_page() -> None:
    sources = "".join(path.read_text() for path in SERVER.glob("*.py"))
    page = PAGE.read_text().split("## The feed of a tree")[1].split("## ")[0]
    kv = set(re.findall(r'add\("(kv\.\w+)"', sources.replace("\n        ", "")))
    branch = set(re.findall(r'events\.add\("branch\.(\w+)"', sources))
    assert len(kv) == 5 and len(branch) == 8  # and pruned and expired, whose names are put together
    for name in (*kv, *branch, "pruned", "expired"):
        assert f"`{name}`" in page or f"`branch.{name}`" in page, name

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

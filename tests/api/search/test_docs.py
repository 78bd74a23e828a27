"""What docs/search.md shows can be copied and runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.api.serving import Serving

PAGE = Path(__file__).parents[3] / "docs/search.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_the_transcripts_run(block: str, server: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    assert "http://127.0.0.1:8000" in block
    exec(compile(block.replace("http://127.0.0.1:8000", server.url), str(PAGE), "exec"), {})
    assert capsys.readouterr().out.strip()
    server.wait_until(lambda: not server.llm.engine.sequences)

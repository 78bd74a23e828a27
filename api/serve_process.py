"""A server as a process of its own, for benchmarks and for tests of other people's clients."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def serving(model: str, *options: str) -> Iterator[str]:
    """`ramet serve MODEL OPTIONS` on a free port of this machine; gives its URL. Raises RuntimeError."""
    code = "from ramet.api.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", model, "--port", "0", "--log-level", "info", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield _url(process)
    finally:
        process.terminate()
        process.wait()


def _url(process: subprocess.Popen[str]) -> str:
    """Read the log until it says where; from then on it is read by nobody, so it is drained by a thread."""
    assert process.stderr is not None, "the log is a pipe"
    last = ""
    for last in process.stderr:
        if last.startswith("{") and json.loads(last).get("message") == "serving":
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return str(json.loads(last)["url"])
    raise RuntimeError(f"the server did not start: {last.strip()}")

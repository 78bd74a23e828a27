"""The other end of `cpu_worker`: starts an engine's process, sends it jobs, and waits no longer than told."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from typing import Any


class EngineProcess:
    """One engine. `skipped` is why it is not used, once it is known."""

    def __init__(self, name: str, threads: int) -> None:
        self.name = name
        self.skipped: str | None = None
        self.facts: dict[str, Any] = {}
        # Threads that wait must not spin: this machine may have no core to spare.
        settings = {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "10000"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ramet.api.cpu_worker", name, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **settings},
        )

    def wait_ready(self, timeout: float) -> None:
        answer = self._read(timeout)
        self.facts = answer
        self.skipped = answer.get("skipped")

    def run(self, workload: str, seed: int, tiny: bool, timeout: float) -> dict[str, Any]:
        """The result's fields, or {"skipped": reason}."""
        if self.skipped is not None:
            return {"skipped": self.skipped}
        assert self._process.stdin is not None, "opened as a pipe"
        self._process.stdin.write(json.dumps([workload, seed, tiny]).encode() + b"\n")
        self._process.stdin.flush()
        return self._read(timeout)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self, timeout: float) -> dict[str, Any]:
        assert self._process.stdout is not None, "opened as a pipe"
        stream = self._process.stdout.fileno()
        end = time.monotonic() + timeout
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, end - time.monotonic())):
                    return self._give_up(f"took more than {timeout:.0f} s")
                piece = os.read(stream, 1 << 16)
                if not piece:
                    return self._give_up("its process died")
                line += piece
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _give_up(self, reason: str) -> dict[str, Any]:
        self.close()
        self.skipped = reason
        return {"skipped": reason}

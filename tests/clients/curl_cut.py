"""curl, killed at each stage of a request: nothing of it may go on running."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request

url = sys.argv[1]


def running() -> float:
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        text = reply.read().decode()
    values = re.findall(r"^ramet_sequences_(?:running|waiting) (\S+)$", text, re.MULTILINE)
    assert len(values) == 2, text
    return sum(map(float, values))


for stream in (True, False):
    for seconds in (0.0, 0.05, 0.3, 1.0):
        body = {"prompt": "word " * 2000, "max_tokens": 3000, "n": 2, "stream": stream, "ignore_eos": True}
        command = ["curl", "-sN", f"{url}/v1/completions", "-H", "Content-Type: application/json", "-d", "@-"]
        curl = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        assert curl.stdin is not None
        curl.stdin.write(json.dumps(body))
        curl.stdin.close()
        time.sleep(seconds)
        curl.kill()
        curl.wait()
        deadline = time.monotonic() + 20
        while running() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert running() == 0, f"stream={stream}: what was cut after {seconds} s still runs"

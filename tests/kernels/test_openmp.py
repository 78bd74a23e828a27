"""Teams of threads: a thread that hands its work over has none."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ramet.kernels import openmp

_DISMISS = """
import os
import torch
from ramet.kernels import openmp

def work():
    torch.ones(1 << 22).add_(1)
    return len(os.listdir("/proc/self/task"))

before = work()
openmp.dismiss_team()
after = len(os.listdir("/proc/self/task"))
print(before - after, work() - after)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch has another runtime")
def test_files_of_any_name_may_be_mapped(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff"
    with open(path, "wb+") as file:
        file.write(b"1")
        file.flush()
        with mmap.mmap(file.fileno(), 1):
            runtime = openmp.runtime()
    assert runtime is not None and os.path.isfile(runtime)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch has another runtime")
def test_a_team_goes_and_comes_back() -> None:
    """With two threads a team has one beside its master."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    run = subprocess.run([sys.executable, "-c", _DISMISS], env=environment, capture_output=True, text=True)
    assert run.stdout.split() == ["1", "1"], run.stderr

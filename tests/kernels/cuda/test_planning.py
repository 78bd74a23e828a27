"""Without a compiler there is no planning on a GPU, and the error says so. With one, no number overflows."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ramet.kernels import native, openmp
from ramet.kernels.cuda import planning


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="planned in C, which was not to be had: no C compiler found"):
        planning.library.__wrapped__()


def test_what_the_cpu_does_without_is_needed_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The switch is for the kernels of the CPU; and torch need not run with OpenMP."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(native.SWITCH, "0")
    monkeypatch.setattr(openmp, "runtime", lambda: None)
    assert planning.library.__wrapped__().ramet_fold
    (compiled,) = (tmp_path / "ramet").iterdir()
    assert compiled.name.startswith("planning-")


_TOO_MUCH = """
import numpy as np, torch
from ramet.kernels import native
from ramet.kernels.cuda import work_list
from ramet.kernels.cuda.work import DecodeWork, planner
from ramet.kernels.cuda.workspace import Workspace
from ramet.kernels.kv_pool import KVPool

native._FLAGS = *native._FLAGS, "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"
work_list.GATE_BYTES = work_list.GATE_BYTES_FEW_ROWS = 0
for block_size, num_rows, num_shared in (256, 600, 0), (1, 5, 2**29):
    pool = KVPool(1, 1, 1, 16, block_size, torch.float32, "cpu", "block-major")
    rows = [range(2**30 // block_size)] * num_rows, [1] * num_rows, [2**30] * num_rows
    plan = planner(pool).plan(*rows, [0] + [num_shared] * (num_rows - 1))
    try:
        DecodeWork(plan, np.arange(num_rows), Workspace(pool, 2))
    except ValueError as error:
        print(error)
"""


def test_numbers_that_are_too_large_do_not_overflow() -> None:
    """Rows of 2^30 tokens, the most there may be: uncut, and with ids that lie more than 2^31 apart.

    In a process of its own, which an overflow would end.
    """
    command = [sys.executable, "-c", _TOO_MUCH]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["a step reads more than 2^30 blocks, or in more than 2^30 parts"] * 2

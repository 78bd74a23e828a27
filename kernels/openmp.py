"""The OpenMP runtime that torch has loaded, which the C kernels run on as well."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import torch

_SOFT = 1  # omp_pause_soft: threads go, settings stay


def runtime() -> str | None:
    """The path of GNU OpenMP, or None where torch runs without it."""
    torch.get_num_threads()
    if sys.platform != "linux":
        return None
    # Any file may be mapped, under a name in any encoding.
    for line in os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines():
        path = line.split(maxsplit=5)[-1]
        if os.path.basename(path).startswith("libgomp"):
            return path
    return None


def dismiss_team() -> None:
    """Let the threads go that have worked for the calling thread; it gets new ones when it needs them.

    Each thread that computes has a team of its own, and as soon as all teams together count more threads than
    there are cores, idle ones included, GNU OpenMP's threads hardly spin before they sleep. A step of SmolLM2
    on two cores then takes 25 ms where it took 15. So a thread that hands its work over dismisses its team.
    """
    path = runtime()
    if path is not None:
        pause = getattr(ctypes.CDLL(path), "omp_pause_resource_all", None)  # OpenMP 5.0
        if pause is not None:
            pause(_SOFT)

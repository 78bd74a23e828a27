"""Compiles what the launchers would launch on a card that is not there, and reads what became of it.

The real launchers run on CPU tensors, with Triton told to compile only; so it is the shipped configurations
that are compiled, with the arguments that they are launched with.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Compiled:
    """What ptxas made of one kernel."""

    name: str
    registers: int  # of a thread
    spilled: int  # bytes of a thread's stack
    shared: int  # bytes
    num_warps: int
    mma: dict[str, int]  # how many HMMA and HGMMA instructions
    async_loads: dict[str, int]  # LDGSTS, by width in bits
    stores: dict[str, int]  # STG, by width in bits


class _NoDriver:
    """Stands in for a card of the given capability."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return int(self.target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def _compile_only(capability: int) -> Iterator[list[Any]]:
    """Within, a launch compiles its kernel for a card of this capability; gives the kernels."""
    kernels: list[Any] = []
    run = JITFunction.run

    def compile_it(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernels.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    triton.runtime.driver.set_active(_NoDriver(capability))
    JITFunction.run = compile_it
    try:
        yield kernels
    finally:
        JITFunction.run = run


def compiled(capability: int, launch: Callable[[], object]) -> list[Compiled]:
    """The kernels that `launch` launches, in their order."""
    with _compile_only(capability) as kernels:
        launch()
    return [_read(kernel) for kernel in kernels]


def _read(kernel: Any) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _tool("-res-usage", file.name)
        sass = _tool("-sass", file.name)
    registers, stack = (int(re.findall(rf"{field}:(\d+)", usage)[0]) for field in ("REG", "STACK"))
    return Compiled(
        kernel.metadata.name,
        registers,
        stack,
        kernel.metadata.shared,
        kernel.metadata.num_warps,
        {name: len(re.findall(rf"\b{name}\.", sass)) for name in ("HMMA", "HGMMA")},
        _widths("LDGSTS", sass),
        _widths("STG", sass),
    )


def _widths(name: str, sass: str) -> dict[str, int]:
    """How often an instruction of memory comes in which width."""
    found = Counter(
        match[1] if (match := re.search(r"\.([US]?\d+)\b", instruction)) else "32"
        for instruction in re.findall(rf"\b{name}\.\S*", sass)
    )
    return dict(found)


def _tool(*arguments: str) -> str:
    done = subprocess.run([TOOLS / "cuobjdump", *arguments], capture_output=True, text=True, check=True)
    return done.stdout

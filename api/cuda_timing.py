"""How times and ceilings are measured on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Literal

import torch
import triton
import triton.language as tl

FLUSH_BYTES = 512 << 20  # several times any L2 cache
Flush = Literal["read", "write"]


class Timer:
    """Times calls in CUDA graphs, with the L2 cache emptied before each replay."""

    def __init__(self) -> None:
        self._flushed = torch.ones(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")

    def flush(self, how: Flush) -> None:
        """Fill L2 with other data: clean lines, or dirty ones, as `triton.testing.do_bench` does.

        Dirty lines have to be written back first, which costs what follows about 8 us.
        """
        if how == "write":
            self._flushed.zero_()
        else:
            self._flushed.max()

    def graph_us(self, call: Callable[[], object], repeats: int = 50, flush: Flush = "read") -> float:
        """Microseconds of one replay of `call`, the median."""
        return median(self.replays_us(capture(call), repeats, flush))

    def replays_us(self, graph: torch.cuda.CUDAGraph, repeats: int, flush: Flush) -> list[float]:
        events = []
        for _ in range(repeats + 5):
            self.flush(flush)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        return [1e3 * start.elapsed_time(end) for start, end in events[5:]]

    def layer_us(self, layer: Callable[[int], object], num_layers: int, repeats: int = 50) -> float:
        """Microseconds a layer, of several layers in one graph: what a model feels."""

        def layers() -> None:
            for index in range(num_layers):
                layer(index)

        return self.graph_us(layers, repeats) / num_layers


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Run `call` once, to compile what it needs, then record it."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@triton.jit
def _read_kernel(source, sums, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.int32)
    for step in range(UNROLL):
        total ^= tl.load(source + (program * UNROLL + step) * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + program, tl.sum(total, axis=0))


def read_gb_s(timer: Timer, num_bytes: int = 4 << 30) -> float:
    """The rate at which memory can be read and nothing else is done: the ceiling of attention."""
    source = torch.randint(-(2**31), 2**31 - 1, (num_bytes // 4,), dtype=torch.int32, device="cuda")
    block, unroll = 2048, 16
    sums = torch.empty(source.numel() // (block * unroll), dtype=torch.int32, device="cuda")

    def read() -> None:
        _read_kernel[(len(sums),)](source, sums, BLOCK=block, UNROLL=unroll, num_warps=8)

    return num_bytes / timer.graph_us(read, repeats=20) / 1e3


def copy_gb_s(timer: Timer, num_bytes: int = 4 << 30) -> float:
    """The rate of a copy, read and written bytes together."""
    source = torch.randint(-(2**31), 2**31 - 1, (num_bytes // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return 2 * num_bytes / timer.graph_us(lambda: target.copy_(source), repeats=20) / 1e3


def matmul_tflop_s(timer: Timer, size: int = 8192) -> float:
    """The rate of a large bf16 matrix product."""
    a, b = torch.randn(2, size, size, dtype=torch.bfloat16, device="cuda")
    return 2 * size**3 / timer.graph_us(lambda: a @ b, repeats=20) / 1e6

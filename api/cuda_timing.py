"""How times and ceilings are measured on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Literal

import torch

from ramet.kernels.cuda import ceilings

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
            start, end = _event(), _event()
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


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Run `call` once, to compile what it needs, then record it."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def read_gb_s(timer: Timer, num_bytes: int = 4 << 30) -> float:
    """The rate at which memory can be read and nothing else is done: the ceiling of attention."""
    source = _random_int32(num_bytes)
    sums = source.new_empty(source.numel() // (ceilings.BLOCK * ceilings.UNROLL))
    return num_bytes / timer.graph_us(partial(ceilings.read, source, sums), repeats=20) / 1e3


def copy_gb_s(timer: Timer, num_bytes: int = 4 << 30) -> float:
    """The rate of a copy, read and written bytes together."""
    source = _random_int32(num_bytes)
    copy = partial(ceilings.copy, source, torch.empty_like(source))
    return 2 * num_bytes / timer.graph_us(copy, repeats=20) / 1e3


def _random_int32(num_bytes: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, (num_bytes // 4,), dtype=torch.int32, device="cuda")


def matmul_tflop_s(timer: Timer, size: int = 8192) -> float:
    """The rate of a large bf16 matrix product."""
    a, b = torch.randn(2, size, size, dtype=torch.bfloat16, device="cuda")
    return 2 * size**3 / timer.graph_us(lambda: a @ b, repeats=20) / 1e6

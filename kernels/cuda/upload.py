"""A buffer of numbers that the host writes and the device reads."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

SLACK = 256  # numbers that a kernel may read past the end, without following them


class Upload:
    """An int32 array at an address that stays, unless it is outgrown."""

    def __init__(self, device: torch.device, numel: int) -> None:
        self.tensor = torch.zeros(numel, dtype=torch.int32, device=device)

    def send(self, values: npt.NDArray[Any]) -> int:
        """Copy `values` to the front, ordered before the launches that follow; returns their length."""
        if values.size + SLACK > len(self.tensor):
            self.tensor = self.tensor.new_zeros(2 * values.size + SLACK)
        # Not from page-locked memory: the driver has its own copy then when it returns, and is faster.
        numbers = torch.from_numpy(values.reshape(-1).astype(np.int32, copy=False))
        self.tensor[: values.size].copy_(numbers, non_blocking=True)
        return len(values)


def int32s(values: Sequence[int]) -> npt.NDArray[np.int32]:
    """A list as an array, three times as fast as numpy's own conversion."""
    return np.frombuffer(struct.pack(f"{len(values)}i", *values), dtype=np.int32)

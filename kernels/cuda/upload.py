"""A buffer of numbers that the host writes and the device reads."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ramet.kernels.plan import IntArray

SLACK = 256  # numbers that a kernel may read past the end, without following them


class Upload:
    """An int32 array at an address that stays, unless it is outgrown."""

    def __init__(self, device: torch.device, numel: int) -> None:
        self._device = device
        self._allocate(numel)

    def _allocate(self, numel: int) -> None:
        self._staging = torch.zeros(numel, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        self._host = self._staging.numpy()
        self.tensor = torch.zeros(numel, dtype=torch.int32, device=self._device)

    def send(self, values: npt.NDArray[Any]) -> int:
        """Copy `values` to the front, ordered before the launches that follow; returns their length."""
        if values.size + SLACK > len(self._host):
            self._allocate(2 * values.size + SLACK)
        self._host[: values.size] = values.reshape(-1)
        self._copy(0, values.size)
        return len(values)

    def change(self, places: IntArray, values: Sequence[int]) -> None:
        """Set values[i] at places[i]. Copies from the first to the last that was another, if there is any."""
        new = int32s(values)
        is_other = self._host[places] != new
        if is_other.any():
            self._host[places] = new
            changed = places[is_other]
            self._copy(changed.min(), changed.max() + 1)

    def _copy(self, start: int, stop: int) -> None:
        self.tensor[start:stop].copy_(self._staging[start:stop], non_blocking=True)


def int32s(values: Sequence[int]) -> npt.NDArray[np.int32]:
    """A list as an array, three times as fast as numpy's own conversion."""
    return np.frombuffer(struct.pack(f"{len(values)}i", *values), dtype=np.int32)

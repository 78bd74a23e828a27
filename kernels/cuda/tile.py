"""The shapes of the tiles that decode attention is computed in, and which one suits what."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tile:
    """One build of the kernel: query rows by tokens, and how the card runs it."""

    rows: int
    tokens: int
    num_warps: int
    num_stages: int
    masks_all: bool  # scores of all tiles are masked, not only of the last one
    ctas_per_sm: int  # how many of its CTAs an SM should get
    tflops: float  # rate of arithmetic when all rows are in use, measured on an H200
    max_registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """What the launch hands to the compiler."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.max_registers is None else {**options, "maxnreg": self.max_registers}


def narrow(group: int, head_dim: int, dtype: torch.dtype) -> Tile:
    """The tile of what is bound by memory: private segments, and shared ones with few query rows.

    Bandwidth comes from many small CTAs on an SM, not from loads far ahead in one: two stages, four CTAs.
    """
    rows = max(16, _power_of_two(group))
    return Tile(rows, _tokens(head_dim, dtype), 4, 2, masks_all=True, ctas_per_sm=4, tflops=100)


def wide(group: int, head_dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> tuple[Tile, ...]:
    """The tiles of shared segments with many query rows, which come near the card's rate of arithmetic.

    Hopper has its wgmma instructions from 64 rows on. 128 rows take 8 warps with 160 registers each: one such
    CTA and two narrow ones fill an SM exactly.
    """
    least, tokens = _power_of_two(group), _tokens(head_dim, dtype)
    if capability[0] != 9 or dtype == torch.float32:  # correct, tuned for nothing
        return (Tile(max(32, least), min(tokens, 64), 4, 2, masks_all=False, ctas_per_sm=2, tflops=100),)
    tiles = (
        Tile(32, tokens, 4, 3, masks_all=False, ctas_per_sm=2, tflops=250),
        Tile(64, tokens, 4, 3, masks_all=False, ctas_per_sm=1, tflops=400),
        Tile(128, tokens, 8, 3, masks_all=False, ctas_per_sm=1, tflops=438, max_registers=160),
    )
    return tuple(tile for tile in tiles if tile.rows >= least)


def extend(
    num_queries: int, group: int, head_dim: int, dtype: torch.dtype, capability: tuple[int, int]
) -> Tile:
    """The tile of rows with up to `num_queries` queries each: the smallest that they fill."""
    assert group <= 128, f"no GPU path for {group} query heads on one KV head, only up to 128"
    tokens = _tokens(head_dim, dtype)
    rows = max(16, _power_of_two(min(num_queries * group, 64)), _power_of_two(group))
    if dtype == torch.float32:  # correct, not fast: without tensor cores products pass through the registers
        return Tile(max(16, _power_of_two(group)), 32, 4, 2, masks_all=False, ctas_per_sm=1, tflops=30)
    if capability[0] != 9:  # correct, tuned for nothing
        num_warps = 8 if rows >= 64 else 4
        return Tile(rows, min(tokens, 64), num_warps, 2, masks_all=False, ctas_per_sm=1, tflops=100)
    if rows == 64 and padded(head_dim) == 256:  # what 64 rows accumulate is more than 4 warps can hold
        rows = 128
    if rows == 128:
        return Tile(rows, tokens, 8, 3, masks_all=False, ctas_per_sm=1, tflops=406)
    return Tile(rows, tokens, 4, 3, masks_all=False, ctas_per_sm=2, tflops=427)


def _tokens(head_dim: int, dtype: torch.dtype) -> int:
    """Tokens of a tile, such that K and V of one take 32 KiB."""
    return min(16384 // padded(head_dim) // dtype.itemsize, 128)


def padded(head_dim: int) -> int:
    """The width of a tile: Triton knows powers of two only. What is past the head is not loaded."""
    return max(_power_of_two(head_dim), 16)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()

"""The shapes of the tiles that decode attention is computed in, and which one suits what.

Measured on an H200 (docs/kernels.md). On other cards everything is correct and nothing is tuned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

# Where a Hopper card computes as long as it reads: 400 TFLOP/s of attention over 4.5 TB/s.
FLOPS_PER_BYTE = 89


@dataclass(frozen=True)
class Tile:
    """One build of the kernel: query rows by tokens, and how the card runs it."""

    rows: int
    tokens: int
    num_warps: int
    num_stages: int
    masks_all: bool  # scores of all tiles are masked, not only of the last one
    ctas_per_sm: int  # how many CTAs an SM should get
    max_registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """What the launch hands to the compiler."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.max_registers is None else {**options, "maxnreg": self.max_registers}

    def masks_keys(self, block_size: int) -> bool:
        """Whether keys past the end are not fetched.

        It takes registers. Where they are capped it would spill; where a tile is one or two blocks, the
        compiler needs so many that an SM has one CTA less, a fifth of the bandwidth.
        """
        return self.max_registers is None and not self.tokens // 2 <= block_size <= self.tokens


@dataclass(frozen=True)
class Tiles:
    """The tiles for one kind of heads on one kind of card."""

    group: int  # query heads of a KV head: a tile takes whole groups
    head_dim: int
    dtype: torch.dtype
    capability: tuple[int, int]

    @property
    def narrow_rows(self) -> int:
        """Query rows of a narrow tile: no tensor core takes fewer than 16."""
        return max(16, _power_of_two(self.group))

    def narrow(self, beside_wide: bool = False, few: bool = False) -> Tile:
        """The tile of what is bound by memory: private segments, and shared ones with few query rows.

        Bandwidth comes from several CTAs on an SM, not from loads far ahead in one: 64 tokens of 128 numbers,
        two stages, four CTAs. If they run beside a wide tile for long, with 96 registers two of them fit
        beside it, and five later on. If they are too `few` to fill the card, more loads ahead do help.
        """
        # By their registers; masks of what is past a head take some, too.
        fit = 4 if self.head_dim == padded(self.head_dim) <= 128 else 3
        tile = Tile(self.narrow_rows, self._tokens, 4, 2, masks_all=True, ctas_per_sm=fit)
        if few and tile.tokens >= 32:
            return replace(tile, tokens=tile.tokens // 2, num_stages=3)
        if beside_wide and self._can_cap:
            return replace(tile, max_registers=96)
        return tile

    @property
    def deep(self) -> Tile | None:
        """The tile of what is bound by memory and fits into one wave of two CTAs an SM; None if not tuned.

        More loads ahead make up for fewer CTAs, and half as many parts are written and merged: up to 9 %
        faster (32 rows of 1,024 tokens 36.1 against 39.7 us). In two waves it is up to a fifth slower.
        """
        if self.capability[0] != 9 or self.dtype == torch.float32 or self._tokens < 32:
            return None
        return Tile(self.narrow_rows, self._tokens, 4, 3, masks_all=True, ctas_per_sm=2)

    def wide(self, computes_longer: bool) -> Tile:
        """The tile of shared segments with many query rows.

        64 rows are the least that Hopper's wgmma instructions take. 128 rows compute faster (438 against 400
        TFLOP/s), but cut the work finer; they pay where the arithmetic takes longer than all reading. Their 8
        warps with 160 registers and two narrow CTAs with 96 fill the registers of an SM exactly.
        """
        least = _power_of_two(self.group)
        if self.dtype == torch.float32:
            return Tile(max(16, least), self._tokens, 4, 2, masks_all=False, ctas_per_sm=2)
        if self.capability[0] != 9:
            return Tile(max(32, least), min(self._tokens, 64), 4, 2, masks_all=False, ctas_per_sm=2)
        if not computes_longer and least <= 64:
            return Tile(64, self._tokens, 4, 3, masks_all=False, ctas_per_sm=1)
        cap = 160 if self._can_cap else None
        return Tile(max(128, least), self._tokens, 8, 3, masks_all=False, ctas_per_sm=1, max_registers=cap)

    @property
    def extend(self) -> Tile:
        """The tile of rows with several queries each.

        64 rows with two CTAs on an SM are faster than 128 in one (427 against 406 TFLOP/s for 2,048 queries
        on 8,192 tokens), and fewer rows are not, not even for 4 queries: wgmma takes 64 at once anyway.
        """
        least, tokens = _power_of_two(self.group), min(self._tokens, 64)
        if self.dtype == torch.float32:
            return Tile(max(16, least), min(tokens, 32), 4, 2, masks_all=False, ctas_per_sm=1)
        if self.capability[0] != 9:
            return Tile(max(64, least), tokens, 8, 2, masks_all=False, ctas_per_sm=1)
        if least > 64 or padded(self.head_dim) == 256:  # more than 4 warps can hold
            return Tile(128, tokens, 8, 3, masks_all=False, ctas_per_sm=1)
        return Tile(64, tokens, 4, 3, masks_all=False, ctas_per_sm=2)

    @property
    def _tokens(self) -> int:
        """Tokens of a tile, such that K and V of one take 32 KiB."""
        return min(16384 // padded(self.head_dim) // self.dtype.itemsize, 128)

    @property
    def _can_cap(self) -> bool:
        """Whether registers can be capped without a spill that counts."""
        return self.dtype != torch.float32 and padded(self.head_dim) <= 128


def padded(head_dim: int) -> int:
    """The width of a tile: Triton knows powers of two only. What is past the head is not loaded."""
    return max(_power_of_two(head_dim), 16)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()

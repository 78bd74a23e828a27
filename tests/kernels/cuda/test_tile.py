"""Which tile suits what: the bounds that the kernels rely on."""

from __future__ import annotations

import pytest
import torch

from ramet.kernels.cuda.tile import Tile, Tiles, padded

HOPPER, AMPERE = (9, 0), (8, 0)


def all_tiles(tiles: Tiles) -> list[Tile]:
    narrow = [tiles.narrow(beside_wide, few) for beside_wide in (False, True) for few in (False, True)]
    deep = [] if tiles.deep is None else [tiles.deep]
    return [*narrow, *deep, *(tiles.wide(computes_longer) for computes_longer in (False, True))]


@pytest.mark.parametrize("capability", [HOPPER, AMPERE])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_a_tile_holds_a_group(head_dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> None:
    for group in (1, 3, 4, 7, 16, 20, 64):
        for tile in all_tiles(Tiles(group, head_dim, dtype, capability)):
            assert tile.rows >= group
            for size in (tile.rows, tile.tokens):  # what Triton can multiply
                assert size >= 16 and size & (size - 1) == 0
            # All loads in flight and the queries, in the 99 KiB of a CTA that every card since Ampere has.
            if capability == AMPERE:
                in_flight = 2 * tile.tokens * (tile.num_stages - 1)
                assert (in_flight + tile.rows) * padded(head_dim) * dtype.itemsize <= 99 << 10


def test_head_sizes_are_padded_to_what_triton_knows() -> None:
    assert [padded(size) for size in (1, 16, 64, 80, 96, 128, 256)] == [16, 16, 64, 128, 128, 128, 256]


def test_wide_tiles_of_hopper_are_for_wgmma() -> None:
    """Its instructions take 64 rows at least; 128 only where the arithmetic takes longest."""
    tiles = Tiles(4, 128, torch.bfloat16, HOPPER)
    assert tiles.wide(False).rows == 64
    assert tiles.wide(True).rows == 128
    # One such CTA and two narrow ones have exactly the registers of an SM.
    wide, narrow = tiles.wide(True), tiles.narrow(beside_wide=True)
    assert wide.max_registers is not None and narrow.max_registers is not None
    assert (
        wide.max_registers * wide.num_warps * 32 + 2 * narrow.max_registers * narrow.num_warps * 32 == 65536
    )


def test_fp32_is_correct_on_every_card() -> None:
    """There is no matrix instruction for it that does not round, so no tile of many rows."""
    tiles = Tiles(4, 128, torch.float32, HOPPER)
    assert all(tile.rows == 16 and tile.max_registers is None for tile in all_tiles(tiles))

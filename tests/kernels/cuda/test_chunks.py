"""How segments are cut: nothing lost, chunks alike, and the card busy to the end."""

from __future__ import annotations

import numpy as np
import pytest

from ramet.kernels.cuda.chunks import Cut, cut, even_cut
from ramet.kernels.plan import IntArray

LEAST, GRAIN, SLOTS = 256, 64, 66  # 132 SMs with four CTAs each, for eight KV heads


def lengths(*values: int) -> IntArray:
    return np.array(values, dtype=np.int64)


def tokens_of(chunks: Cut, num_tokens: IntArray) -> list[list[int]]:
    """The tokens of each chunk of each segment."""
    found = []
    for total, n, size in zip(num_tokens.tolist(), *(field.tolist() for field in chunks), strict=True):
        found.append([min(size, total - i * size) for i in range(n)])
    return found


@pytest.mark.parametrize("share", [1.0, 300.0, 1000.0, 1e9])
def test_a_cut_covers_each_segment(share: float) -> None:
    num_tokens = lengths(1, 63, 64, 65, 1000, 8192, 8193)
    chunks = cut(num_tokens, LEAST, GRAIN, share)
    for total, parts in zip(num_tokens.tolist(), tokens_of(chunks, num_tokens), strict=True):
        assert sum(parts) == total and min(parts) > 0
        assert all(size % GRAIN == 0 for size in parts[:-1])
    assert (chunks.num_tokens[chunks.num_chunks > 1] >= LEAST - GRAIN).all()


def test_what_fills_the_card_stays_whole() -> None:
    """64 branches and 66 slots: a second part would have to be merged, and saves nothing."""
    assert even_cut(np.full(64, 8192), LEAST, GRAIN, SLOTS).num_chunks.tolist() == [1] * 64


def test_one_branch_takes_the_whole_card() -> None:
    assert even_cut(lengths(65536), LEAST, GRAIN, SLOTS).num_chunks.tolist() == [SLOTS - 2]  # whole tiles


def test_a_long_branch_does_not_run_alone_at_the_end() -> None:
    """Among 80 like branches, 66 run and 14 are left: in one piece they would take as long again."""
    chunks = even_cut(np.full(80, 4096), LEAST, GRAIN, SLOTS)
    assert chunks.num_chunks.min() > 1


def test_no_segment_is_no_chunk() -> None:
    assert len(even_cut(lengths(), LEAST, GRAIN, SLOTS).num_chunks) == 0

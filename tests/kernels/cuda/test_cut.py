"""How segments are cut: nothing lost, chunks alike, and the card busy to the end."""

from __future__ import annotations

import random
from math import ceil

import numpy as np
import pytest
import torch

from ramet.kernels.cuda.tile import Tile
from ramet.kernels.cuda.work import DecodeWork
from ramet.kernels.cuda.work_list import MIN_CHUNK
from ramet.kernels.cuda.workspace import Workspace
from ramet.kernels.kv_pool import KVPool
from ramet.kernels.plan import Planner

BLOCK_SIZE, NUM_KV_HEADS, NUM_SMS = 16, 8, 132  # of a Hopper card
SLOTS = NUM_SMS * 4 // NUM_KV_HEADS  # with four CTAs each


def decode_work(lengths: list[int], shared_tokens: int = 0) -> DecodeWork:
    """Rows of so many tokens, of which the first are the same for all."""
    pool = KVPool(1, 1, NUM_KV_HEADS, 128, BLOCK_SIZE, torch.bfloat16, "cpu", "block-major")
    tables = [[0] * ceil(n / BLOCK_SIZE) for n in lengths]
    shared = [0] + [shared_tokens // BLOCK_SIZE] * (len(lengths) - 1)
    plan = Planner(BLOCK_SIZE).plan(tables, [1] * len(lengths), lengths, shared)
    return DecodeWork(plan, np.arange(len(lengths)), Workspace(pool, 4 * NUM_KV_HEADS))


def items(work: DecodeWork) -> list[list[int]]:
    narrow: list[int] = work.workspace.buffer.narrow_items[: 8 * work.list.num_narrow].tolist()
    return [narrow[i : i + 8] for i in range(0, len(narrow), 8)]


def chunks_of(work: DecodeWork, lengths: list[int]) -> list[list[int]]:
    """The tokens of each chunk of each row, none of which shares anything."""
    chunks: list[list[int]] = [[] for _ in lengths]
    for row, num_rows, _, start, num_tokens, *_ in items(work):
        assert num_rows == 1 and start == sum(chunks[row]), "side by side, in order"
        chunks[row].append(lengths[row] - start if num_tokens < 0 else num_tokens)
    return chunks


def naive_cut(lengths: list[int], grain: int, share: float) -> list[list[int]]:
    """Each into a whole number of chunks of about `share` tokens."""
    cut = []
    for n in lengths:
        size = ceil(n / grain / max(round(n / max(share, MIN_CHUNK)), 1)) * grain
        cut.append([min(size, n - start) for start in range(0, n, size)])
    return cut


def naive_duration(cut: list[list[int]], grain: int, num_slots: int) -> float:
    """The chunks one after the other, each to the next slot, forth and back; 8 tokens a part, 40 a CTA."""
    tokens = sorted((ceil(row[0] / grain) * grain + 40 for row in cut for _ in row), reverse=True)
    ends = [0] * num_slots
    for i, n in enumerate(tokens):
        turn, slot = divmod(i, num_slots)
        ends[slot if turn % 2 == 0 else -1 - slot] += n
    time = end = 0.0
    for running, reached in zip(range(num_slots, 0, -1), sorted(ends), strict=True):
        time += (reached - end) * max(running, 0.55 * num_slots) / num_slots
        end = reached
    return time + 8 * (len(tokens) - len(cut)) / num_slots


def naive_even_cut(lengths: list[int], tile: Tile) -> list[list[int]]:
    num_slots = NUM_SMS * tile.ctas_per_sm // NUM_KV_HEADS
    share, grain = sum(lengths) / num_slots, max(tile.tokens, BLOCK_SIZE)
    cuts = [naive_cut(lengths, grain, share / finer) for finer in (1, 1.75, 3)]
    timed = [(naive_duration(cut, grain, num_slots), cut) for cut in cuts]
    even = [cut for time, cut in timed if time * 0.94 <= share]
    return even[0] if even else min(timed, key=lambda pair: pair[0])[1]


@pytest.mark.parametrize("seed", range(60))
def test_like_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    longest = rng.choice((300, 3000, 30000))
    lengths = [rng.randint(1, longest) for _ in range(rng.choice((3, 40, 90, 300)))]
    work = decode_work(lengths)
    assert chunks_of(work, lengths) == naive_even_cut(lengths, work.list.narrow_tile)


def test_a_cut_covers_each_segment() -> None:
    """Chunks are whole tiles of 64 tokens, but for the last of a row."""
    lengths = [1, 63, 64, 65, 1000, 8192, 8193, 40000]
    for row, chunks in zip(lengths, chunks_of(decode_work(lengths), lengths), strict=True):
        assert sum(chunks) == row and min(chunks) > 0
        assert all(n % 64 == 0 and n >= MIN_CHUNK for n in chunks[:-1])


def test_the_longest_come_first() -> None:
    lengths = [300, 9000, 700, 40000, 300]
    work = decode_work(lengths)
    order = list(dict.fromkeys(row for row, *_ in items(work)))
    sizes = [chunks_of(work, lengths)[row][0] for row in order]
    assert sizes == sorted(sizes, reverse=True)
    assert order.index(0) < order.index(4), "like ones stay in order"


def test_what_fills_the_card_stays_whole() -> None:
    """64 branches and 66 slots: a second part would have to be merged, and saves nothing."""
    assert decode_work([8192] * 64).list.num_narrow == 64


def test_one_branch_takes_the_whole_card() -> None:
    work = decode_work([65536])
    num_slots = NUM_SMS * work.list.narrow_tile.ctas_per_sm // NUM_KV_HEADS
    assert num_slots - 2 <= work.list.num_narrow <= num_slots  # whole tiles


def test_a_long_branch_does_not_run_alone_at_the_end() -> None:
    """Among 80 like branches, 66 run and 14 are left: in one piece they would take as long again."""
    lengths = [4096] * 80
    assert min(map(len, chunks_of(decode_work(lengths), lengths))) > 1


def test_wide_segments_are_cut_over_the_sms() -> None:
    """30 rows of 4 query heads take tiles of 64 or 128 query rows; one CTA on each SM, of any KV head."""
    work = decode_work([40960 + 16] * 30, 40960)
    tile_rows = work.list.wide_tile.rows // 4
    num_tiles = ceil(30 / tile_rows)
    num_chunks = round(NUM_SMS / NUM_KV_HEADS / num_tiles)
    assert work.list.num_wide == num_tiles * num_chunks


def test_no_segment_is_no_chunk() -> None:
    """No row owns a token: there are only wide items."""
    work = decode_work([40960] * 30, 40960)
    assert work.list.num_wide > 0
    assert work.list.num_narrow == 0

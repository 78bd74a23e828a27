"""The work list: few items, padding that pays, gathers that fit, and slots in 64 bits."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from ramet.kernels.cpu_work import FREE_PADDING, MAX_PADDING, WorkListBuilder


def test_equal_rows_are_one_item(no_rows: type[Any]) -> None:
    rows = no_rows(4)
    for _ in range(8):
        rows.add(rows.take(3), 1, 10)
    (item,) = WorkListBuilder(rows.plan(), 1024, 512).build().items
    assert item.num_stretches == 8
    assert item.num_gathered == 10
    assert item.lens is None
    assert item.tokens == slice(0, 8)


def test_siblings_of_like_shape_share_an_item(no_rows: type[Any]) -> None:
    rows = no_rows(4)
    for _ in range(3):
        path = rows.take(20)
        for _ in range(2):
            rows.add(path + rows.take(1), 1, 81)
    items = WorkListBuilder(rows.plan(), 1024, 512).build().items
    assert [item.num_stretches for item in items] == [6, 3]
    assert [item.merges for item in items] == [False, True]


def test_padding_is_bounded_and_gathers_fit(rows_of: Callable[..., Any]) -> None:
    for seed in range(50):
        plan = rows_of(random.Random(seed), 4, 4, 30).plan()
        for max_slots in (40, 400):
            for item in WorkListBuilder(plan, max_slots, max_slots // 2).build().items:
                assert item.num_gathered * item.num_stretches <= (
                    max_slots // 2 if item.widens else max_slots
                )
                if item.lens is not None:
                    size = item.num_gathered * item.num_stretches
                    assert size - item.lens.sum() <= max(FREE_PADDING, MAX_PADDING * size)


def test_slots_are_computed_in_64_bits(no_rows: type[Any]) -> None:
    rows = no_rows(16)
    block = 2**31 // 16 + 5
    first = block * 16 + np.arange(16)
    rows.add([block], 1, 16)
    rows.add([block + 1], 1, 16)
    (item,) = WorkListBuilder(rows.plan(), 1024, 512).build().items
    assert item.source is not None
    assert np.array_equal(item.source.numpy(), np.concatenate([first, first + 16]))

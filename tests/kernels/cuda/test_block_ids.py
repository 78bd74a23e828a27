"""Block ids on the device: of known tables only what a step changed is read again, in new lists as well."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ramet.kernels.cuda import work_list as list_module
from ramet.kernels.cuda.step_buffer import SIZES, StepBuffer
from ramet.kernels.cuda.work import DecodeWork
from ramet.kernels.cuda.workspace import Workspace
from ramet.kernels.kv_pool import KVPool
from ramet.kernels.plan import Planner, shared_with_previous

SIZE = 4
TAMPERED = -7


class Decoding:
    """Rows on a trunk of 2 blocks, whose tables grow in place as an engine's do. The last owns none."""

    def __init__(self, device: str) -> None:
        pool = KVPool(1, 32, 1, 16, SIZE, torch.float32, device, "block-major")
        self.workspace = Workspace(pool, 2)
        self.planner = Planner(SIZE, 0)
        self.tables = [[8, 9, 10], [8, 9, 11], [8, 9]]
        self.kv_lens = [11, 9, 8]

    def step(self) -> DecodeWork:
        num_rows = len(self.tables)
        shared = [0] + [2] * (num_rows - 1)
        plan = self.planner.plan(self.tables, [1] * num_rows, self.kv_lens, shared)
        return DecodeWork(plan, np.arange(num_rows), self.workspace)

    def ids(self) -> list[list[int]]:
        """What the device has of the trunk, and of each row."""
        num_narrow, buffer = self.step().list.num_narrow, self.workspace.buffer
        on_device: list[int] = buffer.block_ids.tolist()
        rows: list[list[int]] = [[] for _ in self.kv_lens]
        for row, num_rows, place, start, *_ in buffer.narrow_items[: 8 * num_narrow].view(-1, 8).tolist():
            if num_rows == 1 and start == 2 * SIZE:
                rows[row] = on_device[place : place + -(-self.kv_lens[row] // SIZE) - 2]
        return [on_device[:2], *rows]

    def tamper(self) -> None:
        """Whatever is not sent again remains seen."""
        self.workspace.buffer.block_ids.fill_(TAMPERED)


@pytest.fixture(autouse=True)
def _always_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_module, "GATE_BYTES", 0)
    monkeypatch.setattr(list_module, "GATE_BYTES_FEW_ROWS", 0)


@pytest.fixture
def decoding(device: str) -> Decoding:
    rows = Decoding(device)
    assert rows.ids() == [[8, 9], [10], [11], []]
    return rows


def test_nothing_is_sent_while_no_block_is_new(decoding: Decoding) -> None:
    decoding.tamper()
    decoding.kv_lens[1] += 1
    assert decoding.ids() == [[TAMPERED] * 2, [TAMPERED], [TAMPERED], []]


def test_a_new_block_is_sent(decoding: Decoding) -> None:
    decoding.kv_lens[0] += 2
    decoding.tables[0].append(12)
    assert decoding.ids() == [[8, 9], [10, 12], [11], []]


def test_a_row_that_owns_nothing_may_grow(decoding: Decoding) -> None:
    decoding.kv_lens[2] += 1
    decoding.tables[2].append(12)
    assert decoding.ids() == [[8, 9], [10], [11], [12]]


def test_rows_of_two_trunks_begin_blocks_of_their_own(device: str, check_work: Callable[..., None]) -> None:
    """The last block that they knew is the end of a trunk, not theirs."""
    rows = Decoding(device)
    tables = [[1, 2], [1, 2], [3, 4], [3, 4]]
    for kv_len in (8, 9):
        plan = rows.planner.plan(tables, [1] * 4, [kv_len] * 4, [0, 2, 0, 2])
        check_work(DecodeWork(plan, np.arange(4), rows.workspace), plan)
        for row, table in enumerate(tables):
            table.append(10 + row)


def test_the_last_block_may_be_another(decoding: Decoding) -> None:
    """A copy of one that was shared; and one that others had filled before, as the next one begins."""
    decoding.tables[1][-1] = 13
    assert decoding.ids() == [[8, 9], [10], [13], []]
    decoding.kv_lens[0] += 2
    decoding.tables[0][-1:] = [14, 15]
    assert decoding.ids() == [[8, 9], [14, 15], [13], []]


def test_the_last_block_of_what_is_shared_may_be_another(device: str) -> None:
    """No row owns a token, and all of them go on with the copy that another branch had made before."""
    rows = Decoding(device)
    rows.tables, rows.kv_lens = [[8, 9], [8, 9], [8, 9]], [8, 8, 8]
    assert rows.ids()[0] == [8, 9]
    for table in rows.tables:
        table[-1] = 13
    assert rows.ids()[0] == [8, 13]


def test_a_row_may_go_back(decoding: Decoding) -> None:
    decoding.kv_lens[0] += 2
    decoding.tables[0].append(12)
    decoding.step()
    decoding.kv_lens[0] -= 1
    decoding.tables[0][2:] = [16]
    assert decoding.ids() == [[8, 9], [16], [11], []]


@pytest.mark.parametrize("why", ["other tables", "two blocks at once", "another tree", "a step without them"])
def test_all_are_sent_again(why: str, decoding: Decoding) -> None:
    own = [10]
    if why == "other tables":
        decoding.tables[2] = list(decoding.tables[2])
    elif why == "two blocks at once":
        decoding.kv_lens[0] += 6
        own = decoding.tables[0][2:] = [17, 18, 19]
    elif why == "another tree":
        decoding.kv_lens[1] -= 1
        decoding.kv_lens[0] -= 1
        decoding.tables[1][2:] = []
    else:
        decoding.workspace.lists.forget()
    decoding.tamper()
    assert decoding.ids() == [[8, 9], own, [] if why == "another tree" else [11], []]


@pytest.mark.parametrize("is_new_tree", [False, True])
def test_an_interrupt_in_mid_step(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch, is_new_tree: bool
) -> None:
    """Nothing is known of the device when only a part was sent: the next step makes and sends all anew."""
    before = decoding.step().list

    def interrupt(buffer: StepBuffer, start: int, stop: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StepBuffer, "send", interrupt)
        if is_new_tree:
            decoding.kv_lens[0] = 8
        else:
            decoding.tables[1][-1] = 13
        with pytest.raises(KeyboardInterrupt):
            decoding.step()
    decoding.kv_lens[0] = 11
    decoding.tamper()
    assert decoding.ids() == [[8, 9], [10], [11 if is_new_tree else 13], []]
    assert decoding.step().list is not before


def test_a_new_tree_reads_new_tables_and_last_blocks_only(decoding: Decoding) -> None:
    """What was read before is copied: a change that AttentionPlan does not allow for is not seen."""
    tables, lens = decoding.tables, decoding.kv_lens
    tables[0].append(12)
    tables[0][2], lens[0] = 20, 13  # the last block of the step before
    tables[0][0] = tables[1][1] = TAMPERED
    tables.insert(1, [8, 9, 21])
    lens.insert(1, 10)
    assert decoding.ids() == [[8, 9], [20, 12], [21], [11], []]
    del tables[0], lens[0]
    tables[0][2] = 22
    assert decoding.ids() == [[8, 9], [22], [11], []]


def test_an_object_in_the_place_of_a_table_that_is_gone(decoding: Decoding) -> None:
    """It would pass for that table if nothing kept it."""
    for block in range(20, 60):
        decoding.tables[1] = [8, 9, block]
        assert decoding.ids() == [[8, 9], [10], [block], []]


@pytest.mark.parametrize("wrong", [-1, 2**30 + 1, 2**70])
def test_an_id_that_does_not_fit(decoding: Decoding, wrong: int) -> None:
    decoding.tables[1] = [8, 9, wrong]
    with pytest.raises((ValueError, OverflowError)):
        decoding.step()
    decoding.tables[1] = [8, 9, 13]
    decoding.tamper()
    assert decoding.ids() == [[8, 9], [10], [13], []], "nothing is known after an error"


def test_a_table_that_is_too_short(decoding: Decoding) -> None:
    decoding.kv_lens[0] = 13
    with pytest.raises(IndexError):
        decoding.step()


class History:
    """A tree of rows that grow, fork, end and go on with copies, as an engine's tables would."""

    def __init__(self, rng: random.Random, rows: Any) -> None:
        self.rng = rng
        self.size: int = rows.block_size
        self.num_blocks: int = rows.num_blocks
        self.tables, self.queries, self.lens = rows.block_tables, rows.query_lens, rows.kv_lens

    def new_block(self) -> int:
        self.num_blocks += 1
        return self.num_blocks - 1

    def own_last(self) -> list[int]:
        """The rows whose last block is theirs alone."""
        owners = Counter(block for table in self.tables for block in table)
        return [row for row, table in enumerate(self.tables) if owners[table[-1]] == 1]

    def change(self) -> None:
        rng, own = self.rng, self.own_last()
        if rng.random() < 0.5:  # no row of several queries is one for long
            self.queries = [1] * len(self.tables)
        what = rng.choice(("grow", "grow", "fork", "end", "copy", "leave"))
        if what == "end" and len(self.tables) > 1:
            row = rng.randrange(len(self.tables))
            del self.tables[row], self.queries[row], self.lens[row]
        elif what == "leave":  # as long as it was, and shares nothing any more
            row = rng.randrange(len(self.tables))
            self.tables[row] = [self.new_block() for _ in self.tables[row]]
        for row in reversed(own if what in ("grow", "fork", "copy") else []):
            if what == "grow":
                self.lens[row] += rng.choice((0, 1, 1, 1, self.size))
                while len(self.tables[row]) * self.size < self.lens[row]:
                    self.tables[row].append(self.new_block())
            elif rng.random() < 0.3:
                if what == "fork":
                    self.tables.insert(row, list(self.tables[row]))
                    self.queries.insert(row, 1)
                    self.lens.insert(row, self.lens[row])
                self.tables[row][-1] = self.new_block()


@pytest.mark.parametrize("seed", range(40))
def test_random_histories(
    seed: int, rows_of: Callable[..., Any], device: str, check_work: Callable[..., None]
) -> None:
    """Also with steps in between that fail, and a buffer that is too small at first."""
    rng = random.Random(seed)
    history = History(rng, rows_of(rng, rng.choice((1, 4, 16)), 4))
    size = history.size
    pool = KVPool(1, 1, 1, 16, size, torch.float32, device, "block-major")
    workspace, planner = Workspace(pool, 8), Planner(size, 0)
    workspace.buffer = StepBuffer(torch.device(device), [64] * len(SIZES))
    for _ in range(20):
        tables = history.tables
        plan = planner.plan(tables, history.queries, history.lens, shared_with_previous(tables))
        rows = np.flatnonzero(plan.query_lens == 1)
        if len(rows):
            if rng.random() < 0.2:
                failing = [*tables[:-1], [*tables[-1][:-1], TAMPERED]]
                with suppress(ValueError):
                    DecodeWork(replace(plan, block_tables=failing), rows, workspace)
            check_work(DecodeWork(plan, rows, workspace), plan)
        else:
            workspace.lists.forget()
        history.change()

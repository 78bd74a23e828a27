"""Block ids on the device: all of them with other lists or tables, else only what a step changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ramet.kernels.cuda import work as work_module
from ramet.kernels.cuda.upload import Upload
from ramet.kernels.cuda.work import DecodeWork
from ramet.kernels.cuda.workspace import Workspace
from ramet.kernels.kv_pool import KVPool
from ramet.kernels.plan import Planner

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
        plan = self.planner.plan(self.tables, [1] * 3, self.kv_lens, [0, 2, 2])
        return DecodeWork(plan, np.arange(3), self.workspace)

    def ids(self) -> list[list[int]]:
        """What the device has of the trunk, and of each row."""
        work_list, on_device = self.step().list, self.workspace.step.block_ids.tolist()
        own = [range(2, -(-n // SIZE)) for n in self.kv_lens]
        places = work_list.id_places.tolist()
        rows = [[on_device[place + i] for i in blocks] for place, blocks in zip(places, own, strict=True)]
        return [on_device[:2], *rows]

    def tamper(self) -> None:
        """Whatever is not sent again remains seen."""
        self.workspace.step.block_ids.fill_(TAMPERED)


@pytest.fixture(autouse=True)
def _always_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_module, "GATE_BYTES", 0)
    monkeypatch.setattr(work_module, "GATE_BYTES_FEW_ROWS", 0)


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
        decoding.workspace.step.forget()
    decoding.tamper()
    assert decoding.ids() == [[8, 9], own, [] if why == "another tree" else [11], []]


@pytest.mark.parametrize("is_new_tree", [False, True])
def test_an_interrupt_in_mid_step(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch, is_new_tree: bool
) -> None:
    """Nothing is known of the device when only a part was sent: the next step makes and sends all anew."""
    before = decoding.step().list

    def interrupt(upload: Upload, values: object) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Upload, "send", interrupt)
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

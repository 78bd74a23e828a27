"""The door: it writes what has a slot, leaves what has none, and refuses devices that have no path."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ramet.kernels import attention
from ramet.kernels.kv_pool import KVPool
from ramet.kernels.reference import paged_attention

pytestmark = pytest.mark.usefixtures("path")


@pytest.mark.parametrize("seed", range(20))
def test_a_step_writes_then_attends(
    rows_of: Callable[..., Any], case_of: Callable[..., Any], seed: int
) -> None:
    rows = rows_of(random.Random(seed), 4, 3)
    case = case_of(rows, 9, 3, 16, num_layers=2, seed=seed)
    pool = case.pool
    prepared = attention.prepare(pool, rows.plan(), rows.slots)
    before = pool.storage.clone()
    for layer in range(2):
        out = attention.attend(prepared, layer, case.q, case.k, case.v, 0.25)
        want, _ = paged_attention(
            case.q,
            pool.key(layer),
            pool.value(layer),
            rows.block_tables,
            rows.query_lens,
            rows.kv_lens,
            0.25,
        )
        assert (out.double() - want).norm() / want.norm() < 1e-5
        for token, slot in enumerate(rows.slots):
            if slot >= 0:
                assert torch.equal(pool.slots(layer)[:3, slot], case.k[token])
                assert torch.equal(pool.slots(layer)[3:, slot], case.v[token])
                for side in (0, 1):
                    before[layer, side, :, slot // 4, slot % 4] = (case.k, case.v)[side][token]
    assert torch.equal(before.nan_to_num(7.0), pool.storage.nan_to_num(7.0)), "a slot of no token was written"
    pool.check()


def test_query_only_rows_alone_write_nothing(no_rows: type[Any], case_of: Callable[..., Any]) -> None:
    rows = no_rows(4)
    path = rows.take(2)
    for _ in range(3):
        rows.add(path, 1, 8, writes=False)
    case = case_of(rows)
    before = case.pool.storage.clone()
    prepared = attention.prepare(case.pool, rows.plan(), rows.slots)
    attention.attend(prepared, 0, case.q, case.k.fill_(torch.nan), case.v.fill_(torch.nan), 1.0)
    assert torch.equal(case.pool.storage, before)


def test_sharing_changes_no_result(rows_of: Callable[..., Any], case_of: Callable[..., Any]) -> None:
    """The same step with all, some and nothing shared: sharing is a plan, not other arithmetic."""
    for seed in range(10):
        rows = rows_of(random.Random(seed), 4, 4)
        case = case_of(rows, seed=seed)
        outs = []
        for min_saved in (0, 24, 10**9):
            prepared = attention.prepare(case.pool, rows.plan(min_saved), rows.slots)
            outs.append(attention.attend(prepared, 0, case.q, case.k, case.v, 0.25))
        torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(outs[0], outs[2], rtol=1e-4, atol=1e-5)


def test_queries_of_a_transformers_layout_are_taken(no_rows: type[Any], case_of: Callable[..., Any]) -> None:
    """Models hand over [H, T, D] transposed: views, not contiguous tensors."""
    rows = no_rows(4)
    path = rows.take(3)
    rows.add(path + rows.take(2), 5, 17)
    rows.add(path + rows.take(1), 1, 14)
    case = case_of(rows)
    plan = rows.plan()
    dense = attention.attend(attention.prepare(case.pool, plan, rows.slots), 0, case.q, case.k, case.v, 0.25)
    q, k, v = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (case.q, case.k, case.v))
    got = attention.attend(attention.prepare(case.pool, plan, rows.slots), 0, q, k, v, 0.25)
    assert torch.equal(got, dense)


@pytest.mark.parametrize("slots", [[0, 1], [4], []])
def test_slots_that_do_not_fit_are_a_bug(no_rows: type[Any], slots: list[int]) -> None:
    rows = no_rows(4)
    rows.add(rows.take(1), 1, 1)
    with pytest.raises((AssertionError, ValueError)):
        attention.prepare(KVPool(1, 1, 1, 4, 4, torch.float32), rows.plan(), slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_planner_shares_what_pays_for_the_pool(no_rows: type[Any], path: str, dtype: torch.dtype) -> None:
    pool = KVPool(1, 1, 8, 128, 16, dtype)
    planner = attention.planner(pool)
    assert planner.block_size == 16

    def num_segments(shared: int, own: int, num_rows: int) -> int:
        rows = no_rows(16)
        path = rows.take(shared)
        for _ in range(num_rows):
            rows.add(path + rows.take(own), 1, (shared + own) * 16)
        common = [0, *[shared] * (num_rows - 1)]
        plan = planner.plan(rows.block_tables, rows.query_lens, rows.kv_lens, common)
        return len(plan.segments)

    assert num_segments(shared=128, own=8, num_rows=16) == 1
    assert num_segments(shared=1, own=8, num_rows=2) == 0
    # A short prompt and long samples: torch in half precision gains less than what widening costs.
    assert num_segments(shared=4, own=64, num_rows=16) == (path == "C" or dtype == torch.float32)


def test_the_cpu_path_needs_no_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import ramet.api.cli, ramet.engine.build"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

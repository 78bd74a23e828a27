"""The C kernels against the fp64 reference: shapes, trees, edges, options, poison."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from ramet.kernels import cpu_native, native, native_work
from ramet.kernels.cpu_native import NativeAttention
from ramet.kernels.kv_pool import KVPool
from ramet.kernels.options import PLAIN, AttentionOptions
from ramet.kernels.reference import paged_attention

HEADS = 6
SINKS = torch.linspace(-2.0, 3.0, HEADS)

fixtures_are_functions = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(autouse=True)
def one_thread_afterwards() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def attend(case: Any, options: AttentionOptions = PLAIN, min_saved: int = 0, layer: int = 0) -> torch.Tensor:
    attention = NativeAttention(case.rows.plan(min_saved), case.pool, np.array(case.rows.slots))
    return attention(layer, case.q, case.k, case.v, case.q.shape[-1] ** -0.5, options)


def expected(case: Any, options: AttentionOptions = PLAIN, layer: int = 0) -> torch.Tensor:
    """What the pool, as the step has left it, gives in fp64."""
    rows, pool = case.rows, case.pool
    kv = pool.key(layer), pool.value(layer)
    lens = rows.block_tables, rows.query_lens, rows.kv_lens
    return paged_attention(case.q, *kv, *lens, options=options)[0]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2 distance."""
    return float((got.double() - want).norm() / want.norm())


def check(case: Any, options: AttentionOptions = PLAIN, min_saved: int = 0, tolerance: float = 0.0) -> None:
    got = attend(case, options, min_saved)
    assert got.shape == case.q.shape
    assert got.dtype == case.q.dtype
    assert got.is_contiguous()
    # bfloat16 has 8 bits: the nearest one is at most 2^-8 away, and the sums before it are fp32.
    tolerance = tolerance or (1e-5 if case.q.dtype == torch.float32 else 2**-8)
    assert error(got, expected(case, options)) < tolerance


@fixtures_are_functions
@given(
    seed=st.integers(0, 2**32),
    depth=st.integers(0, 4),
    block_size=st.sampled_from((1, 2, 4, 16, 32)),
    min_saved=st.sampled_from((0, 16, 128)),
    group=st.sampled_from((1, 2, 3, 6)),
    window=st.none() | st.integers(1, 40),
    softcap=st.sampled_from((None, None, 0.5, 50.0)),
    has_sinks=st.booleans(),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    num_threads=st.sampled_from((1, 2)),
)
def test_ragged_trees_of_mixed_rows(
    rows_of: Callable[..., Any],
    case_of: Callable[..., Any],
    seed: int,
    depth: int,
    block_size: int,
    min_saved: int,
    group: int,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    dtype: torch.dtype,
    num_threads: int,
) -> None:
    torch.set_num_threads(num_threads)
    rows = rows_of(random.Random(seed), block_size, depth, 3 if block_size < 16 else 1)
    case = case_of(rows, HEADS, HEADS // group, 16, dtype, seed=seed, q_scale=2.0)
    check(case, AttentionOptions(window, softcap, SINKS if has_sinks else None), min_saved)


@pytest.mark.parametrize("group", range(1, 10))
@pytest.mark.parametrize("head_dim", [16, 24, 64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_shapes(
    rows_of: Callable[..., Any],
    case_of: Callable[..., Any],
    group: int,
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    case = case_of(rows_of(random.Random(group), 4, 2), group * 2, 2, head_dim, dtype)
    check(case)


def test_more_heads_a_group_than_a_task_takes(
    rows_of: Callable[..., Any], case_of: Callable[..., Any]
) -> None:
    check(case_of(rows_of(random.Random(5), 4, 2), 141, 1, 16))


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("group", [1, 13])
def test_lengths_around_every_edge(
    no_rows: type[Any], case_of: Callable[..., Any], block_size: int, group: int
) -> None:
    """Of vectors, tiles and pieces, for few queries and for many."""
    rows = no_rows(block_size)
    for length in (*range(1, 34), *range(62, 67), 127, 128, 129, *range(254, 259), 512, 513):
        rows.add(rows.take(-(-length // block_size)), 1, length)
    check(case_of(rows.permuted(random.Random(0)), group, 1, 16))


@pytest.mark.parametrize("query_len", [1, 2, 3, 9, 43, 86, 130, 343])  # of 343 * 3, five in the last task
def test_rows_of_several_queries(no_rows: type[Any], case_of: Callable[..., Any], query_len: int) -> None:
    """Prefill alone and behind a shared prefix, with diagonals that fall anywhere into tiles and tasks."""
    rows = no_rows(4)
    path = rows.take(7)
    for own in (query_len, query_len + 5):
        rows.add(path + rows.take(-(-own // 4)), query_len, 28 + own)
    rows.add(rows.take(-(-query_len // 4)), query_len, query_len)
    check(case_of(rows.permuted(random.Random(1)), 3, 1, 24))


@pytest.mark.parametrize("window", [1, 5, 64, 250, 256, 257, 300])
def test_windows_over_long_rows(no_rows: type[Any], case_of: Callable[..., Any], window: int) -> None:
    """A window may begin in any piece, and hide a shared segment from all of its rows or from some."""
    rows = no_rows(16)
    path = rows.take(33)
    for own, query_len in ((1, 1), (40, 9), (300, 1), (16, 16)):
        rows.add(path + rows.take(-(-own // 16)), query_len, 33 * 16 + own)
    rows.add(path, 3, 33 * 16, writes=False)
    check(case_of(rows.permuted(random.Random(window)), HEADS, 2, 16), AttentionOptions(window, None, SINKS))


def test_large_logits(rows_of: Callable[..., Any], case_of: Callable[..., Any]) -> None:
    for seed in range(5):
        case = case_of(rows_of(random.Random(seed), 4, 3), q_scale=80.0, seed=seed)
        assert (case.q.norm(dim=-1) > 80).all()
        check(case, tolerance=5e-5)


def test_equal_and_opposite_scores(no_rows: type[Any], case_of: Callable[..., Any]) -> None:
    """All weights equal: a mean of the values; and one score that hides all others."""
    rows = no_rows(4)
    rows.add(rows.take(75), 1, 300)
    case = case_of(rows, 2, 1, 16)
    case.q.zero_()
    torch.testing.assert_close(attend(case)[0, 0], case.pool.value(0)[0].flatten(0, 1).mean(0))
    case.q.fill_(1e4)
    case.k.fill_(1e4)  # the last token's key
    assert torch.equal(attend(case)[0], case.v[0].expand(2, -1))


@pytest.mark.parametrize("query_len", [1, 20])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_nan_is_not_hidden(
    no_rows: type[Any], case_of: Callable[..., Any], query_len: int, softcap: float | None
) -> None:
    """A key that is no number shows in every query that sees it, and in no other."""
    rows = no_rows(4)
    for _ in range(2):
        rows.add(rows.take(25), query_len, 100)
    case = case_of(rows)
    attend(case)
    case.pool.key(0)[:, rows.block_tables[0][3], 1] = torch.nan
    out = attend(case, AttentionOptions(None, softcap))
    assert out[:query_len].isnan().all()
    assert out[query_len:].isfinite().all()


def test_threads_and_neighbours_change_no_bit(no_rows: type[Any], case_of: Callable[..., Any]) -> None:
    rows = no_rows(16)
    lens = [(1, 700), (1, 40), (20, 530), (1, 257), (140, 150)]
    for query_len, kv_len in lens:
        rows.add(rows.take(-(-kv_len // 16)), query_len, kv_len)
    case = case_of(rows, 6, 2, 64, torch.bfloat16)
    whole = attend(case)
    torch.set_num_threads(2)
    assert torch.equal(attend(case), whole)
    token = 0
    for i, (query_len, kv_len) in enumerate(lens):
        alone = no_rows(16, num_blocks=rows.num_blocks)
        alone.add(rows.block_tables[i], query_len, kv_len)
        one = slice(token, token + query_len)
        part = type(case)(alone, case.pool, case.q[one], case.k[one], case.v[one])
        assert torch.equal(attend(part), whole[one])
        token += query_len


def test_a_thread_with_a_small_stack(no_rows: type[Any], case_of: Callable[..., Any]) -> None:
    rows = no_rows(16)
    rows.add(rows.take(10), 100, 160)
    case = case_of(rows, 6, 2, 64)
    whole, found = attend(case), []
    before = threading.stack_size(256 << 10)
    try:
        thread = threading.Thread(target=lambda: found.append(attend(case)))
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    assert torch.equal(found[0], whole)


def test_a_step_serves_every_layer(rows_of: Callable[..., Any], case_of: Callable[..., Any]) -> None:
    rows = rows_of(random.Random(3), 4, 3)
    every = [AttentionOptions(7), PLAIN, AttentionOptions(3, 1.0), AttentionOptions(7, None, SINKS), PLAIN]
    case = case_of(rows, HEADS, num_layers=len(every))
    attention = NativeAttention(rows.plan(), case.pool, np.array(rows.slots))
    outs = [attention(i, case.q, case.k, case.v, 0.25, options) for i, options in enumerate(every)]
    for layer, (out, options) in enumerate(zip(outs, every, strict=True)):
        # Compared last: no layer may write into another's result.
        assert error(out, expected(case, options, layer)) < 1e-5


def test_offsets_pass_32_bits(no_rows: type[Any], case_of: Callable[..., Any]) -> None:
    """Slots just below and above 2**31 elements, in a pool of which few pages are ever touched."""
    low, high = no_rows(16), no_rows(16)
    high.num_blocks = 2**31 // (16 * 64) - 2  # K of the last row's blocks lies just above
    for rows in (low, high):
        path = rows.take(1)
        for _ in range(2):
            rows.add(path + rows.take(1), 1, 16 + 9)
    small = case_of(low, 1, 1, 64, torch.bfloat16)
    big = KVPool(1, high.num_blocks, 1, 64, 16, torch.bfloat16)
    for table, far_table in zip(low.block_tables, high.block_tables, strict=True):
        for block, far in zip(table, far_table, strict=True):
            big.storage[:, :, :, far] = small.pool.storage[:, :, :, block]
    far_case = type(small)(high, big, small.q, small.k, small.v)
    assert torch.equal(attend(far_case), attend(small))
    assert not big.storage[:, :, :, :4].any()


def test_pools_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def pool(head_dim: int, dtype: torch.dtype) -> KVPool:
        return KVPool(1, 1, 1, head_dim, 4, dtype)

    assert cpu_native.serves(pool(16, torch.float32)), "these tests need a C compiler, as CI has one"
    assert cpu_native.serves(pool(256, torch.bfloat16))
    assert not cpu_native.serves(pool(16, torch.float16))
    assert not cpu_native.serves(pool(8, torch.float32))
    assert not cpu_native.serves(pool(264, torch.float32))
    monkeypatch.setattr(native, "library", lambda: None)
    cpu_native._kernel.cache_clear()
    assert not cpu_native.serves(pool(16, torch.float32))
    cpu_native._kernel.cache_clear()


def test_inputs_that_do_not_fit_are_a_bug(no_rows: type[Any], case_of: Callable[..., Any]) -> None:
    """Each would have the kernel read what is not there."""
    rows = no_rows(4)
    rows.add(rows.take(2), 3, 8)
    case = case_of(rows)
    attention = NativeAttention(rows.plan(), case.pool, np.array(rows.slots))
    q, k, v = case.q, case.k, case.v
    apart = torch.empty(*q.shape, 2)[..., 0]
    for wrong in (
        (q.bfloat16(), k, v),
        (q, k, v.double()),
        (q[:2], k, v),
        (q, k[:2], v),
        (q, k, v[:2]),
        (q, k[:, :1], v),
        (q, k, v[..., :8]),
        (q[..., :8], k, v),
        (q[:, :3], k, v),
        (apart, k, v),
    ):
        with pytest.raises(AssertionError):
            attention(0, wrong[0], wrong[1], wrong[2], 1.0)
    with pytest.raises(AssertionError):
        attention(1, q, k, v, 1.0)
    with pytest.raises(AssertionError):
        attention(0, q, k, v, 1.0, AttentionOptions(sinks=SINKS))


def test_the_header_has_the_same_limits() -> None:
    header = (Path(native.__file__).parent / "csrc" / "attention.h").read_text()
    limits = {name: int(value) for name, value in re.findall(r"#define (\w+) +(\d+)\b", header)}
    assert limits["MAX_HEAD_DIM"] == cpu_native.MAX_HEAD_DIM
    assert limits["MAX_MANY"] == native_work.MAX_TASK_QUERIES
    assert limits["MAX_FEW_SLOTS"] == native_work.PIECE_SLOTS

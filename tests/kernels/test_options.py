"""Windows, caps and sinks against the fp64 reference: alone, combined, over every kind of row and tree."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from ramet.kernels import attention
from ramet.kernels.cpu import CPUAttention
from ramet.kernels.cpu_work import WorkListBuilder
from ramet.kernels.options import PLAIN, AttentionOptions
from ramet.kernels.reference import paged_attention
from ramet.kernels.window import WindowedBuilder

HEADS = 6
SINKS = torch.linspace(-2.0, 3.0, HEADS)


def expected(case: Any, options: AttentionOptions, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rows, pool = case.rows, case.pool
    return paged_attention(
        case.q,
        pool.key(layer),
        pool.value(layer),
        rows.block_tables,
        rows.query_lens,
        rows.kv_lens,
        options=options,
    )


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2 distance."""
    return float((got.double() - want).norm() / want.norm())


def check(case: Any, options: AttentionOptions, min_saved: int = 0, tolerance: float = 1e-5) -> None:
    slots = torch.tensor(case.rows.slots)
    keep = slots >= 0
    case.pool.write(0, slots[keep], case.k[keep], case.v[keep])
    got = CPUAttention(case.rows.plan(min_saved), case.pool)(0, case.q, case.q.shape[-1] ** -0.5, options)
    out, lse = expected(case, options)
    assert got.out.shape == case.q.shape
    assert got.out.dtype == case.q.dtype
    assert error(got.out, out) < tolerance
    torch.testing.assert_close(got.lse.double(), lse, rtol=0, atol=1e-3)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    depth=st.integers(0, 4),
    block_size=st.sampled_from((1, 2, 4, 16)),
    min_saved=st.sampled_from((0, 16)),
    buffer_slots=st.sampled_from((None, 1, 3)),
    window=st.none() | st.integers(1, 40),
    softcap=st.sampled_from((None, 0.5, 50.0)),
    has_sinks=st.booleans(),
)
def test_ragged_trees_of_mixed_rows(
    rows_of: Callable[..., Any],
    case_of: Callable[..., Any],
    seed: int,
    depth: int,
    block_size: int,
    min_saved: int,
    buffer_slots: int | None,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
) -> None:
    rows = rows_of(random.Random(seed), block_size, depth, 3 if block_size < 16 else 1)
    case = case_of(rows, HEADS, seed=seed, q_scale=2.0)
    if buffer_slots is not None:  # so small that every segment goes in pieces
        case.pool.max_gather_slots = case.pool.max_widened_slots = buffer_slots * block_size
    check(case, AttentionOptions(window, softcap, SINKS if has_sinks else None), min_saved)


@pytest.mark.parametrize("window", [1, 3, 4, 5, 7, 8, 9, 12, 19, 20, 21, 64])
def test_windows_around_block_edges(no_rows: type[Any], case_of: Callable[..., Any], window: int) -> None:
    """Decode rows, prefill chunks and rows that only query on one shared path, at all offsets in a block."""
    rows = no_rows(4)
    path = rows.take(5)
    for own, query_len in product((1, 3, 4, 5, 8, 9), (1, 2, 4)):
        rows.add(path + rows.take(-(-own // 4)), min(query_len, own), 20 + own)
    for query_len in (1, 3, 6):
        rows.add(path, query_len, 20, writes=False)
    check(case_of(rows.permuted(random.Random(window)), HEADS), AttentionOptions(window))


@pytest.mark.parametrize("options", [AttentionOptions(9), AttentionOptions(None, 2.0, SINKS)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(
    rows_of: Callable[..., Any], case_of: Callable[..., Any], dtype: torch.dtype, options: AttentionOptions
) -> None:
    for seed in range(5):
        check(case_of(rows_of(random.Random(seed), 4, 3), HEADS, dtype=dtype), options, tolerance=5e-3)


@pytest.mark.usefixtures("path")
def test_layers_of_one_step_may_differ(rows_of: Callable[..., Any], case_of: Callable[..., Any]) -> None:
    rows = rows_of(random.Random(3), 4, 3)
    every = [AttentionOptions(7), PLAIN, AttentionOptions(3, 1.0), AttentionOptions(7, None, SINKS), PLAIN]
    case = case_of(rows, HEADS, num_layers=len(every))
    prepared = attention.prepare(case.pool, rows.plan(), rows.slots)
    outs = [
        attention.attend(prepared, layer, case.q, case.k, case.v, 0.25, options)
        for layer, options in enumerate(every)
    ]
    for layer, (out, options) in enumerate(zip(outs, every, strict=True)):
        assert error(out, expected(case, options, layer)[0]) < 1e-5


def test_an_option_that_is_ignored_would_show(
    rows_of: Callable[..., Any], case_of: Callable[..., Any]
) -> None:
    rows = rows_of(random.Random(3), 4, 3)
    case = case_of(rows, HEADS)
    for options in (AttentionOptions(7), AttentionOptions(8), AttentionOptions(None, 1.0)):
        with pytest.raises(AssertionError):
            check_against(case, options, PLAIN)
    with pytest.raises(AssertionError):
        check_against(case, AttentionOptions(7), AttentionOptions(8))
    with pytest.raises(AssertionError):
        check_against(case, AttentionOptions(sinks=SINKS), AttentionOptions(sinks=SINKS.flip(0)))


def check_against(case: Any, options: AttentionOptions, others: AttentionOptions) -> None:
    check(case, options)
    got = CPUAttention(case.rows.plan(), case.pool)(0, case.q, 0.25, others)
    assert error(got.out, expected(case, options)[0]) < 1e-3


def test_a_window_reads_less_and_shares_what_it_reads(no_rows: type[Any]) -> None:
    rows = no_rows(4)
    path = rows.take(100)
    for _ in range(8):
        rows.add(path + rows.take(2), 1, 407)

    def num_gathered(window: int | None) -> list[int]:
        plan = rows.plan()
        builder = WorkListBuilder(plan, 1024, 1024)
        if window is not None:
            builder = WindowedBuilder(plan, 1024, 1024, window)
        return [item.num_gathered * item.num_stretches for item in builder.build().items]

    assert num_gathered(None) == [56, 400]
    assert num_gathered(47) == [56, 40]  # once for all eight rows
    assert num_gathered(45) == [56, 40]  # from inside a block, which is gathered whole
    assert num_gathered(7) == [56]  # the shared segment lies outside of every window
    assert num_gathered(5) == [40]


@pytest.mark.parametrize(("window", "softcap"), [(0, None), (-1, None), (None, 0.0)])
def test_options_that_make_no_sense_are_a_bug(window: int | None, softcap: float | None) -> None:
    with pytest.raises(AssertionError):
        AttentionOptions(window, softcap)

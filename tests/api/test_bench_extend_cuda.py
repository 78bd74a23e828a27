"""The cases that extending is measured on are what they say."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is there for Linux only")

from ramet.api.bench_attention_cases import HEAD_DIM, NUM_HEADS
from ramet.api.bench_extend_cuda import EXTENSIONS, Extension


@pytest.mark.parametrize("name", EXTENSIONS)
def test_plans_are_what_the_names_say(name: str) -> None:
    extension = EXTENSIONS[name]
    plan = extension.plan()
    assert plan.num_rows == extension.num_rows
    assert set(plan.query_lens) == {extension.num_new}
    assert set(plan.kv_lens) == {extension.num_cached + extension.num_new}
    blocks = [set(table) for table in plan.block_tables]
    common = set.intersection(*blocks) if len(blocks) > 1 else set()
    assert len(common) * 16 == (extension.num_cached if extension.is_shared else 0)
    assert len(set.union(*blocks)) == sum(map(len, blocks)) - len(common) * (extension.num_rows - 1)
    assert len(plan.segments) == extension.is_shared
    assert not extension.plan(1 << 60).segments


def test_flops_count_each_query_and_the_keys_that_it_sees() -> None:
    extension = Extension(num_rows=3, num_new=5, num_cached=16)
    pairs = 3 * sum(16 + i for i in range(1, 6))
    assert extension.flops == 2 * 2 * pairs * NUM_HEADS * HEAD_DIM  # two products of a multiply and an add

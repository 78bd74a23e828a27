"""The trees that GPU attention is measured on are what their names say."""

from __future__ import annotations

import pytest

from ramet.api.bench_attention_cases import TREES, UNSHARED, case, even_tree, random_tree

TOKEN_BYTES = 2 * 8 * 128 * 2  # K and V of 8 heads of 128 in bf16


def test_an_even_tree() -> None:
    """T: a root, 8 children, 8 leaves each."""
    step = case("T", TREES["T"])
    assert step.num_branches == 64 and set(step.kv_lens) == {4096 + 2048 + 512}
    assert step.unique_tokens == 4096 + 8 * 2048 + 64 * 512
    assert step.unique_bytes == step.unique_tokens * TOKEN_BYTES + 2 * 64 * 32 * 128 * 2
    assert step.num_blocks == step.unique_tokens // 16
    # Depth-first: leaves of one child share it, the first leaf of the next child only the root.
    assert step.num_shared_blocks == ([0] + [384] * 7 + ([256] + [384] * 7) * 7)


@pytest.mark.parametrize("name", UNSHARED)
def test_unshared_batches_share_nothing(name: str) -> None:
    step = case(name, UNSHARED[name])
    assert not any(step.num_shared_blocks)
    assert step.unique_tokens == step.scores


@pytest.mark.parametrize("seed", range(3))
def test_a_random_tree_is_ragged_and_shares(seed: int) -> None:
    step = case("random", random_tree(seed))
    assert step.num_branches == 96 and len(set(step.kv_lens)) > 48
    assert step.unique_tokens < step.scores
    assert step.block_tables == case("random", random_tree(seed)).block_tables


def test_block_ids_in_order_and_permuted() -> None:
    forest = even_tree((2, 64))
    assert case("in order", forest, permuted=False).block_tables == [[0, 1, 2, 3], [4, 5, 6, 7]]
    (first, second) = case("permuted", forest).block_tables
    assert sorted(first + second) == list(range(8))

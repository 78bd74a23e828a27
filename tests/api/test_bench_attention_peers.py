"""Peers that are not installed are left out; what is handed to those that are."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from ramet.api.bench_attention_cases import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, case, even_tree
from ramet.api.bench_attention_peers import Inputs, fa3_cascade, flashinfer_cascade, installed


def test_only_what_can_be_imported_is_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", None)  # importing it is an ImportError
    assert list(installed()) == ["flashinfer decode", "flashinfer cascade"]


@pytest.fixture
def unshared() -> Inputs:
    step = case("unshared", even_tree((2, 40)), block_size=16)
    return Inputs(step, step.pool(2, "cpu"), torch.randn(2, NUM_HEADS, HEAD_DIM), workspace_bytes=0)


def test_pages_are_the_blocks_of_the_pool(unshared: Inputs) -> None:
    step = unshared.case
    pool = step.pool(2, "cpu")
    inputs = Inputs(step, pool, unshared.q, workspace_bytes=0)
    assert inputs.pages[1][0].shape == (step.num_blocks, 16, NUM_KV_HEADS, HEAD_DIM)
    for layer, (k, v) in enumerate(inputs.pages):
        assert k.is_contiguous() and v.is_contiguous()
        for head in range(NUM_KV_HEADS):
            assert torch.equal(k[:, :, head], pool.key(layer)[head])
            assert torch.equal(v[:, :, head], pool.value(layer)[head])


def test_tables_of_different_lengths_are_padded() -> None:
    step = case("ragged", [*even_tree((1, 40)), *even_tree((1, 16))], block_size=16)
    inputs = Inputs(step, step.pool(1, "cpu"), torch.randn(2, NUM_HEADS, HEAD_DIM), workspace_bytes=0)
    assert inputs.padded_table().tolist() == [step.block_tables[0], step.block_tables[1] + [0, 0]]
    assert inputs.starts([3, 1]).tolist() == [0, 3, 4]


def test_a_cascade_has_no_answer_where_nothing_is_shared(
    unshared: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    assert list(flashinfer_cascade(unshared)) == []
    assert list(fa3_cascade(unshared)) == []

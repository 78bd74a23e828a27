"""The door on a block-major pool: it writes, decodes and extends in one step, and engines run on it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ramet import LLM, SamplingParams
from ramet.engine.model_runner import ModelRunner
from ramet.kernels import attention
from ramet.kernels.cuda.workspace import Workspace
from ramet.kernels.kv_pool import KVPool
from ramet.kernels.options import AttentionOptions
from ramet.kernels.reference import paged_attention
from ramet.testing import tiny_llama


@pytest.mark.parametrize("seed", range(4))
def test_a_step_writes_then_attends(
    rows_of: Callable[..., Any], case_of: Callable[..., Any], device: str, seed: int
) -> None:
    rows = rows_of(random.Random(seed), 4, 3)
    case = case_of(rows, 9, 3, 16, num_layers=2, seed=seed, device=device, layout="block-major")
    pool = case.pool
    prepared = attention.prepare(pool, rows.plan(), rows.slots)
    before = pool.storage.clone()
    longest = max(rows.kv_lens)
    for layer, options in enumerate((AttentionOptions(window=5), AttentionOptions(window=longest))):
        out = attention.attend(prepared, layer, case.q, case.k, case.v, 0.25, options)
        key, value = pool.key(layer).cpu(), pool.value(layer).cpu()
        tables, queries, lens = rows.block_tables, rows.query_lens, rows.kv_lens
        want, _ = paged_attention(case.q.cpu(), key, value, tables, queries, lens, 0.25, options)
        assert (out.double().cpu() - want).norm() / want.norm() < 1e-5
        for token, slot in enumerate(rows.slots):
            if slot >= 0:
                before[layer, 0, :, slot // 4, slot % 4] = case.k[token]
                before[layer, 1, :, slot // 4, slot % 4] = case.v[token]
    assert torch.equal(before.nan_to_num(7.0), pool.storage.nan_to_num(7.0)), "what was written is k and v"
    pool.check()


def test_a_pool_keeps_its_workspace(no_rows: type[Any], case_of: Callable[..., Any], device: str) -> None:
    """Each step's lists go to the same buffers, which a captured graph could hold on to."""
    rows = no_rows(4)
    rows.add(rows.take(2), 1, 7)
    case = case_of(rows, device=device, layout="block-major")
    for _ in range(2):
        prepared = attention.prepare(case.pool, rows.plan(), rows.slots)
        attention.attend(prepared, 0, case.q, case.k, case.v, 0.25)
        assert len(case.pool.workspaces) == 1
        workspace = case.pool.workspaces[4]
    assert case.pool.workspaces[4] is workspace


def test_a_step_that_could_not_be_prepared_gives_nothing(
    no_rows: type[Any], case_of: Callable[..., Any], device: str
) -> None:
    """Not in a second call either, which would return what lay in the memory."""
    rows = no_rows(4)
    rows.add(rows.take(2), 1, 7)
    case = case_of(rows, device=device, layout="block-major")
    rows.block_tables[0][0] = -1
    prepared = attention.prepare(case.pool, rows.plan(), rows.slots)
    for _ in range(2):
        with pytest.raises(ValueError, match="block id"):
            attention.attend(prepared, 0, case.q, case.k, case.v, 0.25)


def test_a_row_that_was_extended_in_between_is_read_anew(device: str) -> None:
    """Its table is the same object, and has changed by more than the last block."""
    pool = KVPool(1, 8, 1, 16, 4, torch.float32, device, "block-major")
    table = [0, 1, 2, 3]
    for num_queries, kv_len in ((1, 15), (9, 15), (1, 16)):
        if num_queries > 1:
            table[1:] = [4, 5, 6]
        plan = attention.planner(pool).plan([table], [num_queries], [kv_len], [0])
        prepared = attention.prepare(pool, plan, [-1] * num_queries)
        q, kv = (torch.zeros(num_queries, heads, 16, device=device) for heads in (2, 1))
        attention.attend(prepared, 0, q, kv, kv, 0.25)
    workspace = pool.workspaces[2]
    assert isinstance(workspace, Workspace)
    assert workspace.buffer.block_ids[:4].tolist() == table


def test_an_engine_runs_on_it(tiny_module: Any, device: str) -> None:
    """The same tokens as on the CPU path: chunks, a fork, siblings side by side, copy-on-write."""

    def run(llm: LLM) -> list[list[int]]:
        root = llm.branch(list(range(1, 39)))
        kids = root.fork(2)
        kids[0].extend([7, 8, 9])
        params = [SamplingParams(temperature=t, seed=1, max_tokens=3, ignore_eos=True) for t in (0.0, 0.9)]
        llm.step(kids, params)
        return [kid.token_ids for kid in kids]

    settings: dict[str, Any] = {"num_blocks": 16, "max_batch_tokens": 24}
    expected = run(LLM(tiny_module, **settings))
    if device == "cuda":
        found = LLM(tiny_llama(), device=device, **settings)
    else:
        found = LLM(tiny_module, **settings)
        runner = found.engine.runner
        assert isinstance(runner, ModelRunner)
        shape = runner.model.shape
        sizes = (shape.num_layers, 16, shape.num_kv_heads, shape.head_dim, 16, torch.float32)
        found.engine.runner = ModelRunner(runner.model, KVPool(*sizes, device, "block-major"))
    assert run(found) == expected

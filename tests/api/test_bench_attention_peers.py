"""Peers that are not installed are left out; those that are get the case that they are timed on.

There is no GPU here, so stand-ins take the peers' arguments and do what these ask for, in fp64.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ramet.api.bench_attention_cases import (
    HEAD_DIM,
    NUM_HEADS,
    NUM_KV_HEADS,
    SCALE,
    Case,
    Node,
    case,
    even_tree,
)
from ramet.api.bench_attention_peers import PEERS, Inputs, fa3_cascade, flashinfer_cascade, installed

Part = tuple[torch.Tensor, torch.Tensor]  # outputs [n, H, D] and log-sum-exps [n, H]
SHAPE = (NUM_HEADS, NUM_KV_HEADS, HEAD_DIM)

CASES = {
    "three levels": case("three levels", even_tree((1, 64), (3, 32), (2, 20)), block_size=16),
    "ragged": case("ragged", [Node(32), Node(48, [Node(5), Node(40)]), Node(17), Node(20)], block_size=16),
    "nothing shared": case("nothing shared", even_tree((3, 40)), block_size=16),
}


def inputs_of(step: Case) -> Inputs:
    torch.manual_seed(0)
    q = torch.randn(step.num_branches, NUM_HEADS, HEAD_DIM, dtype=torch.float64)
    return Inputs(step, step.pool(2, "cpu"), q, workspace_bytes=0)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Part:
    """q [n, H, D], k and v [T, Hkv, D]; no keys yield -inf."""
    k, v = (x.double().repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("nhd,thd->nht", q, k) * SCALE
    lse = torch.logsumexp(scores, -1)
    return torch.einsum("nht,thd->nhd", torch.exp(scores - lse[..., None]), v), lse


def merged(parts: list[Part]) -> torch.Tensor:
    lses = torch.stack([lse for _, lse in parts])
    return (torch.softmax(lses, 0)[..., None] * torch.stack([out for out, _ in parts])).sum(0)


def paged(pages: torch.Tensor, ids: torch.Tensor, length: int) -> torch.Tensor:
    return pages[ids.long()].flatten(0, 1)[:length]


def expected(inputs: Inputs, layer: int) -> torch.Tensor:
    step, (k, v) = inputs.case, inputs.pages[layer]
    rows = zip(inputs.q, step.block_tables, step.kv_lens, strict=True)
    ids_of = torch.tensor
    return torch.cat([attend(q[None], paged(k, ids_of(t), n), paged(v, ids_of(t), n))[0] for q, t, n in rows])


class Prefill:
    def __init__(self, workspace: torch.Tensor, layout: str, backend: str) -> None:
        assert (layout, backend) == ("NHD", "fa2")


class Cascade:
    def __init__(self, num_levels: int, workspace: torch.Tensor, layout: str) -> None:
        assert layout == "NHD"
        self.num_levels = num_levels

    def plan(self, queries: Any, starts: Any, ids: Any, last: Any, *shape: int, **dtypes: Any) -> None:
        assert shape[:3] == SHAPE and len(self._batch_prefill_wrappers) == self.num_levels  # type: ignore[attr-defined]
        self.page_size = shape[3]
        self.levels = list(zip(queries, starts, ids, last, strict=True))
        assert len(self.levels) == self.num_levels

    def run(self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return merged([self._level(q, pages, *level) for level in self.levels])

    def _level(self, q: torch.Tensor, pages: Any, queries: Any, starts: Any, ids: Any, last: Any) -> Part:
        groups = []
        for group in range(len(last)):
            own = ids[starts[group] : starts[group + 1]]
            length = (len(own) - 1) * self.page_size + int(last[group]) if len(own) else 0
            k, v = (paged(x, own, length) for x in pages)
            groups.append(attend(q[queries[group] : queries[group + 1]], k, v))
        outs, lses = zip(*groups, strict=True)
        return torch.cat(outs).nan_to_num(), torch.cat(lses)


class Decode(Cascade):
    def __init__(self, workspace: torch.Tensor, layout: str, use_tensor_cores: bool) -> None:
        assert use_tensor_cores
        super().__init__(1, workspace, layout)
        self._batch_prefill_wrappers = [self]

    def plan(self, starts: Any, ids: Any, last: Any, *shape: int, **dtypes: Any) -> None:  # type: ignore[override]
        super().plan([torch.arange(len(last) + 1)], [starts], [ids], [last], *shape, **dtypes)

    def run(self, q: torch.Tensor, pages: Any, out: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return out.copy_(super().run(q, pages))


def schedule(**what: Any) -> tuple[Any, ...]:
    assert (what["num_heads_q"], what["num_heads_kv"], what["headdim"]) == SHAPE
    names = ("cache_seqlens", "max_seqlen_q", "max_seqlen_k", "cu_seqlens_q", "causal", "num_splits")
    assert what["batch_size"] == len(what["cache_seqlens"])
    return tuple(what[name] for name in names)


def varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, most: int, starts: torch.Tensor, longest: int, *,
    seqused_k: torch.Tensor, block_table: torch.Tensor, causal: bool, num_splits: int,
    scheduler_metadata: Any, out: torch.Tensor | None = None, return_softmax_lse: bool = False, **rest: Any,
) -> Any:  # fmt: skip
    planned = (seqused_k, most, longest, starts, causal, num_splits)
    assert all(a is b for a, b in zip(scheduler_metadata, planned, strict=True)), "scheduled for another call"
    assert rest == {"softmax_scale": SCALE, "fa_version": 3} and longest == seqused_k.max()
    assert causal == (most == 1) and most == starts.diff().max(), "a causal call has one query a sequence"
    parts = []
    for row, (table, length) in enumerate(zip(block_table, seqused_k.tolist(), strict=True)):
        ids = table[: -(-length // k.shape[1])]
        parts.append(attend(q[starts[row] : starts[row + 1]], paged(k, ids, length), paged(v, ids, length)))
    outs, lses = (torch.cat(x) for x in zip(*parts, strict=True))
    outs = outs if out is None else out.copy_(outs)
    return (outs, lses.T) if return_softmax_lse else outs  # log-sum-exps are [H, T]


def merge_states(out: torch.Tensor, out_lse: None, *states: Any) -> None:
    above, above_lse, below, below_lse, *options = states
    assert options == [None, None]
    out.copy_(merged([(above, above_lse.T), (below, below_lse.T)]))


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    def module(name: str, **members: Any) -> None:
        made = ModuleType(name)
        vars(made).update(members)
        monkeypatch.setitem(sys.modules, name, made)

    module(
        "flashinfer",
        BatchDecodeWithPagedKVCacheWrapper=Decode,
        BatchPrefillWithPagedKVCacheWrapper=Prefill,
        MultiLevelCascadeAttentionWrapper=Cascade,
    )
    module("vllm")
    module("vllm._C_stable_libtorch")
    module("vllm.vllm_flash_attn", flash_attn_varlen_func=varlen, get_scheduler_metadata=schedule)
    merge = SimpleNamespace(merge_attn_states=merge_states)
    monkeypatch.setattr(torch.ops, "_C", merge, raising=False)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("step", CASES.values(), ids=CASES)
def test_each_peer_is_asked_for_the_attention_of_the_case(step: Case, peer: str) -> None:
    inputs = inputs_of(step)
    for layer in PEERS[peer][1](inputs):
        for index in (1, 0):
            torch.testing.assert_close(layer(index), expected(inputs, index))


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("peer", "ways"),
    [(flashinfer_cascade, {"three levels": 2, "ragged": 1}), (fa3_cascade, {"three levels": 2})],
)
def test_a_cascade_answers_only_where_it_finds_its_kind_of_sharing(
    peer: Callable[[Inputs], Any], ways: dict[str, int]
) -> None:
    found = {name: len(list(peer(inputs_of(step)))) for name, step in CASES.items()}
    assert {name: number for name, number in found.items() if number} == ways


@pytest.mark.usefixtures("stand_ins")
def test_only_what_can_be_imported_is_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed() == {name: peer for name, (_, peer) in PEERS.items()}
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", None)  # importing it is an ImportError now
    assert list(installed()) == ["flashinfer decode", "flashinfer cascade"]

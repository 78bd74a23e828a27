"""Extending on a GPU, a layer: prompts with and without a cached prefix, siblings on a trunk; and peers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.table import Table

from ramet.api.bench import Report
from ramet.api.bench_attention_cases import BLOCK_SIZE, DTYPE, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, SCALE
from ramet.api.cuda_timing import Timer
from ramet.kernels.cuda.extend import extend
from ramet.kernels.cuda.extend_work import ExtendWork
from ramet.kernels.cuda.workspace import Workspace
from ramet.kernels.kv_pool import KVPool
from ramet.kernels.plan import AttentionPlan, Planner

NUM_LAYERS = 2
MAX_ERROR = 5e-3  # relative, against fp64 on the same inputs
GROUP = NUM_HEADS // NUM_KV_HEADS


@dataclass(frozen=True)
class Extension:
    """Rows of `num_new` tokens each behind `num_cached`, which are the same blocks for all if shared."""

    num_rows: int
    num_new: int
    num_cached: int
    is_shared: bool = False

    @property
    def flops(self) -> float:
        per_row = self.num_new * self.num_cached + self.num_new * (self.num_new + 1) / 2
        return 4 * self.num_rows * per_row * NUM_HEADS * HEAD_DIM

    def plan(self, min_saved: int = 0) -> AttentionPlan:
        cached, new = self.num_cached // BLOCK_SIZE, -(-self.num_new // BLOCK_SIZE)
        num_shared = cached if self.is_shared else 0
        own = cached - num_shared + new
        ids = np.random.default_rng(0).permutation(num_shared + self.num_rows * own).tolist()
        starts = range(num_shared, len(ids), own)
        tables = [ids[:num_shared] + ids[start : start + own] for start in starts]
        common = [0, *[num_shared] * (self.num_rows - 1)]
        lens = [self.num_cached + self.num_new] * self.num_rows
        return Planner(BLOCK_SIZE, min_saved).plan(tables, [self.num_new] * self.num_rows, lens, common)


EXTENSIONS = {
    "2k on 8k": Extension(1, 2048, 8192),
    "8k": Extension(1, 8192, 0),
    "4 x 2k": Extension(4, 2048, 0),
    "512 on 8k": Extension(1, 512, 8192),
    "16 on 8k": Extension(1, 16, 8192),
    "64 x 8 on a trunk of 8k": Extension(64, 8, 8192, is_shared=True),
    "8 x 64 on a trunk of 8k": Extension(8, 64, 8192, is_shared=True),
}


def measure(timer: Timer, report: Report) -> None:
    """Add to a report; every result is checked against fp64 first."""
    table = Table(title="Extend, microseconds a layer", title_justify="left")
    names = ["unshared", *(name for name, _ in _peers())]
    for column in ("case", "ramet us", "TFLOP/s", *(f"{name} us" for name in names)):
        table.add_column(column, justify="right")
    for name, extension in EXTENSIONS.items():
        plan = extension.plan()
        num_blocks = 1 + max(map(max, plan.block_tables))
        pool = KVPool(NUM_LAYERS, num_blocks, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, DTYPE, "cuda")
        pool.storage.normal_()
        q = torch.randn(plan.num_tokens, NUM_HEADS, HEAD_DIM, dtype=DTYPE, device="cuda")
        times = {"ramet": _layer_us(timer, plan, pool, q)}
        if extension.is_shared:
            times["unshared"] = _layer_us(timer, extension.plan(1 << 60), pool, q)
        for peer, make in _peers():
            try:
                layer = make(extension, plan, pool, q)
                if layer is not None:
                    times[peer] = timer.layer_us(layer, NUM_LAYERS, 20)
            except Exception as failure:  # not ours, and our own numbers are still wanted
                warnings.warn(f"{peer} on {name}: {failure}", stacklevel=2)
        us = times.pop("ramet")
        report.metrics[f"extend {name}_us"] = us
        report.metrics[f"extend {name}_tflop_s"] = extension.flops / us / 1e6
        for other, other_us in times.items():
            report.metrics[f"extend {name}_{other}_us"] = other_us
            report.metrics[f"extend {name}_beside_{other}"] = other_us / us
        shown = [f"{times[other]:.1f}" if other in times else "-" for other in names]
        table.add_row(name, f"{us:.1f}", f"{extension.flops / us / 1e6:.0f}", *shown)
        del pool
        torch.cuda.empty_cache()
    report.tables.append(table)
    for backend in ("fa2", "fa3"):
        if (metric := f"extend 2k on 8k_beside_flashinfer {backend}") in report.metrics:
            report.target(metric, ">=", 0.9, "goal")


def _layer_us(timer: Timer, plan: AttentionPlan, pool: KVPool, q: torch.Tensor) -> float:
    workspace = Workspace(pool, NUM_HEADS)
    work = ExtendWork(plan, np.arange(plan.num_rows), workspace)
    out = torch.full_like(q, torch.nan)
    for buffer in (workspace.part_out, workspace.part_lse):
        buffer.fill_(torch.nan)

    def layer(index: int) -> None:
        extend(work, index, q, out, SCALE)

    layer(0)
    error = _error(plan, pool, q, out)
    assert error < MAX_ERROR, f"error {error:.1e} against fp64"
    return timer.layer_us(layer, NUM_LAYERS, 20)


def _error(plan: AttentionPlan, pool: KVPool, q: torch.Tensor, out: torch.Tensor) -> float:
    """The largest relative error of the first, the middle and the last row, at up to 64 of their queries."""
    errors = []
    for row in {0, plan.num_rows // 2, plan.num_rows - 1}:
        first, end, length = (int(x) for x in (*plan.query_starts[row : row + 2], plan.kv_lens[row]))
        ids = torch.tensor(plan.block_tables[row], device="cuda")
        key, value = (
            side[:, ids].flatten(1, 2)[:, :length].double() for side in (pool.key(0), pool.value(0))
        )  # [Hkv, K, D]
        chosen = torch.arange(first, end, max(1, (end - first) // 64), device="cuda")
        queries = q[chosen].double().view(-1, NUM_KV_HEADS, GROUP, HEAD_DIM)
        scores = torch.einsum("qhgd,hkd->hgqk", queries, key) * SCALE
        last = chosen - end + length  # the position of each query
        scores.masked_fill_(torch.arange(length, device="cuda") > last[:, None], -torch.inf)
        want = torch.einsum("hgqk,hkd->qhgd", scores.softmax(-1), value).flatten(1, 2)
        errors.append(float((out[chosen].double() - want).norm() / want.norm()))
    return max(errors)


Layer = Callable[[int], object]
Peer = Callable[[Extension, AttentionPlan, KVPool, torch.Tensor], Layer | None]


def _peers() -> Iterator[tuple[str, Peer]]:
    """Other kernels that are installed; None where one cannot do a case."""
    yield "torch", _torch_sdpa
    try:
        import flashinfer  # noqa: F401
    except ImportError:
        return
    for backend in ("fa2", "fa3"):
        yield f"flashinfer {backend}", partial(_flashinfer_prefill, backend)


def _torch_sdpa(extension: Extension, plan: AttentionPlan, pool: KVPool, q: torch.Tensor) -> Layer | None:
    """Torch's FlashAttention 2 on KV that lies dense, with heads repeated beforehand: no pages."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    if extension.num_rows > 1:
        return None
    length = extension.num_cached + extension.num_new
    shape = (NUM_LAYERS, 1, NUM_HEADS, length, HEAD_DIM)
    k, v = (torch.randn(shape, dtype=DTYPE, device="cuda") for _ in range(2))
    queries = q.transpose(0, 1)[None].contiguous()
    mask: Any = causal_lower_right(extension.num_new, length) if extension.num_cached else None

    def layer(index: int) -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            F.scaled_dot_product_attention(queries, k[index], v[index], mask, is_causal=mask is None)

    return layer


def _flashinfer_prefill(
    backend: str, extension: Extension, plan: AttentionPlan, pool: KVPool, q: torch.Tensor
) -> Layer | None:
    """FlashInfer's paged prefill; each row reads all that it sees."""
    import flashinfer

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
    lens, num_blocks = plan.kv_lens.tolist(), [len(table) for table in plan.block_tables]
    wrapper.plan(
        int32(plan.query_starts.tolist()),
        int32([0, *np.cumsum(num_blocks).tolist()]),
        int32([block for table in plan.block_tables for block in table]),
        int32([(length - 1) % BLOCK_SIZE + 1 for length in lens]),
        NUM_HEADS,
        NUM_KV_HEADS,
        HEAD_DIM,
        BLOCK_SIZE,
        causal=True,
        q_data_type=DTYPE,
        kv_data_type=DTYPE,
    )
    pages = [
        tuple(side.permute(1, 2, 0, 3).contiguous() for side in (pool.key(layer), pool.value(layer)))
        for layer in range(NUM_LAYERS)
    ]
    return lambda layer: wrapper.run(q, pages[layer])

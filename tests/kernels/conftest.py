"""Random ragged trees of rows over a poisoned pool, for every test of attention."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from ramet.kernels import cpu_native
from ramet.kernels.kv_pool import KVPool, Layout
from ramet.kernels.plan import AttentionPlan, Planner, shared_with_previous


@dataclass
class Rows:
    """The rows of one step in depth-first order, as an engine would hand them down."""

    block_size: int
    num_blocks: int = 0
    block_tables: list[list[int]] = field(default_factory=list)
    query_lens: list[int] = field(default_factory=list)
    kv_lens: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)

    def add(self, table: list[int], query_len: int, kv_len: int, writes: bool = True) -> None:
        table = table[: -(-kv_len // self.block_size)]
        self.block_tables.append(table)
        self.query_lens.append(query_len)
        self.kv_lens.append(kv_len)
        positions = range(kv_len - query_len, kv_len)
        b = self.block_size
        self.slots += [table[p // b] * b + p % b if writes else -1 for p in positions]

    def take(self, num_blocks: int) -> list[int]:
        self.num_blocks += num_blocks
        return list(range(self.num_blocks - num_blocks, self.num_blocks))

    def permuted(self, rng: random.Random, spare: int = 3) -> Rows:
        """The same rows on other block ids, in a pool with blocks that no row names."""
        ids = list(range(self.num_blocks + spare))
        rng.shuffle(ids)
        b = self.block_size
        slots = [s if s < 0 else ids[s // b] * b + s % b for s in self.slots]
        tables = [[ids[block] for block in table] for table in self.block_tables]
        return Rows(b, len(ids), tables, self.query_lens, self.kv_lens, slots)

    def plan(self, min_saved: int = 0) -> AttentionPlan:
        shared = shared_with_previous(self.block_tables)
        return Planner(self.block_size, min_saved).plan(
            self.block_tables, self.query_lens, self.kv_lens, shared
        )


def random_rows(rng: random.Random, block_size: int, depth: int, longest: int = 4) -> Rows:
    rows = Rows(block_size)

    def leaf(path: list[int]) -> None:
        kind = rng.choice(("decode", "decode", "extend", "query-only"))
        held = len(path) * block_size
        if kind == "query-only" and held:
            kv_len = rng.choice((held, rng.randint(1, held)))
            rows.add(path, min(kv_len, rng.choice((1, 1, 3))), kv_len, writes=False)
            return
        own = rng.randint(1, longest * block_size)
        table = path + rows.take(-(-own // block_size))
        rows.add(table, rng.randint(1, own) if kind == "extend" else 1, held + own)

    def grow(path: list[int], level: int) -> None:
        path = path + rows.take(rng.randint(0, longest))
        for _ in range(rng.choice((1, 2, 2, 3))):
            if level >= depth or rng.random() < 0.3:
                leaf(path)
            else:
                grow(path, level + 1)

    grow([], 0)
    return rows.permuted(rng)


@dataclass
class Case:
    """A step: what is in the pool already, and q, k, v of its tokens. All other slots hold NaN."""

    rows: Rows
    pool: KVPool
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def make_case(
    rows: Rows,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    q_scale: float = 1.0,
    num_layers: int = 1,
    device: str = "cpu",
    layout: Layout | None = None,
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    num_tokens = sum(rows.query_lens)
    pool = KVPool(num_layers, rows.num_blocks, num_kv_heads, head_dim, rows.block_size, dtype, device, layout)
    pool.storage.fill_(torch.nan)
    if pool.layout == "head-major":
        pool.gather_buffer.fill_(torch.nan)
        pool.widened_buffer.fill_(torch.nan)
    b = rows.block_size
    held = {
        table[p // b] * b + p % b
        for table, kv_len in zip(rows.block_tables, rows.kv_lens, strict=True)
        for p in range(kv_len)
    } - set(rows.slots)
    index = torch.tensor(sorted(held), dtype=torch.int64, device=device)
    for layer in range(num_layers):
        for side in (pool.key(layer), pool.value(layer)):
            side[:, index // b, index % b] = normal(len(held), num_kv_heads, head_dim).transpose(0, 1)
    q = normal(num_tokens, num_heads, head_dim) * q_scale
    return Case(rows, pool, q, *(normal(num_tokens, num_kv_heads, head_dim) for _ in range(2)))


@pytest.fixture
def rows_of() -> Callable[..., Rows]:
    """Random rows: (rng, block_size, depth, longest)."""
    return random_rows


@pytest.fixture
def no_rows() -> type[Rows]:
    """Rows without a row, to add to."""
    return Rows


@pytest.fixture
def case_of() -> Callable[..., Case]:
    """A step over given rows, with a pool poisoned by NaN wherever no row looks."""
    return make_case


@pytest.fixture(params=["C", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both CPU paths in turn: the C kernels, and torch's operators as if there were no compiler."""
    if request.param == "torch":
        monkeypatch.setattr(cpu_native, "serves", lambda pool: False)
    return str(request.param)

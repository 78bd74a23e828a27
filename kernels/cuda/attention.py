"""Attention on a GPU: rows with one query are decoded, the others extended; each kind has its kernels."""

from __future__ import annotations

import numpy as np
import torch

from ramet.kernels.cuda.decode import decode
from ramet.kernels.cuda.extend import extend
from ramet.kernels.cuda.extend_work import ExtendWork
from ramet.kernels.cuda.work import DecodeWork
from ramet.kernels.cuda.workspace import Workspace
from ramet.kernels.kv_pool import KVPool
from ramet.kernels.options import PLAIN, AttentionOptions
from ramet.kernels.plan import AttentionPlan


class GPUAttention:
    """One step's attention over one pool: called by each layer; its work lists are made by the first call."""

    def __init__(self, plan: AttentionPlan, pool: KVPool) -> None:
        self.pool = pool
        self._plan = plan
        self._longest = int(plan.kv_lens.max())
        self._workspace: Workspace | None = None  # known with the number of query heads
        self._decode: DecodeWork | None = None
        self._extend: ExtendWork | None = None

    def _prepare(self, num_heads: int) -> None:
        workspace = self.pool.workspaces.get(num_heads)
        if workspace is None:
            workspace = self.pool.workspaces[num_heads] = Workspace(self.pool, num_heads)
        assert isinstance(workspace, Workspace), "the pool keeps what it was given"
        is_decode = self._plan.query_lens == 1
        rows = np.flatnonzero(is_decode), np.flatnonzero(~is_decode)
        if len(rows[0]):
            self._decode = DecodeWork(self._plan, rows[0], workspace)
        else:
            self._decode = None
            workspace.lists.forget()
        self._extend = ExtendWork(self._plan, rows[1], workspace) if len(rows[1]) else None
        self._workspace = workspace  # last: a step whose lists could not be made is not prepared

    def __call__(
        self, layer: int, q: torch.Tensor, scale: float, options: AttentionOptions = PLAIN
    ) -> torch.Tensor:
        """Attend with q [T, H, D] over what the pool holds for `layer`: out [T, H, D], dense."""
        assert q.shape[0] == self._plan.num_tokens, "the batch is not the one that was planned"
        assert q.dtype == self.pool.dtype, "queries and pool differ in dtype"
        if self._workspace is None or self._workspace.num_heads != q.shape[1]:
            self._prepare(q.shape[1])
        if options.window is not None and options.window >= self._longest:
            options = AttentionOptions(None, options.softcap, options.sinks)  # it cuts nothing off
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self._extend is not None:
            extend(self._extend, layer, q, out, scale, options)
        if self._decode is not None:
            decode(self._decode, layer, q, out, scale, options)
        return out

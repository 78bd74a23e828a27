"""The planner of a GPU's steps: trees are folded in C (`csrc/fold.c`)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np

from ramet.kernels.cuda import planning
from ramet.kernels.plan import IntArray, Planner, Tree

_NEVER = 2**62  # blocks: more than any segment saves


@functools.cache
def _fold_in_c() -> Callable[..., int]:
    """`ramet_fold` of csrc/fold.c."""
    fold = planning.library().ramet_fold
    lists, numbers = (ctypes.py_object, ctypes.py_object), (ctypes.c_int64,) * 3
    fold.argtypes = (*lists, ctypes.c_char_p, *numbers, ctypes.c_void_p)
    fold.restype = ctypes.c_int64
    return fold


class GPUPlanner(Planner):
    """Makes the plans that Planner defines, new trees three to ten times as fast."""

    def _tree(self, query_lens: list[int], lens: IntArray, num_shared_blocks: list[int]) -> Tree:
        assert not self.min_shared_fraction, "what a segment's rows read besides does not matter on a GPU"
        n = len(query_lens)
        assert n == len(lens) == len(num_shared_blocks), "the inputs differ in rows"
        assert n > 0, "a step has at least one row"
        out = np.empty(9 * n, dtype=np.int64)
        least_blocks = min(-(-self.min_shared_tokens_saved // self.block_size), _NEVER)
        sizes = n, self.block_size, least_blocks
        fold = _fold_in_c()
        num_segments = fold(query_lens, num_shared_blocks, lens.tobytes(), *sizes, out.ctypes.data)
        out.setflags(write=False)  # the plans of this tree share it
        return Tree(
            query_lens=query_lens.copy(),
            num_shared_blocks=num_shared_blocks.copy(),
            least_kv_lens=out[3 * n + 1 : 4 * n + 1],
            queries=out[:n],
            query_starts=out[n : 2 * n + 1],
            private_block0=out[2 * n + 1 : 3 * n + 1],
            segment_array=out[4 * n + 1 : 4 * n + 1 + 5 * num_segments].reshape(-1, 5),
        )

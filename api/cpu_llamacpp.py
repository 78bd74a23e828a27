"""llama.cpp for `ramet bench cpu`, as well as it can share: one unified KV, and seq_cp for every fork.

What a tree needs is done by hand here, with what the bench knows and a server would not: which sequences
later calls go on from. They stay, all others are dropped at once.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import numpy as np

from ramet.api.cpu_result import Result, Skipped, check_lengths
from ramet.api.cpu_sizes import calls_after
from ramet.api.extras import remedy
from ramet.api.workloads import BEAM, Call, Request, Samples, Workload, resolve
from ramet.engine.model_files import find_packaged_gguf

_NUM_CELLS, _NUM_SEQUENCES, _BATCH = 8192, 256, 512


class LlamaCpp:
    def __init__(self, threads: int) -> None:
        try:
            import llama_cpp
        except ImportError as error:
            raise Skipped(f"llama.cpp is not installed; this compiles it: {remedy('bench')}") from error
        self.api: Any = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        self.api.llama_log_set(self._quiet, ctypes.c_void_p(0))
        self.api.llama_backend_init()
        path = os.fsencode(find_packaged_gguf())
        self._model = self.api.llama_model_load_from_file(path, self.api.llama_model_default_params())
        params = self.api.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = _NUM_CELLS, _NUM_SEQUENCES, True
        params.n_batch = params.n_ubatch = _BATCH
        params.n_threads = params.n_threads_batch = threads
        self._context = self.api.llama_init_from_model(self._model, params)
        self._memory = self.api.llama_get_memory(self._context)
        self._batch = self.api.llama_batch_init(_BATCH, 0, 1)
        self._vocab_size = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self._model))
        # Gumbel noise is drawn beforehand: adding it and taking the maximum is the cheapest way to sample.
        self._noise = np.random.default_rng(0).gumbel(size=self._vocab_size * 4).astype(np.float32)

    def run(self, workload: Workload) -> Result:
        if next(iter(workload)).mode == BEAM:
            raise Skipped("llama.cpp has no beam search any more")
        self.api.llama_memory_clear(self._memory, True)
        self._live: dict[int, list[int]] = {}  # tokens that have KV, by sequence
        self._free = list(range(_NUM_SEQUENCES))
        self._rng = np.random.default_rng(workload.seed)
        self._computed, self._first = 0, 0.0
        outputs: dict[int, Samples] = {}
        start = time.perf_counter()
        for index, calls in enumerate(workload.rounds):
            self._round([resolve(call, outputs) for call in calls], outputs)
            self._drop_all_but(calls_after(workload, index), outputs)
        wall = time.perf_counter() - start
        check_lengths(workload, outputs)
        return Result(wall, workload.totals().output_tokens, self._first - start, self._computed)

    def _round(self, requests: list[Request], outputs: dict[int, Samples]) -> None:
        rows: list[tuple[int, list[int], int]] = []  # sequence, its new tokens, how many it wants
        for request in requests:
            logits = self._prefill(request.prompt)
            first = self._last_sequence
            samples = outputs[request.call.uid] = [[] for _ in range(request.call.n)]
            for index, new in enumerate(samples):
                sequence = first if index == 0 else self._copy(first, len(request.prompt))
                new.append(self._sample(logits))
                self._first = self._first or time.perf_counter()
                rows.append((sequence, new, request.call.max_tokens))
        while rows := [row for row in rows if len(row[1]) < row[2]]:
            self._decode([(s, len(self._live[s]), new[-1], True) for s, new, _ in rows])
            for index, (sequence, new, _) in enumerate(rows):
                self._live[sequence].append(new[-1])
                new.append(self._sample(self._logits(index)))

    def _prefill(self, prompt: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Compute what no live sequence has of a prompt, in a new sequence; the last token's logits."""
        source, length = None, 0
        for sequence, tokens in self._live.items():
            common = min(_num_common(tokens, prompt), len(prompt) - 1)
            if common > length:
                source, length = sequence, common
        sequence = self._last_sequence = self._free.pop() if source is None else self._copy(source, length)
        self._live[sequence] = list(prompt)
        self._computed += len(prompt) - length
        for begin in range(length, len(prompt), _BATCH):
            end = min(begin + _BATCH, len(prompt))
            last = len(prompt) - 1
            self._decode([(sequence, at, prompt[at], at == last) for at in range(begin, end)])
        return self._logits(end - begin - 1)

    def _copy(self, source: int, length: int) -> int:
        target = self._free.pop()
        self.api.llama_memory_seq_cp(self._memory, source, target, 0, length)
        self._live[target] = self._live[source][:length]
        return target

    def _drop_all_but(self, later: list[Call], outputs: dict[int, Samples]) -> None:
        """Keep, for each later prompt, the one sequence that has most of what it starts with."""
        kept: dict[int, int] = {}
        for call in later:
            start = _known_start(call, outputs)
            common, sequence = max((_num_common(t, start), s) for s, t in self._live.items())
            kept[sequence] = max(kept.get(sequence, 0), common)
        for sequence in list(self._live):
            length = kept.get(sequence, 0)
            self.api.llama_memory_seq_rm(self._memory, sequence, length, -1)
            if length:
                del self._live[sequence][length:]
            else:
                del self._live[sequence]
                self._free.append(sequence)

    def _decode(self, tokens: list[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, (sequence, position, token, wants_logits) in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = wants_logits
        status = self.api.llama_decode(self._context, batch)
        assert status == 0, f"llama_decode gave {status}"

    def _logits(self, index: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        pointer = self.api.llama_get_logits_ith(self._context, index)
        return np.ctypeslib.as_array(pointer, shape=(self._vocab_size,))

    def _sample(self, logits: np.ndarray[Any, np.dtype[np.float32]]) -> int:
        start = int(self._rng.integers(len(self._noise) - self._vocab_size))
        return int((logits + self._noise[start : start + self._vocab_size]).argmax())


def _num_common(a: list[int], b: list[int]) -> int:
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return next(index for index in range(length) if a[index] != b[index])


def _known_start(call: Call, outputs: dict[int, Samples]) -> list[int]:
    """The prompt up to the first part that was not generated yet."""
    known: list[int] = []
    for part in call.prompt:
        if hasattr(part, "tokens"):
            known.extend(part.tokens)
        elif part.call in outputs:
            known.extend(outputs[part.call][part.sample])
        else:
            break
    return known

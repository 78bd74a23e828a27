"""ramet itself, for `ramet bench cpu`: the Python interface as anybody would use it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeAlias

import torch

from ramet.api.cpu_result import Result, check_lengths
from ramet.api.cpu_sizes import calls_after
from ramet.api.workloads import BEAM, Call, Part, Samples, Workload, resolve, tokens_of
from ramet.engine.beam_params import BeamSearchParams
from ramet.engine.branch import Branch
from ramet.engine.llm import LLM
from ramet.engine.sampling_params import SamplingParams

Path: TypeAlias = tuple[Part, ...]  # of a node, from the root


class Ramet:
    def __init__(self, llm: LLM | None = None) -> None:
        self.llm = LLM("smollm2", num_blocks=1024) if llm is None else llm
        self._first: float | None = None
        self._generated_before = 0
        self.llm.on_step(self._note_first)

    def _note_first(self) -> None:
        if self._first is None and self.llm.engine.num_generated_tokens > self._generated_before:
            self._first = time.perf_counter()

    def run(self, workload: Workload) -> Result:
        computed = self.llm.engine.num_computed_tokens
        self._generated_before = self.llm.engine.num_generated_tokens
        self._first = None
        outputs: dict[int, Samples] = {}
        nodes: dict[Path, Branch] = {}
        start = time.perf_counter()
        for index, calls in enumerate(workload.rounds):
            if calls[0].mode == BEAM:
                self._beams(calls, outputs)
            elif nodes or calls_after(workload, index):
                self._grow(calls, outputs, nodes)
            else:
                self._generate(calls, outputs)
        for node in nodes.values():
            node.prune()
        wall = time.perf_counter() - start
        check_lengths(workload, outputs)
        num_output = workload.totals().output_tokens
        fed = sum(call.n * (call.max_tokens - 1) for call in workload)
        return Result(
            wall,
            num_output,
            None if self._first is None else self._first - start,
            self.llm.engine.num_computed_tokens - computed - fed,
        )

    def _generate(self, calls: Sequence[Call], outputs: dict[int, Samples]) -> None:
        """Prompts that nothing goes on from."""
        prompts = [resolve(call, outputs).prompt for call in calls]
        for call, output in zip(calls, self.llm.generate(prompts, _params(calls)), strict=True):
            outputs[call.uid] = [choice.token_ids for choice in output.choices]

    def _grow(self, calls: Sequence[Call], outputs: dict[int, Samples], nodes: dict[Path, Branch]) -> None:
        """Fork the nodes that the prompts go on from, append what is new, and expand all in one batch."""
        leaves = [self._leaf(call.prompt, outputs, nodes) for call in calls]
        for call, children in zip(calls, self.llm.expand(leaves, params=_params(calls)), strict=True):
            outputs[call.uid] = [child.output.token_ids for child in children if child.output is not None]
            nodes.update({(*call.prompt, call.draw(i)): child for i, child in enumerate(children)})

    def _leaf(self, path: Path, outputs: dict[int, Samples], nodes: dict[Path, Branch]) -> Branch:
        """A branch of its own at the end of `path`, below the deepest node on it."""
        if path[:1] not in nodes:
            nodes[path[:1]] = self.llm.branch(tokens_of(path[:1], outputs))
        depth = max(depth for depth in range(1, len(path) + 1) if path[:depth] in nodes)
        (leaf,) = nodes[path[:depth]].fork()
        leaf.extend(tokens_of(path[depth:], outputs))
        return leaf

    def _beams(self, calls: Sequence[Call], outputs: dict[int, Samples]) -> None:
        """A round of beam searches of one width and length."""
        params = BeamSearchParams(
            num_beams=calls[0].n, max_tokens=calls[0].max_tokens, length_penalty=0.0, ignore_eos=True
        )
        prompts = [resolve(call, outputs).prompt for call in calls]
        for call, output in zip(calls, self.llm.generate(prompts, params), strict=True):
            outputs[call.uid] = [choice.token_ids for choice in output.choices]


def _params(calls: Sequence[Call]) -> list[SamplingParams]:
    return [
        SamplingParams(n=c.n, max_tokens=c.max_tokens, temperature=1.0, seed=c.uid, ignore_eos=True)
        for c in calls
    ]


def stream_seconds(num_bytes: int) -> float:
    """How long it takes to read so many bytes once: the floor of a step that uses every weight."""
    data = torch.ones(num_bytes // 4)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start)
    return min(times)

"""ramet itself, for `ramet bench cpu`: the Python interface as anybody would use it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeAlias

import torch

from ramet.api.cpu_result import Result, check_lengths
from ramet.api.cpu_sizes import calls_after
from ramet.api.workloads import BEAM, Call, Part, Samples, Workload, resolve, tokens_of
from ramet.engine.branch import Branch
from ramet.engine.llm import LLM
from ramet.engine.sampler import TokenLogprob
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
                for call in calls:
                    outputs[call.uid] = self._beams(resolve(call, outputs).prompt, call)
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

    def _beams(self, prompt: list[int], call: Call) -> Samples:
        """Beam search out of forks: each step keeps the likeliest `n` of all continuations."""
        root = self.llm.branch(prompt)
        beams: list[tuple[Branch, float]] = [(root, 0.0)]
        for _ in range(call.max_tokens):
            branches = [branch for branch, _ in beams]
            self.llm.step(branches, temperature=0.0, logprobs=call.n, ignore_eos=True)
            found = [
                (score + top.logprob, branch, top.token_id) for branch, score in beams for top in _top(branch)
            ]
            best = sorted(found, key=lambda one: -one[0])[: call.n]
            kept = [(_with_last(branch, token_id), score) for score, branch, token_id in best]
            for branch in branches:
                branch.prune() if not branch.children else branch.release()
            beams = kept
        samples = [branch.token_ids[len(prompt) :] for branch, _ in beams]
        root.prune()
        return samples


def _params(calls: Sequence[Call]) -> list[SamplingParams]:
    return [
        SamplingParams(n=c.n, max_tokens=c.max_tokens, temperature=1.0, seed=c.uid, ignore_eos=True)
        for c in calls
    ]


def _top(branch: Branch) -> list[TokenLogprob]:
    assert branch.output is not None and branch.output.logprobs is not None, "just generated"
    return branch.output.logprobs[-1]


def _with_last(branch: Branch, token_id: int) -> Branch:
    """A fork of the branch with another last token."""
    fork = branch.fork(at=len(branch) - 1)[0]
    fork.extend([token_id])
    return fork


def stream_seconds(num_bytes: int) -> float:
    """How long it takes to read so many bytes once: the floor of a step that uses every weight."""
    data = torch.ones(num_bytes // 4)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start)
    return min(times)

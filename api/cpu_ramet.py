"""ramet itself, for `ramet bench cpu`: the Python interface as anybody would use it."""

from __future__ import annotations

import time

import torch

from ramet.api.cpu_result import Result, check_lengths
from ramet.api.workloads import BEAM, Call, Samples, Workload, resolve
from ramet.engine.branch import Branch
from ramet.engine.llm import LLM
from ramet.engine.sampler import TokenLogprob
from ramet.engine.sampling_params import SamplingParams


class Ramet:
    def __init__(self, dtype: str = "auto") -> None:
        self.llm = LLM("smollm2", dtype=dtype, num_blocks=1024)
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
        start = time.perf_counter()
        for calls in workload.rounds:
            self._round(list(calls), outputs)
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

    def _round(self, calls: list[Call], outputs: dict[int, Samples]) -> None:
        requests = [resolve(call, outputs) for call in calls]
        if calls[0].mode == BEAM:
            for request in requests:
                outputs[request.call.uid] = self._beams(request.prompt, request.call)
            return
        params = [
            SamplingParams(n=c.n, max_tokens=c.max_tokens, temperature=1.0, seed=c.uid, ignore_eos=True)
            for c in calls
        ]
        found = self.llm.generate([request.prompt for request in requests], params)
        for call, output in zip(calls, found, strict=True):
            outputs[call.uid] = [choice.token_ids for choice in output.choices]

    def _beams(self, prompt: list[int], call: Call) -> Samples:
        """Beam search out of forks: each step keeps the likeliest `n` of all continuations."""
        root = self.llm.branch(prompt)
        beams: list[tuple[Branch, float]] = [(root.fork()[0], 0.0)]
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

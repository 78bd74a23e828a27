"""`ramet bench search`: what searches compute over branches, beside the same work as flat requests.

Every workload runs three times from an empty cache: over branches; as requests that each send the whole of
their prompt, with prefix caching; and without it. Choices are drawn from the seed and lengths are fixed, so
that the least that could be computed is known beforehand (workloads.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from torch import Tensor

from ramet.api.bench import Report
from ramet.api.cpu_ramet import Ramet
from ramet.api.cpu_sizes import SIZES, VOCAB_SIZE
from ramet.api.workloads import BEAM, Call, Draw, Request, Samples, Workload, build, resolve
from ramet.engine.llm import LLM
from ramet.engine.model_runner import Runner
from ramet.engine.sampling_params import SamplingParams
from ramet.engine.step import Step
from ramet.radix.prefix_cache import PrefixCache

WORKLOADS = ("W2", "W3", "W4", "W5", "W8", "W9")
BEAMS = "W5"  # the workload whose peak is held against a bound
WAYS = ("branches", "cached", "uncached")
_NUM_BLOCKS = 1024
_CUTS = {"W5": {"output_length": 12}, "W9": {"output_length": 12}}  # without a cache beams take their square


@dataclass(frozen=True)
class Cost:
    """What one run of one workload took."""

    prompt_tokens: int  # given by the client and computed, recomputed ones included
    computed_tokens: int  # that went through the model in all
    copies: int  # of blocks
    peak_blocks: int  # in use in any step; what is cached and could be evicted is not
    wall_s: float


def run(module: Any = None, tokenizer: Any = None, *, tiny: bool = False) -> Report:
    """Measure with the embedded model, or one that is given; `tiny` is for tests."""
    if module is None:
        runner: Any = LLM("smollm2", num_blocks=1).engine.runner
        module, tokenizer = runner.model.module, runner.model.tokenizer
    workloads = {name: _workload(name, tiny) for name in WORKLOADS}
    costs: dict[tuple[str, str], Cost] = {}
    for name in WORKLOADS:
        workload = workloads[name]
        for way in WAYS:
            llm = LLM(module, tokenizer, num_blocks=_NUM_BLOCKS)
            costs[name, way] = cost = measure(llm, workload, way)
            print(f"bench search: {name} {way}: {cost.wall_s:.2f} s", file=sys.stderr, flush=True)
    return report_of(costs, workloads)


def _workload(name: str, tiny: bool) -> Workload:
    sizes = {} if tiny else {**SIZES[name], **_CUTS.get(name, {})}
    return build(name, seed=1, vocab_size=VOCAB_SIZE, tiny=tiny, **sizes)


def measure(llm: LLM, workload: Workload, way: str) -> Cost:
    """Run a workload one way, on an engine that has nothing cached."""
    run_it: dict[str, Callable[[], object]] = {
        "branches": lambda: Ramet(llm).run(workload),
        "cached": lambda: run_flat(llm, workload, cache=True),
        "uncached": lambda: run_flat(llm, workload, cache=False),
    }
    watch = llm.engine.runner = _Watch(llm.engine.runner, llm.engine.cache)
    before = llm.stats()
    start = time.perf_counter()
    run_it[way]()
    wall = time.perf_counter() - start
    after = llm.stats()
    computed = after.num_computed_tokens - before.num_computed_tokens
    queries = after.num_query_tokens - before.num_query_tokens
    return Cost(
        prompt_tokens=computed - queries - num_fed(workload),
        computed_tokens=computed,
        copies=llm.engine.cache.num_copies,
        peak_blocks=watch.peak_blocks,
        wall_s=wall,
    )


class _Watch:
    """A runner that looks at the blocks in use when a step has all that it needs."""

    def __init__(self, inner: Runner, pages: PrefixCache) -> None:
        self._inner = inner
        self._pages = pages
        self.copy_blocks = inner.copy_blocks
        self.peak_blocks = 0

    def forward(self, step: Step) -> Tensor:
        pages = self._pages
        in_use = pages.pool.num_blocks - pages.pool.num_free - pages.num_evictable
        self.peak_blocks = max(self.peak_blocks, in_use)
        return self._inner.forward(step)


def num_fed(workload: Workload) -> int:
    """Sampled tokens that had to be computed: all but each sample's last one, and that where others go on."""
    gone_on_from = {part for call in workload for part in call.prompt if isinstance(part, Draw)}
    return sum(call.n * (call.max_tokens - 1) for call in workload) + len(gone_on_from)


def run_flat(llm: LLM, workload: Workload, *, cache: bool) -> None:
    """Each call as a request of its whole prompt, the calls of a round at once."""
    outputs: dict[int, Samples] = {}
    for calls in workload.rounds:
        requests = [resolve(call, outputs) for call in calls]
        if calls[0].mode == BEAM:
            outputs.update({one.call.uid: flat_beams(llm, one, cache) for one in requests})
            continue
        params = [
            SamplingParams(n=c.n, max_tokens=c.max_tokens, temperature=1.0, seed=c.uid, ignore_eos=True)
            for c in calls
        ]
        for call, output in zip(
            calls, llm.generate([one.prompt for one in requests], params, cache=cache), strict=True
        ):
            outputs[call.uid] = [choice.token_ids for choice in output.choices]


def flat_beams(llm: LLM, request: Request, cache: bool) -> Samples:
    """Beam search by a client that has requests only: each beam sends all of its tokens for one more."""
    width = request.call.n
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(request.call.max_tokens):
        outputs = llm.generate(
            [request.prompt + new for _, new in beams],
            max_tokens=1,
            temperature=0.0,
            logprobs=width,
            ignore_eos=True,
            cache=cache,
        )
        found = []
        for (score, new), output in zip(beams, outputs, strict=True):
            (tops,) = output.choices[0].logprobs or [[]]
            found += [(score + top.logprob, [*new, top.token_id]) for top in tops]
        beams = sorted(found, key=lambda one: -one[0])[:width]
    return [new for _, new in beams]


def beam_bound(call: Call, block_size: int) -> int:
    """Blocks of a beam search that shares all it can: the prompt's full ones, and each beam's own."""
    shared = call.prompt_length // block_size
    return shared + call.n * (-(-(call.prompt_length + call.max_tokens) // block_size) - shared)


def report_of(costs: dict[tuple[str, str], Cost], workloads: dict[str, Workload]) -> Report:
    report = Report("search")
    metrics = report.metrics
    for (name, way), cost in costs.items():
        for what, value in vars(cost).items():
            metrics[f"{name}_{way}_{what}"] = value
    ideals = {name: workload.totals().new_prompt_tokens for name, workload in workloads.items()}
    for name, ideal in ideals.items():
        metrics[f"{name}_ideal_prompt_tokens"] = ideal
    over = {name: costs[name, "branches"].prompt_tokens / ideal for name, ideal in ideals.items()}
    metrics["prompt_tokens_computed_over_ideal"] = max(over.values())
    metrics["prompt_tokens_computed_under_ideal"] = min(over.values())  # less would be a token left out
    bound = max(sum(beam_bound(call, 16) for call in calls) for calls in workloads[BEAMS].rounds)
    metrics["beam_peak_over_bound"] = costs[BEAMS, "branches"].peak_blocks / bound
    report.target("prompt_tokens_computed_over_ideal", "<=", 1.0)
    report.target("prompt_tokens_computed_under_ideal", ">=", 1.0)
    report.target("beam_peak_over_bound", "<=", 1.0)
    report.tables = [_table(costs, ideals)]
    return report


def _table(costs: dict[tuple[str, str], Cost], ideals: dict[str, int]) -> Table:
    table = Table(title="Searches over branches, and as flat requests", title_justify="left")
    for column in ("", "prompt tokens", "ideal", "computed in all", "copies", "peak blocks", "time, s"):
        table.add_column(column, justify="right" if column else "left")
    for (name, way), cost in costs.items():
        table.add_row(
            f"{name} {way}",
            str(cost.prompt_tokens),
            str(ideals[name]) if way == WAYS[0] else "",
            str(cost.computed_tokens),
            str(cost.copies),
            str(cost.peak_blocks),
            f"{cost.wall_s:.2f}",
            end_section=way == WAYS[-1],
        )
    return table

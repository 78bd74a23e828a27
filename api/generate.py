"""`ramet generate`: choices from one prompt, printed when they are done or as they grow."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from ramet.engine.llm import LLM
from ramet.engine.outputs import Choice, Delta
from ramet.engine.sampler import TokenLogprob
from ramet.engine.sampling_params import SamplingParams
from ramet.engine.step import Step
from ramet.radix.accounting import PageStats

_FRAME_S = 0.05
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


class Best(NamedTuple):
    """The fullest moment of a request."""

    sharing: float
    num_blocks: int


def run(llm: LLM, prompt: str, params: SamplingParams, *, stream: bool, out: Console, err: Console) -> None:
    """Generate and print to `out`; one line of numbers goes to `err`."""
    best = Best(1.0, 0)

    def look() -> None:
        nonlocal best
        best = _better(best, llm.stats().pages)

    before, start = llm.stats(), time.perf_counter()
    llm.on_step(look)
    try:
        if stream:
            _stream(llm, prompt, params, out)
        else:
            _print_choices(llm, prompt, params, out)
    finally:
        llm.engine.listeners.remove(look)
    seconds, after = time.perf_counter() - start, llm.stats()
    num_generated = after.num_generated_tokens - before.num_generated_tokens
    num_cached = after.num_cached_tokens - before.num_cached_tokens
    num_prompt = len(llm.encode(prompt))
    err.print(
        f"{num_prompt} prompt tokens ({num_cached} cached), {num_generated} generated in {seconds:.1f} s "
        f"({num_generated / seconds:.1f}/s); at most {best.num_blocks} blocks, shared {best.sharing:.1f} times",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )

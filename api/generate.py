"""`ramet generate`: choices from one prompt, printed when they are done or as they grow."""

from __future__ import annotations

import time

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from ramet.engine.engine import Stats
from ramet.engine.llm import LLM
from ramet.engine.outputs import Choice
from ramet.engine.sampling_params import SamplingParams

_FRAME_S = 0.05
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def run(llm: LLM, prompt: str, params: SamplingParams, *, stream: bool, out: Console, err: Console) -> None:
    """Generate and print to `out`; one line of numbers goes to `err`."""
    looks: list[Stats] = []

    def look() -> None:
        looks.append(llm.stats())

    before, start = llm.stats(), time.perf_counter()
    stop_looking = llm.on_step(look)
    try:
        if not stream:
            _print_done(llm, prompt, params, out)
        elif out.is_terminal:
            _show_live(llm, prompt, params, out)
        else:
            _print_deltas(llm, prompt, params, out)
    finally:
        stop_looking()
    seconds = time.perf_counter() - start
    line = _numbers(len(llm.encode(prompt)), before, looks, seconds)
    err.print(line, style="dim", highlight=False, soft_wrap=True)


def _print_done(llm: LLM, prompt: str, params: SamplingParams, out: Console) -> None:
    choices = llm.generate(prompt, params)[0].choices
    for choice in choices:
        if len(choices) > 1:
            _print(out, f"{_head(choice)}\n", style=_colour(choice.index))
        _print(out, choice.text + "\n")


def _print_deltas(llm: LLM, prompt: str, params: SamplingParams, out: Console) -> None:
    """For a pipe: one choice as it comes; of several, a line a piece, with line breaks escaped."""
    for delta in llm.stream(prompt, params):
        if params.n == 1:
            _print(out, delta.text)
        elif delta.text:
            escaped = delta.text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
            _print(out, f"[{delta.index}] {escaped}\n")
        out.file.flush()
    if params.n == 1:
        _print(out, "\n")


def _show_live(llm: LLM, prompt: str, params: SamplingParams, out: Console) -> None:
    """All choices side by side in time, redrawn in place by this thread."""
    choices = [Choice(index) for index in range(params.n)]
    shown_at = 0.0
    with Live(console=out, auto_refresh=False, vertical_overflow="crop") as live:
        for delta in llm.stream(prompt, params):
            choice = choices[delta.index]
            choice.text += delta.text
            choice.token_ids += delta.token_ids
            choice.finish_reason = delta.finish_reason
            now = time.perf_counter()
            if now - shown_at >= _FRAME_S:
                shown_at = now
                live.update(_panels(choices), refresh=True)
        live.update(_panels(choices), refresh=True)


def _panels(choices: list[Choice]) -> Group:
    return Group(
        *(
            Panel(Text(c.text), title=_head(c), title_align="left", border_style=_colour(c.index))
            for c in choices
        )
    )


def _head(choice: Choice) -> str:
    """Not in brackets: rich would read them as a style."""
    end = f", {choice.finish_reason}" if choice.finish_reason else ""
    return f"{choice.index}: {len(choice.token_ids)} tokens{end}"


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _print(out: Console, text: str, style: str | None = None) -> None:
    """Print exactly this: no markup, no wrapping, no line end of its own."""
    out.print(Text(text, style=style or ""), end="", soft_wrap=True)


def _numbers(num_prompt: int, before: Stats, looks: list[Stats], seconds: float) -> str:
    after = looks[-1]
    num_generated = after.num_generated_tokens - before.num_generated_tokens
    num_cached = after.num_cached_tokens - before.num_cached_tokens
    num_blocks = max(look.pages.num_in_use for look in looks)
    sharing = max(look.pages.sharing_ratio for look in looks)
    return (
        f"{num_prompt} prompt tokens ({num_cached} cached), {num_generated} generated in {seconds:.1f} s "
        f"({num_generated / seconds:.1f} a second); at most {num_blocks} blocks, shared {sharing:.1f} times"
    )

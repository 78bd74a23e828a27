"""Reads generations while they grow, for whoever streams them."""

from __future__ import annotations

from collections.abc import Callable

from ramet.engine.outputs import Delta
from ramet.engine.runs import Generation


class StreamReader:
    """Reads several generations while they grow."""

    def __init__(self, generations: list[Generation], close: Callable[[], None]) -> None:
        self.close = close  # release the request, finished or not; idempotent
        self._generations = generations
        self._shown = [(0, 0)] * len(generations)  # characters and tokens of each that were read

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return all(generation.finished for generation in self._generations)

    @property
    def num_unread(self) -> int:
        """Tokens that have come and were not read, of the generation that has most."""
        return max(
            len(generation.choice.token_ids) - num_tokens
            for generation, (_, num_tokens) in zip(self._generations, self._shown, strict=True)
        )

    @property
    def all_read(self) -> bool:
        return self.done and self.num_unread == 0 and not any(g.error for g in self._generations)

    def hold(self, held: bool) -> None:
        """Let the generations rest, or go on."""
        for generation in self._generations:
            generation.held = held

    def read(self) -> list[Delta]:
        """What is new, one Delta a generation. Raises the error of one that failed."""
        deltas: list[Delta] = []
        first = not any(num_tokens for _, num_tokens in self._shown)
        for index, generation in enumerate(self._generations):
            choice, (num_chars, num_tokens) = generation.choice, self._shown[index]
            if generation.error is not None:
                raise generation.error
            if len(choice.token_ids) > num_tokens:
                self._shown[index] = len(choice.text), len(choice.token_ids)
                new = choice.token_ids[num_tokens:]
                scores = generation.prompt_logprobs if first and not deltas else None
                deltas.append(Delta(choice.index, choice.text[num_chars:], new, choice.finish_reason, scores))
        return deltas

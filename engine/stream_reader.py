"""Reads generations while they grow, for whoever streams them."""

from __future__ import annotations

from collections.abc import Iterable

from ramet.engine.outputs import Delta
from ramet.engine.runs import Generation


class _Place:
    """How far one generation was read."""

    def __init__(self, generation: Generation, prompt_index: int) -> None:
        self.generation = generation
        self.prompt_index = prompt_index
        self.num_chars = 0
        self.num_tokens = 0
        self.ended = False  # its end was told

    @property
    def num_unread(self) -> int:
        return len(self.generation.choice.token_ids) - self.num_tokens

    @property
    def has_news(self) -> bool:
        return self.num_unread > 0 or (self.generation.choice.finish_reason is not None and not self.ended)

    def read(self) -> Delta:
        """What is new since the last time."""
        choice, start = self.generation.choice, self.num_tokens
        first_of_prompt = start == 0 and not self.ended and choice.index == 0
        delta = Delta(
            choice.index,
            choice.text[self.num_chars :],
            choice.token_ids[start:],
            choice.finish_reason,
            prompt_logprobs=self.generation.prompt_logprobs if first_of_prompt else None,
            prompt_index=self.prompt_index,
            stop_reason=choice.stop_reason,
            token_logprobs=choice.token_logprobs[start:],
            logprobs=None if choice.logprobs is None else choice.logprobs[start:],
            named_logprobs=None if choice.named_logprobs is None else choice.named_logprobs[start:],
            entropies=None if choice.entropies is None else choice.entropies[start:],
        )
        self.num_chars, self.num_tokens = len(choice.text), len(choice.token_ids)
        self.ended = choice.finish_reason is not None
        return delta


class StreamReader:
    """Reads several generations while they grow; those of one prompt or branch follow each other."""

    def __init__(self, generations: Iterable[Generation]) -> None:
        self._places: list[_Place] = []
        prompt_index = -1
        for generation in generations:
            prompt_index += generation.choice.index == 0
            self._places.append(_Place(generation, prompt_index))

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return all(place.generation.finished for place in self._places)

    @property
    def num_unread(self) -> int:
        """Tokens that have come and were not read, of the generation that has most."""
        return max((place.num_unread for place in self._places), default=0)

    @property
    def has_news(self) -> bool:
        return any(place.has_news for place in self._places)

    @property
    def error(self) -> BaseException | None:
        """That of the first generation that failed."""
        return next((p.generation.error for p in self._places if p.generation.error is not None), None)

    def hold(self, held: bool) -> None:
        """Let the generations rest, or go on."""
        for place in self._places:
            place.generation.held = held

    def read(self) -> list[Delta]:
        """What is new, one Delta a generation."""
        return [place.read() for place in self._places if place.has_news]

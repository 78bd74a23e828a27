"""The text of a generation while its tokens come, and the stop string that may end it."""

from __future__ import annotations

from collections.abc import Sequence

from ramet.engine.tokenizer import IncrementalDetokenizer, StopChecker, Tokenizer


class GrowingText:
    """What the tokens so far show, less what may still turn out to be the start of a stop string."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.text = ""
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stops = StopChecker(stops)

    def add(self, token_id: int, *, search: bool = True) -> str | None:
        """Add a token; returns the stop string that it completes, which is looked for if `search`."""
        delta = self._detokenizer.add(token_id)
        if not search:
            self.text += delta
            return None
        return self._show(delta)

    def finish(self) -> str | None:
        """Add what was held back; returns the stop string that is complete now."""
        stop = self._show(self._detokenizer.flush())
        if stop is None:
            self.text += self._stops.finish()
        return stop

    def fork(self) -> GrowingText:
        """A copy that goes on by itself."""
        other = object.__new__(GrowingText)
        other.text = self.text
        other._detokenizer, other._stops = self._detokenizer.fork(), self._stops.fork()
        return other

    def _show(self, delta: str) -> str | None:
        shown = self._stops.add(delta)
        self.text += shown.text
        return shown.stop

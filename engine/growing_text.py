"""The text of a generation while its tokens come, and the stop string that may end it."""

from __future__ import annotations

import copy

from ramet.engine.sampling_params import SamplingParams
from ramet.engine.tokenizer import IncrementalDetokenizer, StopChecker, Tokenizer


class GrowingText:
    """What the tokens so far show, less what may still turn out to be the start of a stop string."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, text: str = "") -> None:
        """`text` is what it begins with; it is searched for no stop string."""
        self.text = text
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopChecker(params.stops)
        self._shows_stop = params.include_stop_str_in_output
        self._ended = False

    def add(self, token_id: int, *, search: bool = True) -> str | None:
        """Add a token; returns the stop string that it completes, which is looked for if `search`."""
        return self._show(self._detokenizer.add(token_id), search=search)

    def finish(self) -> str | None:
        """Add what was held back; returns the stop string that this completes. Idempotent."""
        if self._ended:
            return None
        stop = self._show(self._detokenizer.flush())
        if stop is None:
            self.text += self._stops.finish()
        self._ended = True
        return stop

    def fork(self) -> GrowingText:
        """A copy that goes on by itself."""
        other = copy.copy(self)
        other._detokenizer, other._stops = self._detokenizer.fork(), self._stops.fork()
        return other

    def _show(self, delta: str, *, search: bool = True) -> str | None:
        """Add what no stop string takes away; returns the one that is complete, which ends the text."""
        shown = self._stops.add(delta, search=search)
        self.text += shown.text
        if shown.stop is not None:
            self._ended = True
            if self._shows_stop:
                self.text += shown.stop
        return shown.stop

"""/v1/completions: text after a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ramet.api.server.answers import Answer, finish_reason, finite
from ramet.api.server.errors import invalid, unsupported
from ramet.api.server.sampling import beam_params, refuse_unsupported, sampling_params
from ramet.api.server.schemas import CompletionRequest
from ramet.api.server.state import State
from ramet.engine.beam_params import MAX_BEAMS, BeamSearchParams
from ramet.engine.checks import check_int
from ramet.engine.outputs import Delta
from ramet.engine.sampler import TokenLogprob
from ramet.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from ramet.engine.tokenizer import IncrementalDetokenizer

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_CHOICES = 4096  # of all prompts together


def completion_params(body: CompletionRequest, num_prompts: int) -> SamplingParams | BeamSearchParams:
    """What a completion asks for. Raises ApiError or InvalidInput."""
    refuse_unsupported(body)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    for field in ("logprobs", "prompt_logprobs"):
        value = getattr(body, field)
        if value is not None and not 0 <= value <= MAX_LOGPROBS:
            raise invalid(field, f"must be between 0 and {MAX_LOGPROBS}")
    of_prompt = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        of_prompt = max(body.logprobs, of_prompt or 0)
    # A prompt alone still needs a run to its end: one token is made and not shown.
    max_tokens = 1 if max_tokens == 0 else max_tokens
    made = body.best_of or body.n or 1
    if made * num_prompts > MAX_CHOICES:
        field = "n" if body.best_of is None else "best_of"
        raise invalid(field, f"times the number of prompts must be at most {MAX_CHOICES}")
    if body.use_beam_search:
        if body.echo and body.logprobs is not None:
            raise unsupported("echo", "with logprobs says nothing of beams")
        n = 1 if body.n is None else body.n
        if body.best_of is None:
            return beam_params(body, max_tokens=max_tokens, logprobs=body.logprobs)
        check_int("best_of", body.best_of, n, MAX_BEAMS)
        return beam_params(
            body,
            max_tokens=max_tokens,
            logprobs=body.logprobs,
            num_beams=body.best_of,
            num_return_sequences=n,
        )
    return sampling_params(
        body, max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=of_prompt, best_of=body.best_of
    )


class CompletionAnswer(Answer):
    """Choices in the order of the prompts, `n` for each."""

    body: CompletionRequest
    endpoint = "/v1/completions"
    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def __init__(
        self, state: State, body: CompletionRequest, model: str, prompts: Sequence[list[int]], n: int
    ) -> None:
        super().__init__(state, body, model, prompts, n)
        self._choices = [_Choice(self, index) for index in range(n * len(prompts))]
        self.scores: dict[int, list[list[TokenLogprob] | None] | None] = {}  # by prompt

    def part(self, delta: Delta) -> dict[str, Any] | None:
        if delta.index == 0 and delta.prompt_index not in self.scores:
            self.scores[delta.prompt_index] = delta.prompt_logprobs
        return self._choices[delta.prompt_index * self.n + delta.index].part(delta)


class _Choice:
    """One choice while it grows: how long its text is, and its tokens' places in it."""

    def __init__(self, answer: CompletionAnswer, index: int) -> None:
        self._answer = answer
        self._body = answer.body
        self._index = index
        self._prompt = answer.prompts[index // answer.n]
        self._begun = False
        self._offset = 0
        self._sum = 0.0
        skip = self._body.skip_special_tokens is not False
        self._pieces = answer.state.text.pieces(skip_special_tokens=skip)

    def part(self, delta: Delta) -> dict[str, Any] | None:
        body, answer = self._body, self._answer
        begins, self._begun = not self._begun, True
        text, token_ids, reason = delta.text, delta.token_ids, finish_reason(delta)
        if body.max_tokens == 0:
            if not begins:
                return None
            text, token_ids, reason = "", [], "length"
            delta = Delta(delta.index, text, token_ids, "length", prompt_index=delta.prompt_index)
        answer.num_generated += len(token_ids)
        self._sum += sum(delta.token_logprobs)
        logprobs = _Logprobs(answer, self._offset) if body.logprobs is not None else None
        if begins and body.echo:
            text = self._echo(logprobs) + text
        if logprobs is not None:
            for row, token_id in enumerate(token_ids):
                top = delta.logprobs[row] if delta.logprobs is not None else []
                piece = self._pieces.add(token_id) if self._pieces is not None else ""
                logprobs.add(token_id, top, piece)
            self._offset = logprobs.offset
        if not (text or reason or (token_ids and answer.tells_tokens)):
            return None
        choice: dict[str, Any] = {
            "index": self._index,
            "text": text,
            "logprobs": None if logprobs is None else logprobs.columns,
            "finish_reason": reason,
            **answer.extras(delta, reason is not None),
        }
        if begins:
            if body.return_token_ids:
                choice["prompt_token_ids"] = self._prompt
            entries = answer.scores.get(delta.prompt_index)
            if body.prompt_logprobs is not None and entries is not None:
                choice["prompt_logprobs"] = answer.prompt_logprobs(entries, self._prompt)
        if reason is not None:
            choice["cumulative_logprob"] = finite(self._sum)
        return choice

    def _echo(self, logprobs: _Logprobs | None) -> str:
        """The prompt's text, with the log-probabilities of its tokens."""
        pieces = self._answer.state.text.pieces(skip_special_tokens=False)
        texts = _pieces_of(self._prompt, pieces)
        if logprobs is not None:
            entries = self._answer.scores.get(self._index // self._answer.n) or [None] * len(self._prompt)
            for token_id, entry, piece in zip(self._prompt, entries, texts, strict=True):
                logprobs.add(token_id, entry, piece)
            self._offset = logprobs.offset
        return "".join(texts)


def _pieces_of(token_ids: Sequence[int], pieces: IncrementalDetokenizer | None) -> list[str]:
    """What each token adds to the text; the last one also what is still held back."""
    if pieces is None:
        return [""] * len(token_ids)
    texts = [pieces.add(token_id) for token_id in token_ids]
    texts[-1] += pieces.flush()
    return texts


class _Logprobs:
    """OpenAI's older form of log-probabilities: one column for each kind of number."""

    def __init__(self, answer: CompletionAnswer, offset: int) -> None:
        self.offset = offset  # of the next token in the choice's text
        self._text = answer.state.text
        self._as_id = bool(answer.body.return_tokens_as_token_ids)
        self._count = answer.body.logprobs or 0
        self.columns: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }

    def add(self, token_id: int, entry: list[TokenLogprob] | None, piece: str) -> None:
        """A token, what is known of its place (nothing for a prompt's first), and the text it adds."""
        own = next((token for token in entry or () if token.token_id == token_id), None)
        shown = list(entry or ())[: self._count]
        if own is not None and own not in shown:
            shown.append(own)
        columns = self.columns
        columns["tokens"].append(self._text.token_text(token_id, as_id=self._as_id))
        columns["token_logprobs"].append(None if own is None else finite(own.logprob))
        columns["top_logprobs"].append(None if entry is None else self._named(shown))
        columns["text_offset"].append(self.offset)
        self.offset += len(piece)

    def _named(self, tokens: list[TokenLogprob]) -> dict[str, float]:
        named: dict[str, float] = {}
        for token in tokens:
            name = self._text.token_text(token.token_id, as_id=self._as_id)
            if name in named:  # a control token and a text that is spelled like it
                name = self._text.token_text(token.token_id, as_id=True)
            named[name] = finite(token.logprob)
        return named

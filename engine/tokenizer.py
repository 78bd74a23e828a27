"""Text to tokens and back: the tokenizer, text that grows token by token, and stop strings.

It never ends a sequence; it says that a stop string is complete, and where the text has to be cut.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from ramet.engine.checks import checked_list, plain
from ramet.engine.errors import InvalidInput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"  # What decoders write for bytes that are no character, or not one yet.
_PRIVATE_USE = range(0xE000, 0xF900)
# A character is at most 4 bytes and a token at least one, so 4 tokens hold every character that may still
# grow.
_MAX_OPEN_TOKENS = 4
_MAX_HELD_TOKENS = 16


def validate_token_ids(token_ids: object, vocab_size: int, field: str) -> list[int]:
    """The ids as plain ints; raises InvalidInput, naming ``field``, for one outside of the vocabulary."""
    limit = f"must hold token ids between 0 and {vocab_size - 1}"
    checked: list[int] = []
    for token_id in map(plain, checked_list(field, token_ids, "token ids")):
        # A bool is an int to Python.
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise InvalidInput(field, limit, token_id)
        checked.append(token_id)
    return checked


class Tokenizer:
    """A fast transformers tokenizer behind the few verbs that the engine needs."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises InvalidInput for a tokenizer that has no `tokenizers` backend."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise InvalidInput("tokenizer", "must be a fast one of transformers", type(tokenizer).__name__)
        self.hf: Any = tokenizer
        self._backend: Any = backend
        self.vocab_size: int = len(self.hf)
        added = self.hf.added_tokens_decoder
        self.added_ids = frozenset(added)
        self._control_ids = {str(token): token_id for token_id, token in added.items() if token.special}
        self.special_ids = frozenset(self._control_ids.values())
        eos = self.hf.eos_token_id
        self.eos_token_ids: frozenset[int] = frozenset() if eos is None else frozenset([eos])

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be turned into a prompt."""
        return bool(self.hf.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True, control_tokens: bool = True) -> list[int]:
        """The token ids of a text.

        add_special_tokens: add what the tokenizer puts around a text (a begin token, for some models).
        control_tokens: text such as "<|im_end|>" becomes the control token, as users of raw prompts expect;
            False reads it as plain text, which is right for text from outside such as the result of a tool.
        Raises InvalidInput for a text that is not valid Unicode.
        """
        _check_unicode(text, "text")
        if control_tokens:
            ids: list[int] = self.hf.encode(text, add_special_tokens=add_special_tokens, verbose=False)
            return ids
        return list(self._literal_backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the ids, U+FFFD for bytes that are no character; InvalidInput for unknown ids."""
        checked = validate_token_ids(token_ids, self.vocab_size, "token_ids")
        return self.decode_unchecked(checked, skip_special_tokens)

    def decode_unchecked(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """``decode`` for ids that come from the engine itself; ids that have no text give none."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def has_text(self, token_id: int) -> bool:
        """Whether the id stands for anything: a model's vocabulary may be padded beyond its tokenizer's."""
        return self._backend.id_to_token(token_id) is not None

    def piece(self, token_id: int) -> str | None:
        """How the vocabulary spells the token, which is not its text; None if it is not in there."""
        piece: str | None = self._backend.id_to_token(token_id)
        return piece

    @property
    def is_byte_level(self) -> bool:
        """Whether the vocabulary spells bytes, as GPT-2's does."""
        return "ByteLevel" in repr(self._backend.decoder)

    def copy(self) -> Tokenizer:
        """One of its own for another thread: a few calls change settings while they run."""
        return Tokenizer(copy.deepcopy(self.hf))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_options: Any,
    ) -> list[int]:
        """The token ids of a conversation.

        Control tokens appear only where the template puts them: the same text inside a message stays text.
        Raises InvalidInput when the tokenizer has no template or the template refuses the messages.
        """
        if not self.has_chat_template:
            raise InvalidInput("messages", "cannot be used: this tokenizer has no chat template")
        if not messages:
            raise InvalidInput("messages", "must hold at least one message")
        content = [list(messages), list(tools or ())]
        for text in _strings(content):
            _check_unicode(text, "messages")
        pattern = self._control_pattern
        if pattern is None or not any(map(pattern.search, _strings(content))):
            rendered = self._render(content, add_generation_prompt, template_options)
            return self.encode(rendered, add_special_tokens=False)
        # A character that occurs nowhere breaks the forged tokens while the template runs; then it is taken
        # out again.
        used = set(chain.from_iterable(_strings(content)))
        mark = next(chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        rendered = self._render(_marked(content, pattern, mark), add_generation_prompt, template_options)
        return self._encode_marked(rendered, pattern, mark)

    def _encode_marked(self, rendered: str, pattern: re.Pattern[str], mark: str) -> list[int]:
        """Encode a text whose unmarked control tokens are real, and whose marked ones are plain text."""
        ids: list[int] = []
        end = 0
        for match in pattern.finditer(rendered):
            ids += self._encode_literally(rendered[end : match.start()].replace(mark, ""))
            ids.append(self._control_ids[match.group()])
            end = match.end()
        return ids + self._encode_literally(rendered[end:].replace(mark, ""))

    def _encode_literally(self, text: str) -> list[int]:
        return self.encode(text, add_special_tokens=False, control_tokens=False) if text else []

    def _render(self, content: Any, add_generation_prompt: bool, options: dict[str, Any]) -> str:
        messages, tools = content
        options = {"tools": tools or None, "add_generation_prompt": add_generation_prompt, **options}
        try:
            rendered: str = self.hf.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:
            # Templates are programs: a message of the wrong form fails in any way that a program can.
            raise InvalidInput("messages", f"are refused by the chat template ({error})") from error
        return rendered

    @cached_property
    def _control_pattern(self) -> re.Pattern[str] | None:
        longest_first = sorted(self._control_ids, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    @cached_property
    def _literal_backend(self) -> Any:
        """A copy that reads control tokens as text: the switch is a state, and threads share the other."""
        literal = copy.deepcopy(self._backend)
        literal.encode_special_tokens = True
        literal.no_truncation()
        literal.no_padding()
        return literal


class IncrementalDetokenizer:
    """The text of a growing list of ids: the pieces it returns, joined, are the decoded whole.

    It keeps a window of the last ids: some that are already text, as context for the decoder, then some whose
    text may still change. A token costs two decodes of a window of at most a few ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._num_context = 0  # window[:num_context] has been returned; window[num_context:] is held
        self._context_text = ""  # the text of window[:num_context]

    def add(self, token_id: int) -> str:
        """The text that this token completes, which may be empty. O(1) amortised."""
        skipped = self._skip_special_tokens and token_id in self._tokenizer.special_ids
        if skipped or not self._tokenizer.has_text(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            return self._release(text, len(self._window))
        if len(self._window) - self._num_context > _MAX_HELD_TOKENS:
            return self._release_settled(text)
        return ""

    def flush(self) -> str:
        """The text still held, with U+FFFD for a character that will not be completed now."""
        return self._release(self._decode(self._window), len(self._window))

    def fork(self) -> IncrementalDetokenizer:
        """A copy that goes on by itself."""
        other = copy.copy(self)
        other._window = list(self._window)
        return other

    def _release_settled(self, text: str) -> str:
        """Return what can no longer change of a long run of stray bytes, so that the window stays short."""
        split = len(self._window) - _MAX_OPEN_TOKENS
        settled, open_text = self._decode(self._window[:split]), self._decode(self._window[split:])
        # The decoder may treat the start of a text differently, or the split may part a character: then wait.
        return self._release(settled, split) if settled + open_text == text else ""

    def _release(self, text: str, num_settled: int) -> str:
        """Hand out ``text``, that of the first ``num_settled`` ids, less the context, and move on."""
        delta = text[len(self._context_text) :]
        self._window = self._window[self._num_context :]
        self._num_context = num_settled - self._num_context
        self._context_text = self._decode(self._window[: self._num_context])
        return delta

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode_unchecked(token_ids, self._skip_special_tokens)


class StopResult(NamedTuple):
    """What may be shown after a piece of text, and the stop string that it completed."""

    text: str
    stop: str | None


class StopChecker:
    """Finds stop strings in a growing text and holds back what may be the start of one.

    The first to be complete wins; of several that end at the same character, the one that starts first.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string is refused by SamplingParams"
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def add(self, delta: str, *, search: bool = True) -> StopResult:
        """Take the next piece. Once ``stop`` is set the text ends before it, and no more is to be added.

        Without ``search`` what is complete with this piece is none; what only begins in it may be one later.
        """
        text, old = self._held + delta, len(self._held)
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop, max(0, old + 1 - len(stop)))) >= 0  # ends in the new piece
        ]
        if found and search:
            _, start, stop = min(found)
            self._held = ""
            return StopResult(text[:start], stop)
        cut = self._first_possible_start(text)
        self._held = text[cut:]
        return StopResult(text[:cut], None)

    def finish(self) -> str:
        """The text held back, for a generation that ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def fork(self) -> StopChecker:
        """A copy that goes on by itself."""
        return copy.copy(self)

    def _first_possible_start(self, text: str) -> int:
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)


def _check_unicode(text: str, field: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidInput(field, "must be valid Unicode, without lone surrogates") from None


def _strings(value: Any) -> Iterable[str]:
    """Every string inside nested lists and dicts, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(_strings(part) for part in chain(value.keys(), value.values()))
    elif isinstance(value, (list, tuple)):
        yield from chain.from_iterable(map(_strings, value))


def _marked(value: Any, pattern: re.Pattern[str], mark: str) -> Any:
    """The same nesting with ``mark`` put behind the first character of each match."""
    if isinstance(value, str):
        return pattern.sub(lambda match: match.group()[0] + mark + match.group()[1:], value)
    if isinstance(value, Mapping):
        return {_marked(key, pattern, mark): _marked(part, pattern, mark) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_marked(part, pattern, mark) for part in value]
    return value

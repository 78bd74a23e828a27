"""New messages on a branch: exactly the tokens that the chat template adds, none of the branch's own touched.

What the model wrote is tokens already. If the template, shown the whole conversation, does not begin with
what the branch holds (it strips old thoughts, say), that is an error: nothing is tokenized again in silence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ramet.api.server.branch_schemas import ExtendRequest
from ramet.api.server.branch_store import Entry, Turn
from ramet.api.server.errors import ApiError, invalid
from ramet.api.server.messages import normalised
from ramet.api.server.text import Text


class Splice(NamedTuple):
    """How a branch comes to hold other messages: tokens of its own that stay, and what comes after them."""

    keep: int
    token_ids: list[int]
    exact: bool  # the template, rendered at once, gives the very same tokens


class Delta(NamedTuple):
    """How a branch comes to hold some messages more."""

    messages: list[dict[str, Any]]  # all that it then holds
    splice: Splice
    how: str


async def delta_of(text: Text, entry: Entry, body: ExtendRequest) -> Delta:
    """The tokens that `body.messages` add. Raises ApiError."""
    assert body.messages is not None, "there are messages"
    if not entry.turns:
        raise invalid("messages", "need a branch that was made of messages, up to where it is now")
    held = entry.branch.token_ids
    turn = entry.turns[-1]
    before = [*turn.messages, *_reply(text, held[turn.end :])]
    messages = [*before, *normalised(body.messages)]
    generates = body.add_generation_prompt is not False
    whole = await text.chat(messages, add_generation_prompt=generates, options=body.chat_template_kwargs)
    splice = _behind(text, held, whole)
    if splice is not None:
        return Delta(messages, splice, "delta")
    if body.on_mismatch == "rerender" and (splice := _common(held, whole)).keep:
        return Delta(messages, splice, "rerender")
    if body.on_mismatch == "append_delta":
        bare = await text.chat(before, add_generation_prompt=False, options=body.chat_template_kwargs)
        added = whole[_num_common(bare, whole) :]
        return Delta(messages, Splice(len(held), added, False), "append_delta")
    raise ApiError(
        400,
        "the chat template does not begin with what the branch holds; see on_mismatch",
        code="template_not_prefix_stable",
        param="messages",
    )


def history_of(
    text: Text, held: list[int], turns: list[Turn], messages: list[dict[str, Any]], whole: list[int]
) -> Splice:
    """How a fork of a branch comes to hold a whole conversation, of which `whole` is the rendering.

    As far as the messages are those that the branch holds, its own tokens stay, whatever the tokenizer would
    have made of the model's replies; from there on it is the rendering.
    """
    ends = [*(turn.start for turn in turns[1:]), len(held)]
    for turn, end in reversed(list(zip(turns, ends, strict=False))):  # a branch may hold no messages
        replied = [*turn.messages, *_reply(text, held[turn.end : end])]
        for known, position in ((replied, end), (turn.messages, turn.end)):
            if messages[: len(known)] == known:
                splice = _behind(text, held[:position], whole)
                if splice is not None:
                    more = _num_common(held[position:], splice.token_ids)
                    return Splice(position + more, splice.token_ids[more:], splice.exact)
    return _common(held, whole)


def _reply(text: Text, token_ids: list[int]) -> list[dict[str, Any]]:
    """What the model wrote after a turn, as the message that clients got."""
    if not token_ids:
        return []
    return [{"role": "assistant", "content": text.decode(token_ids, skip_special_tokens=True)}]


def _behind(text: Text, held: list[int], whole: list[int]) -> Splice | None:
    """Keep all of `held`; None if `whole` does not begin with it, in tokens or in text."""
    if whole[: len(held)] == held:
        return Splice(len(held), whole[len(held) :], True)
    tail = _tail(text, held, whole)
    return None if tail is None else Splice(len(held), tail, False)


def _common(held: list[int], whole: list[int]) -> Splice:
    """Keep what both begin with, in tokens."""
    same = _num_common(held, whole)
    return Splice(same, whole[same:], True)


def _tail(text: Text, held: list[int], whole: list[int]) -> list[int] | None:
    """The end of `whole` that comes after the text of `held`, if its tokens part there.

    The model may have written the same text in other tokens than the tokenizer would.
    """
    start, target = text.decode(held), text.decode(whole)
    if not target.startswith(start):
        return None
    missing = target[len(start) :]
    index = len(whole)
    length = 0
    while index > 0 and length < len(missing.encode()):
        index -= 1
        length += len(text.token_bytes(whole[index]))
    tail = whole[index:]
    return tail if text.decode(tail) == missing else None


def _num_common(left: list[int], right: list[int]) -> int:
    """How many tokens both begin with."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))

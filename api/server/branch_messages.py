"""New messages on a branch: exactly the tokens that the chat template adds, none of the branch's own touched.

What the model wrote is tokens already. If the template, shown the whole conversation, does not begin with
what the branch holds (it strips old thoughts, say), that is an error: nothing is tokenized again in silence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ramet.api.server.branch_schemas import ExtendRequest
from ramet.api.server.branch_store import Entry
from ramet.api.server.errors import ApiError, invalid
from ramet.api.server.messages import normalised
from ramet.api.server.text import Text


class Delta(NamedTuple):
    """How a branch comes to hold some messages more."""

    messages: list[dict[str, Any]]  # all that it then holds
    keep: int  # tokens of the branch that stay
    token_ids: list[int]  # that come after them
    exact: bool  # the template, rendered at once, gives the very same tokens
    how: str


async def delta_of(text: Text, entry: Entry, body: ExtendRequest) -> Delta:
    """The tokens that `body.messages` add. Raises ApiError."""
    assert body.messages is not None, "there are messages"
    if not entry.turns:
        raise invalid("messages", "need a branch that was made of messages, up to where it is now")
    held = entry.branch.token_ids
    turn = entry.turns[-1]
    before = list(turn.messages)
    reply = held[turn.end :]
    if reply:
        before.append({"role": "assistant", "content": text.decode(reply, skip_special_tokens=True)})
    messages = [*before, *normalised(body.messages)]
    generates = body.add_generation_prompt is not False
    whole = await text.chat(messages, add_generation_prompt=generates, options=body.chat_template_kwargs)
    if whole[: len(held)] == held:
        return Delta(messages, len(held), whole[len(held) :], True, "delta")
    tail = _tail(text, held, whole)
    if tail is not None:
        return Delta(messages, len(held), tail, False, "delta")
    if body.on_mismatch == "rerender":
        same = _common(held, whole)
        return Delta(messages, max(same, 1), whole[max(same, 1) :], True, "rerender")
    if body.on_mismatch == "append_delta":
        bare = await text.chat(before, add_generation_prompt=False, options=body.chat_template_kwargs)
        return Delta(messages, len(held), whole[_common(bare, whole) :], False, "append_delta")
    raise ApiError(
        400,
        "the chat template does not begin with what the branch holds; see on_mismatch",
        code="template_not_prefix_stable",
        param="messages",
    )


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


def _common(left: list[int], right: list[int]) -> int:
    """How many tokens both begin with."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
